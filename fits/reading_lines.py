"""From JSON Lines to columns: each line is checked, and one that is not sound is refused and counted.

Blocks of lines are decoded at once by msgspec, which checks types and bounds as it goes. Only a block that has a fault
in it, or a header, is gone through line by line. polars' own reader takes three times as long, and does not say what it
made of a fraction, a truth value or a missing field where a number was to be.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter, gt
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import msgspec
import numpy as np
import polars as pl
import zstandard
from jaxtyping import Int

from akjax.step_log import VERSION, LogHeader, Untaught

from .reading_schema import LIST_COLUMNS, SCHEMA, FilePart, LogError, Refusals

# Bytes that are decoded at once.
_BLOCK = 1 << 22
# Of compressed ones, as each may stand for thirty thousand.
_COMPRESSED = 1 << 12
# A step of 1,000 requests has less than 50 kB. What is longer was not written by akjax, and is not kept in memory.
_LONGEST_LINE = 1 << 24
# Of a table, steps by the requests of the step with most: some block may hold a step that is much wider than others.
_MOST_CELLS = 1 << 22

_EXPECTED = 'a step log begins with a line like {"time":1790000000.0,...,"kind":"header","version":1}'
_FAULTS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

# A float64 holds these exactly.
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Some = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
_Request = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Few = Annotated[int, msgspec.Meta(ge=0, le=2**15 - 1)]
_Drafted = Annotated[int, msgspec.Meta(ge=1, le=2**15 - 1)]
_Mode = Annotated[int, msgspec.Meta(ge=0, le=2)]


class Step(msgspec.Struct, gc=False):
    """`StepRecord` with the bounds of its numbers, and without defaults: a line that says no kind is none of ours.

    Tuples, as millions of lists keep the garbage collector busy: they take three times as long.
    """

    time: float
    gap_ms: Annotated[float, msgspec.Meta(ge=0)] | None
    untaught: Untaught
    tokens: _Some
    requests: _Some
    prefill: _Count
    context: _Count
    drafts: _Count
    drafting: _Count
    uneven: bool
    k: _Count
    forced: bool
    predicted_ms: float | None
    request: tuple[_Request, ...]
    drafted: tuple[_Drafted, ...]
    accepted: tuple[_Few, ...]
    cut: tuple[_Few, ...]
    mode: tuple[_Mode, ...]
    kind: Literal["step"]


class _Any(msgspec.Struct):
    """What a line of a log has in any version."""

    kind: Any = None
    version: Any = None


_steps = msgspec.json.Decoder(Step)
_any = msgspec.json.Decoder(_Any)
_headers = msgspec.json.Decoder(LogHeader)


def read_lines(file: BinaryIO, path: Path, *, compressed: bool, block: int = _BLOCK) -> FilePart:
    """A file of JSON Lines.

    Args:
        file: open for reading.
        path: of it, for messages.
        compressed: by Zstandard.
        block: bytes to decode at once.

    Raises:
        LogError: it is no step log, or of a later version.
    """
    refusals = Refusals(path)
    pieces = _decompressed(file, path, refusals, block) if compressed else iter(lambda: file.read(block), b"")
    headers: list[LogHeader] = []
    frames: list[pl.DataFrame] = []
    number = 1  # of the next line
    for lines in _whole_lines(pieces):
        rest = lines
        if not headers:
            first, newline, rest = lines.partition(b"\n")
            headers.append(_header(first, path, number))
            number += len(newline)
        frame = _all_sound(rest, len(headers) - 1)
        if frame is None:
            frame = _one_by_one(rest, number, path, headers, refusals)
        frames.append(frame)
        number += rest.count(b"\n")
    if not headers:
        found = [f"{each.reason}, {each.found}" for each in refusals.report()]
        raise LogError(f"{path} {f'cannot be read: {found[0]}' if found else 'is empty'}; {_EXPECTED}")
    return FilePart(tuple(headers), pl.concat(frames), refusals.report())


def _decompressed(file: BinaryIO, path: Path, refusals: Refusals, block: int) -> Iterator[bytes]:
    """What a file of Zstandard frames says, up to where it is damaged or cut off."""
    decoder = zstandard.ZstdDecompressor()
    frame = decoder.decompressobj()
    pieces: list[bytes] = []
    size, ended = 0, True
    while compressed := file.read(_COMPRESSED):
        while compressed:
            if frame.eof:
                frame = decoder.decompressobj()
            try:
                pieces.append(frame.decompress(compressed))
            except zstandard.ZstdError as error:
                refusals.add("damaged compression", 0, f"{error}; nothing after it can be read")
                yield b"".join(pieces)
                return
            compressed = frame.unused_data if frame.eof else b""
            ended = frame.eof
            size += len(pieces[-1])
        if size >= block:
            yield b"".join(pieces)
            pieces, size = [], 0
    yield b"".join(pieces)
    if not ended:
        refusals.add("compression cut short", 0, "the file ends within compressed data, so lines are missing")


def _whole_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The pieces cut behind newlines; only the last may end without one. An overlong line loses its end."""
    rest: list[bytes] = []
    size = 0
    for piece in pieces:
        end = piece.rfind(b"\n") + 1
        if end:
            yield b"".join([*rest, piece[:end]])
            rest, size = [piece[end:]], len(piece) - end
        elif size < _LONGEST_LINE:
            rest.append(piece)
            size += len(piece)
    if size:
        yield b"".join(rest)


def _header(line: bytes, path: Path, number: int) -> LogHeader:
    """The header that a line is; anything else is an error that says what the line is."""
    try:
        record = _any.decode(line)
    except _FAULTS:
        raise LogError(f"{path} is no step log: line {number} is {_shown(line)}, no JSON object; {_EXPECTED}") from None
    if record.kind != "header":
        kind = "a JSON object without a kind" if record.kind is None else f"a record of kind {_shown(record.kind)}"
        raise LogError(f"{path} is no step log: line {number} is {kind}, {_shown(line)}; {_EXPECTED}")
    if type(record.version) is not int or record.version < 1:
        raise LogError(f"{path}: the header in line {number} is of version {_shown(record.version)}, which never was")
    if record.version > VERSION:
        raise LogError(
            f"{path} is a step log of version {record.version}, and this akjax reads versions up to {VERSION}: read it"
            " with the akjax that wrote it, or a later one"
        )
    try:
        return _headers.decode(line)
    except _FAULTS as error:
        raise LogError(f"{path}: the header in line {number} cannot be read: {error}") from None


def _shown(what: object) -> str:
    """The beginning of it, on one line."""
    text = repr(what[:60] if isinstance(what, bytes) else what)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _all_sound(lines: bytes, log: int) -> pl.DataFrame | None:
    """The lines as columns; None if any is not a sound step."""
    try:
        steps = _steps.decode_lines(lines)
    except _FAULTS:
        return None
    # A value has a line of its own, or there are fewer values than lines, as there are with empty lines.
    if len(steps) != lines.count(b"\n") + (not lines.endswith(b"\n") and lines != b"") or any(map(_fault, steps)):
        return None
    return _columns(steps, np.full(len(steps), log, np.int32))


def _one_by_one(lines: bytes, number: int, path: Path, headers: list[LogHeader], refusals: Refusals) -> pl.DataFrame:
    """The sound ones of the lines as columns; `headers` gets those that are among them."""
    steps: list[Step] = []
    logs: list[int] = []
    *whole, torn = lines.split(b"\n")
    for at, line in enumerate((*whole, torn), number):
        if not line.strip():
            continue
        try:
            step = _steps.decode(line)
        except _FAULTS as error:
            if _is_header(line):
                headers.append(_header(line, path, at))
                continue
            refusals.add(_reason(line, str(error), is_last=line is torn), at, f"{error}: {_shown(line)}")
            continue
        if (fault := _fault(step)) is not None:
            refusals.add(fault, at, _shown(line))
            continue
        steps.append(step)
        logs.append(len(headers) - 1)
    return _columns(steps, np.asarray(logs, np.int32))


def _is_json(line: bytes) -> bool:
    try:
        msgspec.json.decode(line)
    except _FAULTS:
        return False
    return True


def _is_header(line: bytes) -> bool:
    try:
        return _any.decode(line).kind == "header"
    except _FAULTS:
        return False


def _reason(line: bytes, error: str, *, is_last: bool) -> str:
    """The kind of fault that a line has which is no step, by what msgspec says of it."""
    if len(line) >= _LONGEST_LINE:
        return "too long a line"
    if not _is_json(line):
        return "torn last line" if is_last else "not JSON"
    try:
        kind = _any.decode(line).kind
    except _FAULTS:
        return "no JSON object"
    if kind is None:
        return "no kind"
    if kind != "step":
        return "unknown kind"
    if "missing required field" in error:
        return "missing field"
    if "Invalid enum value" in error:
        return "unknown value"
    if ">= 0" in error:
        return "negative number"
    if ">= 1" in error:
        return "number below 1"
    if "<= " in error or "out of range" in error.lower():
        return "too large a number"
    return "wrong type"


def _fault(step: Step) -> str | None:
    """What is wrong with a step whose fields are right each by itself."""
    drafted, accepted = step.drafted, step.accepted
    rows = len(step.request)
    if not len(drafted) == len(accepted) == len(step.cut) == len(step.mode) == rows:
        return "lists of unequal length"
    if any(map(gt, accepted, drafted)):
        return "more accepted than drafted"
    if step.tokens < step.requests:
        return "fewer tokens than requests"
    if len(set(step.request)) != rows:
        return "a request twice in a step"
    return None


def _columns(steps: list[Step], logs: Int[np.ndarray, " steps"]) -> pl.DataFrame:
    """Steps that are sound as a frame of `SCHEMA`."""
    scalars = [name for name in SCHEMA if name != "log" and name not in LIST_COLUMNS]
    size = np.fromiter((len(step.request) for step in steps), np.int64, len(steps))
    if len(steps) > 1 and len(steps) * int(size.max()) > _MOST_CELLS:
        half = len(steps) // 2
        return pl.concat([_columns(steps[:half], logs[:half]), _columns(steps[half:], logs[half:])])
    # Lists go through tables as wide as the longest, which polars then cuts: that is much quicker than taking lists.
    within = np.arange(size.max(initial=0)) < size[:, None]
    columns = [pl.Series("log", logs)]
    columns += [pl.Series(name, [*map(attrgetter(name), steps)], SCHEMA[name]) for name in scalars]
    if not within.size:
        columns += [pl.Series(name, [[] for _ in steps], SCHEMA[name]) for name in LIST_COLUMNS]
        return pl.DataFrame(columns)
    for name, dtype in zip(LIST_COLUMNS, (np.int32, np.int16, np.int16, np.int16, np.int8), strict=True):
        table = np.zeros(within.shape, dtype)
        table[within] = np.fromiter(chain.from_iterable(map(attrgetter(name), steps)), dtype, int(size.sum()))
        columns.append(pl.Series(name, table).cast(SCHEMA[name]))
    frame = pl.DataFrame(columns)
    if within.all():
        return frame
    return frame.with_columns(pl.col(*LIST_COLUMNS).list.head(pl.lit(pl.Series(size))))
