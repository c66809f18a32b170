"""Whether a Parquet file is as it was written.

polars panics over some damaged files, and over others it ends the process, asking for more memory than there is. So a
file of ours carries a sum of all its bytes, which is made with zeros in its own place, and is not decoded without.
"""

import hashlib
from pathlib import Path
from typing import BinaryIO

# What is replaced by the sum; as JSON has it, in the metadata.
UNSEALED = "0" * 64

_MARK = b'"sha256":"'
_MAGIC = b"PAR1"
_BLOCK = 1 << 20


def seal(path: Path) -> None:
    """Puts the sum into a Parquet file whose metadata holds `"sha256":"` and `UNSEALED`.

    Raises:
        ValueError: they do not.
        OSError: it cannot be read or written.
    """
    with path.open("r+b") as file:
        place = _place(file)
        if place is None or _given(file, place) != UNSEALED.encode():
            raise ValueError(f"{path} has no place for a sum")
        told = _sum(file, place)
        file.seek(place)
        file.write(told.encode())


def is_sealed(path: Path) -> bool:
    """Whether the file has a sum, and it is right.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        place = _place(file)
        return place is not None and _given(file, place) == _sum(file, place).encode()


def _place(file: BinaryIO) -> int | None:
    """Where in the file the sum is; None if there is none."""
    end = file.seek(0, 2)
    file.seek(max(end - 8, 0))
    last = file.read()
    size = int.from_bytes(last[:4], "little") + 8
    if last[4:] != _MAGIC or size > end:
        return None
    file.seek(end - size)
    at = file.read().find(_MARK)
    place = end - size + at + len(_MARK)
    return place if at >= 0 and place + len(UNSEALED) <= end else None


def _given(file: BinaryIO, place: int) -> bytes:
    file.seek(place)
    return file.read(len(UNSEALED))


def _sum(file: BinaryIO, place: int) -> str:
    """Of all bytes, those of the sum as zeros."""
    digest = hashlib.sha256()
    file.seek(0)
    left = place
    while left and (block := file.read(min(left, _BLOCK))):
        digest.update(block)
        left -= len(block)
    digest.update(UNSEALED.encode())
    file.seek(place + len(UNSEALED))
    while block := file.read(_BLOCK):
        digest.update(block)
    return digest.hexdigest()
