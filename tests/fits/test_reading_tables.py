"""Tables of measured steps, whatever their columns are called."""

from pathlib import Path

import jax
import numpy as np
import polars as pl
import pytest

from akjax.fits.reading import read_table


def csv(folder: Path, text: str, name: str = "table.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_quantities_are_read_from_the_columns_that_are_named(tmp_path: Path) -> None:
    path = csv(tmp_path, "batch,spec,time,kv,pf,note\n2, 6 ,10.5,100,7,x\n1,0,5,20,0,y\n")
    columns = {"requests": "batch", "drafts": "spec", "ms": "time", "context": "kv", "prefill": "pf"}
    steps = read_table(path, columns)
    told = {name: getattr(steps.features, name).tolist() for name in steps.features.__dataclass_fields__}
    assert told == {
        "tokens": [8, 1],
        "requests": [2, 1],
        "drafting": [0, 0],
        "context": [100, 20],
        "prefill": [7, 0],
        "uneven": [0, 0],
    }
    assert (steps.ms.tolist(), steps.row.tolist(), steps.log.tolist(), steps.left_out) == (
        [10.5, 5],
        [0, 1],
        [0, 0],
        {},
    )
    assert all(leaf.dtype == np.float64 and leaf.shape == (2,) for leaf in jax.tree.leaves(steps.features))


@pytest.mark.parametrize(
    ("text", "requests"),
    [("tokens,ms\n8,1\n", 8), ("tokens,drafts,ms\n8,6,1\n", 2), ("tokens,requests,ms\n8,3,1\n", 3)],
)
def test_what_a_table_does_not_tell_of_requests_follows_from_the_rest(
    tmp_path: Path, text: str, requests: float
) -> None:
    features = read_table(csv(tmp_path, text)).features
    assert (features.tokens.tolist(), features.requests.tolist()) == ([8], [requests])


def test_parquet_and_tabs_give_the_same(tmp_path: Path) -> None:
    frame = pl.DataFrame({"tokens": [1, 2, None], "ms": [1.5, float("inf"), 2.0], "drafting": ["3", "x", "1"]})
    frame.write_parquet(tmp_path / "table.parquet")
    frame.write_csv(tmp_path / "table.tsv", separator="\t")
    for name in ("table.parquet", "table.tsv"):
        steps = read_table(tmp_path / name)
        assert (steps.features.tokens.tolist(), steps.ms.tolist(), steps.features.drafting.tolist()) == (
            [1],
            [1.5],
            [3],
        )
        assert steps.left_out == {"tokens is no finite number": 1, "ms is no finite number": 1}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("8,2,x,0", "ms is no finite number"),
        ("8,2,nan,0", "ms is no finite number"),
        ("8,2,inf,0", "ms is no finite number"),
        ("8,2,,0", "ms is no finite number"),
        ("8,2", "ms is no finite number"),
        (",2,1,0", "tokens is no finite number"),
        ("8,2,0,0", "ms is not above 0"),
        ("8,2,-1,0", "ms is not above 0"),
        ("8,0,1,0", "fewer than one request"),
        ("1,2,1,0", "fewer tokens than requests"),
        ("8,2,1,-4", "context is negative"),
    ],
)
def test_rows_that_are_no_step_are_left_out_and_counted(tmp_path: Path, row: str, reason: str) -> None:
    steps = read_table(csv(tmp_path, f"tokens,requests,ms,context\n4,2,3,5\n{row}\n{row}\n9,2,4,5\n"))
    assert steps.ms.tolist() == [3, 4]
    assert steps.row.tolist() == [0, 3]
    assert steps.left_out == {reason: 2}


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"ms": "time", "tokens": "n"}, "has no column 'time'; it has 'n', 'took', 'b'"),
        ({"ms": "took", "tokens": "n", "speed": "b"}, "'speed' is no quantity of a step; there are ms, tokens"),
        ({"tokens": "n"}, "has to tell ms, and tokens or both requests and drafts"),
        ({"ms": "took", "requests": "b"}, "both requests and drafts"),
        (None, "is to tell nothing, of its columns 'n', 'took', 'b'"),
    ],
)
def test_columns_that_do_not_fit_are_told_with_those_there_are(
    tmp_path: Path, columns: dict[str, str] | None, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        read_table(csv(tmp_path, "n,took,b\n1,2,3\n"), columns)


@pytest.mark.parametrize("content", [b"", b"PAR1 and no more", b"(\xb5/\xfd", b"tokens,ms\n1,2,3,4\n"])
def test_what_is_no_table_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="cannot be read as a table"):
        read_table(path)


@pytest.mark.parametrize(("at", "bit"), [(41, 0), (43, 0)], ids=["ends the process", "panics"])
def test_damage_that_polars_does_not_survive_is_refused(tmp_path: Path, at: int, bit: int) -> None:
    path = tmp_path / "table.parquet"
    frame = pl.DataFrame({"tokens": [1, 2, None], "ms": [1.5, 2.0, 3.0]})
    frame.write_parquet(path, compression="uncompressed")
    content = path.read_bytes()
    path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
    with pytest.raises(ValueError, match=r"cannot be read as a table in Parquet, it may be damaged: .+"):
        read_table(path)
