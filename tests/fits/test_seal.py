"""The sum that tells whether a Parquet file is as it was written."""

from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from akjax.fits.seal import UNSEALED, is_sealed, seal


def written(path: Path) -> Path:
    pl.DataFrame({"a": range(300)}).write_parquet(path, metadata={"mine": f'{{"sha256":"{UNSEALED}"}}'})
    return path


def test_a_file_is_sealed_and_reads_as_before(tmp_path: Path) -> None:
    path = written(tmp_path / "file")
    assert not is_sealed(path)
    seal(path)
    assert is_sealed(path)
    assert pl.read_parquet(path)["a"].to_list() == [*range(300)]
    assert UNSEALED not in pl.read_parquet_metadata(path)["mine"]
    with pytest.raises(ValueError, match="has no place for a sum"):
        seal(path)


@given(data=st.data())
def test_whatever_is_changed_breaks_the_seal(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = written(tmp_path_factory.mktemp("files") / "file")
    seal(path)
    content = path.read_bytes()
    at, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
    path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
    assert not is_sealed(path)
    path.write_bytes(content[:at])
    assert not is_sealed(path)
    path.write_bytes(content[:at] + b"\0" + content[at:])
    assert not is_sealed(path)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1PAR1", b"\xff\xff\xff\xffPAR1", b'"sha256":"\x0b\0\0\0PAR1'])
def test_what_has_no_place_for_a_sum_is_not_sealed(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert not is_sealed(path)
    with pytest.raises(ValueError, match="has no place for a sum"):
        seal(path)
