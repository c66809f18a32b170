"""Step logs as they are read: whole, torn, hostile, foreign, of several files and engines."""

import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_args

import msgspec
import polars as pl
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from akjax.fits import reading_lines
from akjax.fits.reading import SCHEMA, LogError, StepLog, convert, read_log
from akjax.fits.reading_lines import Step, read_lines
from akjax.fits.seal import UNSEALED, seal
from akjax.step_log import VERSION, LogHeader, StepRecord, Untaught

HEADER = LogHeader(time=1.7e9, run="one", model="tiny", draft_limit=4, levels=[0, 2, 4], experts=64, top_k=4)


def step(**changes: Any) -> StepRecord:
    whole: dict[str, Any] = {
        "time": 1.7e9 + 1.5,
        "gap_ms": 12.25,
        "untaught": "",
        "tokens": 8,
        "requests": 2,
        "prefill": 0,
        "context": 500,
        "drafts": 6,
        "drafting": 4,
        "uneven": True,
        "k": 4,
        "forced": False,
        "predicted_ms": 12.0,
        "request": [0, 1],
        "drafted": [4, 2],
        "accepted": [1, 2],
        "cut": [0, 2],
        "mode": [0, 1],
    }
    return StepRecord(**(whole | changes))


def lines(*records: Any) -> bytes:
    return b"".join((r if isinstance(r, bytes) else msgspec.json.encode(r)) + b"\n" for r in records)


def written(folder: Path, *records: Any, name: str = "log.jsonl", tail: bytes = b"") -> Path:
    path = folder / name
    path.write_bytes(lines(*records) + tail)
    return path


def without(field: str, record: StepRecord | LogHeader) -> bytes:
    told = asdict(record)
    del told[field]
    return msgspec.json.encode(told)


def changed(record: StepRecord | LogHeader, **values: Any) -> bytes:
    return msgspec.json.encode(asdict(record) | values)


def rows_of(log: StepLog) -> list[dict[str, Any]]:
    return log.steps.drop("log").to_dicts()


def as_rows(records: Iterable[StepRecord]) -> list[dict[str, Any]]:
    rows = [asdict(record) for record in records]
    for row in rows:
        del row["kind"]
    return rows


def numbers(most: int, least: int = 0) -> st.SearchStrategy[int]:
    return st.integers(least, most) | st.sampled_from([least, most])


FINITE = st.floats(allow_nan=False, allow_infinity=False)
COUNTS = numbers(2**53)


# Of fields, as types that are checked where they are made use randomness, which strategies may not.
@st.composite
def step_fields(draw: st.DrawFn) -> dict[str, Any]:
    request = draw(st.lists(numbers(2**31 - 1), max_size=6, unique=True))
    drafted = [draw(numbers(2**15 - 1, 1)) for _ in request]
    requests = draw(numbers(2**53, 1))
    return dict(
        time=draw(FINITE),
        gap_ms=draw(st.none() | st.floats(0, 1e300)),
        untaught=draw(st.sampled_from(get_args(Untaught))),
        tokens=draw(st.integers(requests, 2**53)),
        requests=requests,
        prefill=draw(COUNTS),
        context=draw(COUNTS),
        drafts=draw(COUNTS),
        drafting=draw(COUNTS),
        uneven=draw(st.booleans()),
        k=draw(COUNTS),
        forced=draw(st.booleans()),
        predicted_ms=draw(st.none() | FINITE),
        request=request,
        drafted=drafted,
        accepted=[draw(st.integers(0, d)) for d in drafted],
        cut=[draw(numbers(2**15 - 1)) for _ in request],
        mode=[draw(st.integers(0, 2)) for _ in request],
    )


HEADERS = st.builds(
    dict,
    time=FINITE,
    run=st.text(),
    model=st.text(),
    draft_limit=st.integers(0, 20),
    levels=st.lists(st.integers(0, 20)),
    experts=st.none() | st.integers(1, 500),
    captured_sizes=st.lists(st.integers(1, 512)),
    expert_parallel=st.booleans(),
    versions=st.dictionaries(st.text(), st.text()),
)


@given(header_fields=HEADERS, steps=st.lists(step_fields(), max_size=20), data=st.data())
def test_whatever_is_written_is_read_from_lines_zstd_and_parquet(
    tmp_path_factory: pytest.TempPathFactory,
    header_fields: dict[str, Any],
    steps: list[dict[str, Any]],
    data: st.DataObject,
) -> None:
    header, records = LogHeader(**header_fields), [StepRecord(**each) for each in steps]
    folder = tmp_path_factory.mktemp("logs")
    plain = written(folder, header, *records)
    compressed = folder / "log.jsonl.zst"
    # Some frames one after the other, as appending makes them.
    cut = data.draw(st.integers(0, plain.stat().st_size))
    parts = plain.read_bytes()[:cut], plain.read_bytes()[cut:]
    compressed.write_bytes(b"".join(zstandard.compress(part) for part in parts))
    parquet = folder / "log.parquet"
    convert(compressed, parquet)
    for path in (plain, compressed, parquet):
        log = read_log(path)
        assert log.headers == (header,)
        assert log.refusals == ()
        assert rows_of(log) == as_rows(records)
        assert log.steps.schema == SCHEMA
    with plain.open("rb") as file:
        in_little_blocks = read_lines(file, plain, compressed=False, block=data.draw(st.integers(1, 300)))
    assert in_little_blocks.steps.equals(read_log(plain).steps)


def test_columns_and_checks_are_of_every_field_of_a_record() -> None:
    names = {field.name for field in fields(StepRecord)}
    assert {*Step.__struct_fields__} == names
    assert {*SCHEMA} == names - {"kind"} | {"log"}


@given(steps=st.lists(step_fields(), max_size=10), seed=st.integers())
def test_sound_lines_are_the_same_with_and_without_unsound_ones_among_them(
    tmp_path_factory: pytest.TempPathFactory, steps: list[dict[str, Any]], seed: int
) -> None:
    records = [StepRecord(**each) for each in steps]
    folder = tmp_path_factory.mktemp("logs")
    rng = random.Random(seed)
    junk = [b"\x00\x00", b"{", b"[1]", b'{"kind":"step"}', b"  \r", b"null"]
    mixed: list[Any] = [*records]
    for _ in range(rng.randint(1, 6)):
        mixed.insert(rng.randint(0, len(mixed)), rng.choice(junk))
    clean = read_log(written(folder, HEADER, *records, name="clean"))
    dirty = read_log(written(folder, HEADER, *mixed, name="dirty"))
    assert dirty.steps.equals(clean.steps)
    assert sum(dirty.refused.values()) == len([each for each in mixed if isinstance(each, bytes) and each.strip()])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"not at all", "not JSON"),
        (b'{"kind":"step",', "not JSON"),
        (lines(step())[:-1] + lines(step())[:-1], "not JSON"),
        (lines(step())[:-1] + b"," + lines(step())[:-1], "not JSON"),
        (b"\x00" * 4096, "not JSON"),
        (b'{"kind":"\xff\xfe"}', "not JSON"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not JSON"),
        (changed(step(), gap_ms=1).replace(b'"gap_ms":1', b'"gap_ms":NaN'), "not JSON"),
        (changed(step(), gap_ms=1).replace(b'"gap_ms":1', b'"gap_ms":1e999'), "not JSON"),
        (b"7", "no JSON object"),
        (b"[]", "no JSON object"),
        (b"{}", "no kind"),
        (without("kind", step()), "no kind"),
        (b'{"kind":"pause"}', "unknown kind"),
        (b'{"kind":["step"]}', "unknown kind"),
        (without("tokens", step()), "missing field"),
        (without("mode", step()), "missing field"),
        (changed(step(), untaught="tired"), "unknown value"),
        (changed(step(), tokens="8"), "wrong type"),
        (changed(step(), tokens=8.5), "wrong type"),
        (changed(step(), tokens=True), "wrong type"),
        (changed(step(), tokens=None), "wrong type"),
        (changed(step(), uneven=1), "wrong type"),
        (changed(step(), request=3), "wrong type"),
        (changed(step(), accepted=[1, None]), "wrong type"),
        (changed(step(), context=-1), "negative number"),
        (changed(step(), gap_ms=-0.5), "negative number"),
        (changed(step(), accepted=[-1, 0]), "negative number"),
        (changed(step(), tokens=0), "number below 1"),
        (changed(step(), drafted=[0, 2], accepted=[0, 0]), "number below 1"),
        (changed(step(), tokens=2**60), "too large a number"),
        (changed(step(), tokens=1).replace(b'"tokens":1', b'"tokens":1' + b"0" * 30), "too large a number"),
        (changed(step(), drafted=[2**15, 2]), "too large a number"),
        (changed(step(), mode=[0, 3]), "too large a number"),
        (changed(step(), cut=[0]), "lists of unequal length"),
        (changed(step(), request=[]), "lists of unequal length"),
        (changed(step(), accepted=[4, 3]), "more accepted than drafted"),
        (changed(step(), tokens=1, requests=2), "fewer tokens than requests"),
        (changed(step(), request=[1, 1]), "a request twice in a step"),
    ],
)
def test_an_unsound_line_is_refused_and_counted_by_its_reason(tmp_path: Path, line: bytes, reason: str) -> None:
    first, last = step(k=1), step(k=2)
    path = written(tmp_path, HEADER, first, line, line, last)
    log = read_log(path)
    assert rows_of(log) == as_rows([first, last])
    assert log.refused == {reason: 2}
    (refused,) = log.refusals
    assert (refused.path, refused.rows, refused.line) == (str(path), 2, 3)
    assert len(str(refused)) < len(str(path)) + 400
    assert str(refused).isprintable()


def test_fields_of_a_later_akjax_are_ignored(tmp_path: Path) -> None:
    path = written(tmp_path, changed(HEADER, colour="red"), changed(step(), mood={"a": [1]}))
    log = read_log(path)
    assert (log.headers, rows_of(log), log.refusals) == ((HEADER,), as_rows([step()]), ())


def test_empty_lines_and_carriage_returns_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(lines(HEADER, b"", step(k=1), b"  ", step(k=2)).replace(b"\n", b"\r\n"))
    log = read_log(path)
    assert (rows_of(log), log.refusals) == (as_rows([step(k=1), step(k=2)]), ())


def test_a_record_over_several_lines_is_none(tmp_path: Path) -> None:
    spread = msgspec.json.format(msgspec.json.encode(step()), indent=2)
    log = read_log(written(tmp_path, HEADER, step(), spread))
    assert len(log.steps) == 1
    assert sum(log.refused.values()) == spread.count(b"\n") + 1


@pytest.mark.parametrize("block", [1, 7, 1 << 22])
def test_wherever_a_file_is_torn_all_whole_lines_are_read_and_the_rest_is_told(tmp_path: Path, block: int) -> None:
    whole = lines(HEADER, step(k=1), step(k=2))
    begins = len(lines(HEADER, step(k=1)))
    path = tmp_path / "log.jsonl"
    for end in range(begins, len(whole)):
        path.write_bytes(whole[:end])
        with path.open("rb") as file:
            part = read_lines(file, path, compressed=False, block=block)
        # Only its newline may be missing for a line to be whole.
        is_torn = begins < end < len(whole) - 1
        assert part.steps["k"].to_list() == ([1] if end < len(whole) - 1 else [1, 2])
        assert [(r.reason, r.rows, r.line) for r in part.refusals] == [("torn last line", 1, 3)] * is_torn


def test_a_whole_last_line_without_newline_that_is_no_step_is_not_called_torn(tmp_path: Path) -> None:
    assert read_log(written(tmp_path, HEADER, tail=b'{"kind":"pause"}')).refused == {"unknown kind": 1}


def test_a_cut_or_damaged_zstd_file_gives_what_comes_before(tmp_path: Path) -> None:
    rng = random.Random(0)
    records = [step(time=rng.random(), context=rng.randrange(10**9)) for _ in range(5000)]
    # Small frames, as a log has that is compressed as it is written.
    frames = [zstandard.compress(lines(*records[at : at + 500])) for at in range(0, 5000, 500)]
    begin = zstandard.compress(lines(HEADER)) + b"".join(frames[:-1])
    path = tmp_path / "log.jsonl.zst"
    path.write_bytes(begin + frames[-1][:-100])
    log = read_log(path)
    assert log.refused["compression cut short"] == 1
    assert rows_of(log) == as_rows(records[: len(log.steps)])
    assert len(log.steps) >= 4500
    path.write_bytes(begin + b"\x00 damaged")
    log = read_log(path)
    assert log.refused == {"damaged compression": 1}
    assert rows_of(log) == as_rows(records[:4500])


def test_a_step_much_wider_than_others_takes_no_room_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_lines, "_MOST_CELLS", 20)
    many = [1] * 50
    wide = step(request=[*range(50)], drafted=many, accepted=many, cut=many, mode=many)
    records = [*[step()] * 7, wide, *[step()] * 8, step(request=[], drafted=[], accepted=[], cut=[], mode=[])]
    assert rows_of(read_log(written(tmp_path, HEADER, *records))) == as_rows(records)


def test_an_endless_line_is_refused_without_being_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_lines, "_LONGEST_LINE", 10_000)
    endless = b'{"kind":"step","x":"' + b"x" * 200_000 + b'"}'
    path = written(tmp_path, HEADER, step(k=1), endless, step(k=2))
    with path.open("rb") as file:
        part = read_lines(file, path, compressed=False, block=1000)
    assert part.steps["k"].to_list() == [1, 2]
    assert [(r.reason, r.rows) for r in part.refusals] == [("too long a line", 1)]
    bomb = tmp_path / "bomb.zst"
    bomb.write_bytes(zstandard.compress(lines(HEADER) + b"\x00" * (1 << 28)))
    assert bomb.stat().st_size < 1 << 16
    assert read_log(bomb).refused == {"too long a line": 1}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty"),
        (b"\n", "no JSON object"),
        (b"\x7fELF\x02\x01\x01\x00" * 100, "no JSON object"),
        (b"a,b\n1,2\n", "no JSON object"),
        (b"[1, 2]\n", "no JSON object"),
        (b'{"loss": 0.25}\n', "without a kind"),
        (lines(step()), "a record of kind 'step'"),
        (lines(HEADER)[:40], "no JSON object"),
        (b'{"kind":"header","time":1.0}\n', "of version None, which never was"),
        (b'{"kind":"header","version":0}\n', "of version 0"),
        (b'{"kind":"header","version":true}\n', "of version True"),
        (b'{"kind":"header","version":1}\n', "cannot be read: Object missing required field `time`"),
        (changed(HEADER, levels="all"), "cannot be read: Expected `array`"),
        (changed(HEADER, version=VERSION + 1), f"of version {VERSION + 1}, .* up to {VERSION}"),
        (b"\x1f\x8b\x08\x00abc", "compressed by gzip"),
        (zstandard.compress(b"just text"), "no JSON object"),
        (b"\x28\xb5\x2f\xfd garbage", "damaged compression|cut short"),
        (b"PAR1 nothing of the kind PAR1", "no step log that convert wrote in Parquet"),
    ],
)
def test_what_is_no_step_log_is_refused_by_what_it_is(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(LogError, match=complaint) as refusal:
        read_log(path)
    assert str(path) in str(refusal.value)
    assert len(str(refusal.value)) < len(str(path)) + 400


def test_a_later_version_in_the_middle_is_refused_too(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER, step(), changed(HEADER, version=7), step())
    with pytest.raises(LogError, match="version 7"):
        read_log(path)


def test_files_of_one_run_are_one_log_and_those_of_others_are_not(tmp_path: Path) -> None:
    other = LogHeader(time=5.0, run="two", model="other")
    written(tmp_path, HEADER, step(k=0), name="a.jsonl")
    written(tmp_path, other, step(k=1), name="a.jsonl.00001")
    written(tmp_path, replace(HEADER, time=9e9), step(k=2), name="a.jsonl.00002")
    nameless = LogHeader(time=1.0)
    # Two files in one, as cat makes them.
    written(tmp_path, nameless, step(k=3), nameless, step(k=4), other, step(k=5), name="b.jsonl")
    log = read_log([tmp_path / "a.jsonl*", tmp_path / "b.jsonl"])
    assert log.headers == (HEADER, other, nameless, nameless)
    assert log.steps["log"].to_list() == [0, 0, 1, 1, 2, 3]
    assert log.steps["k"].to_list() == [0, 2, 1, 5, 3, 4]
    assert [path.name for path in log.paths] == ["a.jsonl", "a.jsonl.00001", "a.jsonl.00002", "b.jsonl"]
    one_file = convert([tmp_path / "a.jsonl*", tmp_path / "b.jsonl"], tmp_path / "all.parquet")
    back = read_log(tmp_path / "all.parquet")
    assert back.headers == log.headers
    assert back.steps.equals(log.steps)
    assert one_file.steps.equals(log.steps)


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER, step())
    (tmp_path / "link.jsonl").symlink_to(path)
    log = read_log([path, str(tmp_path / "*.jsonl"), tmp_path / "." / "log.jsonl"])
    assert (len(log.paths), len(log.steps)) == (1, 1)


def test_a_name_with_wildcards_in_it_is_a_file_if_there_is_one(tmp_path: Path) -> None:
    assert len(read_log(written(tmp_path, HEADER, step(), name="log[1].jsonl")).steps) == 1


@pytest.mark.parametrize(
    ("named", "error", "complaint"),
    [
        (lambda folder: folder / "none.jsonl", FileNotFoundError, "none.jsonl"),
        (lambda folder: folder / "*.jsonl", FileNotFoundError, r"no file fits .*\*.jsonl"),
        (lambda folder: folder, IsADirectoryError, "is a folder: name its files"),
        (lambda folder: [], ValueError, "no step log was named"),
    ],
)
def test_files_that_are_not_there_are_named(
    tmp_path: Path, named: Callable[[Path], Any], error: type[Exception], complaint: str
) -> None:
    with pytest.raises(error, match=complaint):
        read_log(named(tmp_path))


def test_a_log_without_steps_is_one(tmp_path: Path) -> None:
    log = read_log(written(tmp_path, HEADER))
    assert (log.headers, len(log.steps), log.steps.schema) == ((HEADER,), 0, SCHEMA)


def test_what_was_refused_is_still_told_after_converting(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER, step(), b"junk", tail=b'{"ti')
    out = tmp_path / "log.parquet"
    converted = convert(path, out)
    assert converted.refused == {"not JSON": 1, "torn last line": 1}
    assert read_log(out).refusals == converted.refusals
    assert [each.name for each in tmp_path.iterdir() if "partial" in each.name] == []


def test_converting_keeps_what_is_there_if_it_fails(tmp_path: Path) -> None:
    out = tmp_path / "log.parquet"
    convert(written(tmp_path, HEADER, step()), out)
    with pytest.raises(LogError):
        convert(written(tmp_path, b"junk", name="junk"), out)
    assert len(read_log(out).steps) == 1
    with pytest.raises(ValueError, match=r"must end in \.parquet"):
        convert(out, tmp_path / "log.jsonl")


SPOILS: Sequence[tuple[str, pl.Expr, str]] = [
    ("tokens", -pl.col("tokens"), "negative numbers"),
    ("accepted", pl.col("accepted").list.head(1), "lists of unequal length"),
    ("k", pl.lit(None, pl.Int64), "nothing where there was something"),
    ("log", pl.col("log") + 1, "no header"),
    ("untaught", pl.lit("tired"), "cannot be read as a step log"),
]


@pytest.mark.parametrize(("name", "spoil", "complaint"), SPOILS)
def test_a_parquet_file_that_was_changed_is_refused(tmp_path: Path, name: str, spoil: pl.Expr, complaint: str) -> None:
    path = tmp_path / "log.parquet"
    convert(written(tmp_path, HEADER, step()), path)
    beside = {k: v for k, v in pl.read_parquet_metadata(path).items() if k.startswith("akjax")}
    beside = {k: re.sub('"sha256":"[0-9a-f]*"', f'"sha256":"{UNSEALED}"', v) for k, v in beside.items()}
    steps = pl.read_parquet(path)
    for changed, metadata, fault in (
        (steps.with_columns(spoil.alias(name)), beside, complaint),
        (steps.drop(name), beside, f"lack {name}"),
        (steps, {k: v.replace('"version":1', '"version":9') for k, v in beside.items()}, "version 9"),
        (steps, {f"other {k}": v for k, v in beside.items()}, "no step log: it has no akjax"),
    ):
        changed.write_parquet(path, metadata=metadata)
        with pytest.raises(LogError, match="the sum of its bytes is missing or wrong"):
            read_log(path)
        seal(path)
        with pytest.raises(LogError, match=fault):
            read_log(path)


def test_a_table_in_parquet_is_no_step_log(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    pl.DataFrame({"tokens": [1, 2]}).write_parquet(path)
    with pytest.raises(LogError, match="a table of your own is read by read_table"):
        read_log(path)


def test_the_fits_import_without_polars() -> None:
    check = "import sys; import akjax.fits; assert 'polars' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
