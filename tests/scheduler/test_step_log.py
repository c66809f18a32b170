"""The step log: what is in it is what was scheduled and came of it, nothing is lost, and serving never waits for it."""

import errno
import json
import os
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import msgspec
import pytest

import adaptive_engine
from adaptive_engine import DRAFT_LIMIT, pilot_of, scheduler_of, step_ms
from akjax import DraftOutcomes, StepMeasures
from akjax.fits.reading import read_log
from akjax.scheduler import AdaptiveKScheduler
from akjax.scheduler.pilot import Pilot
from akjax.scheduler.served_engine import header_of
from akjax.scheduler.served_model import Routing
from akjax.scheduler.step_log import LogFiles, LogWriter, SeenStep
from akjax.step_log import VERSION, LogHeader, StepRecord
from harness import FakeEngine, Turn, bernoulli, make_config

DEFAULT: dict[str, Any] = {"code_mode": 0}
REFERENCE: dict[str, Any] = {"code_mode": 0, "policy": "reference"}
PER_REQUEST: dict[str, Any] = {"code_mode": 0, "per_request": True}
HEADER = LogHeader(time=0.0, run="r", model="m")
# Longer than any test: the thread writes only when it is told to end.
NEVER = 1e6


# The files.


def seen(number: int, requests: int = 2) -> SeenStep:
    """A step that can be told from others by its number."""
    return SeenStep(
        time=1000.0 + number,
        gap_ms=20.5 if number else None,
        untaught="" if number else "idle",
        measures=StepMeasures(tokens=3 * requests, requests=requests, drafting=4, context=number, prefill=7),
        k=4,
        forced=False,
        predicted_ms=21.25 if number else None,
        request=range(requests),
        outcomes=DraftOutcomes(
            [f"r{request}" for request in range(requests)], *([each] * requests for each in (2, 1, 0))
        ),
        cut={},
    )


def files_of(path: Path, most_bytes: int = 10**9) -> LogFiles:
    return LogFiles(path, HEADER, most_bytes, clock=lambda: 1.0)


def write(path: Path, steps: Sequence[SeenStep], most_bytes: int = 10**9) -> list[str]:
    """Writes a log to its end; returns what was said."""
    said: list[str] = []
    writer = LogWriter(files_of(path, most_bytes), said.append, interval=NEVER)
    for step in steps:
        writer.put(step)
    writer.close()
    return said


def read(path: Path) -> tuple[LogHeader, list[StepRecord]]:
    """A file's header and records, each of the types that the schema says, no field missing and none besides."""
    first, *rest = path.read_bytes().splitlines()
    records = [msgspec.json.decode(line, type=StepRecord) for line in rest]
    assert all(json.loads(line).keys() == {*StepRecord.__dataclass_fields__} for line in rest)
    assert json.loads(first).keys() == {*LogHeader.__dataclass_fields__}
    return msgspec.json.decode(first, type=LogHeader), records


def in_order(path: Path) -> list[Path]:
    """The log's files as a glob reads them."""
    return sorted(path.parent.glob(path.name + "*"))


def numbers(path: Path) -> list[int]:
    """The steps of all files, in order."""
    return [record.context for file in in_order(path) for record in read(file)[1]]


def test_a_record_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    steps = [seen(0), seen(1), seen(2, requests=0), seen(3, requests=300)]
    (line,) = write(path, steps)
    assert str(path) in line
    header, records = read(path)
    assert header == LogHeader(time=1.0, run="r", model="m")
    assert header.version == VERSION
    assert records == [step.record() for step in steps]
    assert records[1] == StepRecord(
        time=1001.0,
        gap_ms=20.5,
        untaught="",
        tokens=6,
        requests=2,
        prefill=7,
        context=1,
        drafts=4,
        drafting=4,
        uneven=False,
        k=4,
        forced=False,
        predicted_ms=21.25,
        request=[0, 1],
        drafted=[2, 2],
        accepted=[1, 1],
        cut=[0, 0],
        mode=[0, 0],
    )


def test_a_file_that_is_full_is_followed_by_the_next_in_order_of_name(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    write(tmp_path / "other", [seen(number) for number in range(10, 14)])
    of_four = (tmp_path / "other").stat().st_size
    write(path, [seen(number) for number in range(10, 40)], most_bytes=of_four)
    files = in_order(path)
    assert [file.name for file in files] == ["steps.jsonl"] + [f"steps.jsonl.{n:05}" for n in range(1, 8)]
    assert numbers(path) == list(range(10, 40))
    assert [len(read(file)[1]) for file in files] == [4] * 7 + [2]
    assert all(read(file)[0] == read(path)[0] for file in files)
    assert all(file.stat().st_size <= of_four for file in files)


def test_a_record_that_no_file_has_room_for_gets_one_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    write(path, [seen(number, requests=100) for number in range(3)], most_bytes=1)
    assert [len(read(file)[1]) for file in in_order(path)] == [1, 1, 1]
    assert numbers(path) == [0, 1, 2]


def test_a_restart_leaves_what_was_written_and_goes_on_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for run in range(3):
        before = {file: file.read_bytes() for file in in_order(path)}
        (line,) = write(path, [seen(run)])
        assert {file: file.read_bytes() for file in before} == before
        assert str(in_order(path)[-1]) in line
    assert numbers(path) == [0, 1, 2]
    path.unlink()
    write(path, [seen(3)])
    assert numbers(path) == [1, 2, 3], "a name that came free would be read before those that are older"
    (tmp_path / "steps.jsonl.gz").touch()
    (tmp_path / "steps.jsonl.12").touch()
    write(path, [seen(4)])
    assert [len(read(tmp_path / f"steps.jsonl.0000{n}")[1]) for n in (1, 2, 3, 4)] == [1] * 4


def test_a_torn_line_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    write(path, [seen(0), seen(1)])
    torn = path.read_bytes()[:-20]
    path.write_bytes(torn)
    write(path, [seen(2)])
    assert path.read_bytes() == torn
    header, step, _ = torn.splitlines()
    assert msgspec.json.decode(header, type=LogHeader).run == "r"
    assert msgspec.json.decode(step, type=StepRecord) == seen(0).record()
    assert [record.context for record in read(tmp_path / "steps.jsonl.00001")[1]] == [2]


def test_two_engines_with_one_path_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    first, second = files_of(path, most_bytes=1), files_of(path, most_bytes=1)
    first.begin()
    second.begin()
    for number in range(3):
        first.append(seen(number).record())
        second.append(seen(10 + number).record())
    first.close()
    second.close()
    assert [len(read(file)[1]) for file in in_order(path)] == [1] * 6
    assert sorted(numbers(path)) == [0, 1, 2, 10, 11, 12]


def test_a_name_that_another_engine_took_first_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "steps.jsonl"
    write(path, [seen(0)])
    monkeypatch.setattr("akjax.scheduler.step_log.os.listdir", lambda folder: [])
    monkeypatch.setattr(Path, "exists", lambda self: False)
    files = files_of(path)
    files.begin()
    files.close()
    assert files.path.name == "steps.jsonl.00001"
    assert len(read(path)[1]) == 1


def test_a_compressed_log_can_be_read_up_to_its_last_flush(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl.zst"
    files = files_of(path)
    files.begin()
    for number in range(200):
        files.append(seen(number).record())
        if number % 10 == 9:
            files.flush()
    files.append(seen(200).record())  # what a kill would lose
    log = read_log(path)
    assert log.steps["context"].to_list() == [*range(200)]
    assert log.headers == (LogHeader(time=1.0, run="r", model="m"),)
    assert not log.refusals
    files.close()
    assert len(read_log(path).steps) == 201
    write(tmp_path / "plain.jsonl", [seen(number) for number in range(201)])
    assert path.stat().st_size < (tmp_path / "plain.jsonl").stat().st_size / 2


def test_compressed_files_follow_each_other_too(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl.zst"
    write(path, [seen(number) for number in range(100)], most_bytes=4000)
    assert len(in_order(path)) > 1
    assert all(file.stat().st_size <= 4000 for file in in_order(path))
    assert read_log(in_order(path)).steps["context"].to_list() == [*range(100)]


# The thread.


class ToldFiles(LogFiles):
    """Says when it has written."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, HEADER, 10**9)
        self.flushed = Event()

    def flush(self) -> None:
        super().flush()
        self.flushed.set()


def test_steps_are_written_while_serving_goes_on(tmp_path: Path) -> None:
    """So a kill, which closes nothing, loses little."""
    files = ToldFiles(tmp_path / "steps.jsonl")
    writer = LogWriter(files, lambda line: None, interval=1e-3)
    writer.put(seen(0))
    while not files.path.exists() or len(files.path.read_bytes().splitlines()) < 2:
        assert files.flushed.wait(60.0)
        files.flushed.clear()
    assert numbers(files.path) == [0]
    writer.close()


def test_steps_beyond_what_may_wait_are_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    said: list[str] = []
    writer = LogWriter(files_of(path), said.append, capacity=3, interval=NEVER)
    for number in range(5):
        writer.put(seen(number))
    assert writer.dropped == 2
    assert [line for line in said if "dropped" in line] == [
        f"step log: 3 steps wait to be written to {path}; more are dropped"
    ]
    writer.close()
    assert said[-1] == "step log: 2 steps were dropped, for too many waited to be written"
    assert numbers(path) == [0, 1, 2]


def test_after_its_end_it_takes_nothing_and_ends_no_second_time(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    said: list[str] = []
    writer = LogWriter(files_of(path), said.append, capacity=1, interval=NEVER)
    writer.put(seen(0))
    writer.close()
    for number in range(1, 4):
        writer.put(seen(number))
    writer.close()
    assert numbers(path) == [0]
    assert len(said) == 1


def test_a_disk_that_stands_still_does_not_keep_the_engine_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = Event()

    class Still(LogFiles):
        def begin(self) -> None:
            goes_on.wait()
            super().begin()

    monkeypatch.setattr("akjax.scheduler.step_log.CLOSE_SECONDS", 0.0)
    said: list[str] = []
    writer = LogWriter(Still(tmp_path / "steps.jsonl", HEADER, 10**9), said.append, interval=NEVER)
    writer.put(seen(0))
    writer.close()
    assert "1 steps are yet to be written" in said[0]
    goes_on.set()
    writer._thread.join()
    assert numbers(tmp_path / "steps.jsonl") == [0]


# Files that cannot be written.


def full(monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    """A disk with room for so many writes."""

    class Full(FileIO):
        left = writes

        def write(self, data: Any) -> int:
            Full.left -= 1
            if Full.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    monkeypatch.setattr("akjax.scheduler.step_log.FileIO", Full)


def missing_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return folder / "missing" / "steps.jsonl"


def a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return folder


def a_file_for_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder / "file").touch()
    return folder / "file" / "steps.jsonl"


def a_pipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def a_full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    full(monkeypatch, 0)
    return folder / "steps.jsonl"


def a_disk_that_becomes_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    full(monkeypatch, 1)
    return folder / "steps.jsonl"


def a_file_that_vanishes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    begin = LogFiles.begin

    def vanishing(self: LogFiles) -> None:
        begin(self)
        self.path.unlink()

    monkeypatch.setattr(LogFiles, "begin", vanishing)
    return folder / "steps.jsonl"


def a_file_that_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    begin = LogFiles.begin

    def replaced(self: LogFiles) -> None:
        begin(self)
        (folder / "other").touch()
        os.replace(folder / "other", self.path)

    monkeypatch.setattr(LogFiles, "begin", replaced)
    return folder / "steps.jsonl"


@pytest.mark.parametrize(
    "fault",
    [
        missing_folder,
        a_folder,
        a_file_for_a_folder,
        a_pipe,
        a_full_disk,
        a_disk_that_becomes_full,
        a_file_that_vanishes,
        a_file_that_is_replaced,
    ],
)
def test_what_cannot_be_written_ends_the_log_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Path, pytest.MonkeyPatch], Path]
) -> None:
    path = fault(tmp_path, monkeypatch)
    said: list[str] = []
    writer = LogWriter(files_of(path), said.append, capacity=5, interval=NEVER)
    writer.put(seen(0))
    writer.close()
    stopped = [line for line in said if "writes to" not in line]
    assert len(stopped) == 1, said
    assert "step log: stopped, it cannot be written: " in stopped[0]


def test_once_it_has_ended_for_a_fault_nothing_waits(tmp_path: Path) -> None:
    said: list[str] = []
    stopped = Event()

    def say(line: str) -> None:
        said.append(line)
        stopped.set()

    writer = LogWriter(files_of(tmp_path / "missing" / "steps.jsonl"), say, capacity=2, interval=NEVER)
    assert stopped.wait(60.0)
    for number in range(10):
        writer.put(seen(number))
    assert writer.dropped == 0
    assert not writer._queue
    writer.close()
    assert len(said) == 1


def test_a_write_that_takes_only_a_part_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(FileIO):
        def write(self, data: Any) -> int:
            return super().write(data[:7])

    monkeypatch.setattr("akjax.scheduler.step_log.FileIO", Slow)
    write(tmp_path / "steps.jsonl", [seen(number) for number in range(5)])
    assert numbers(tmp_path / "steps.jsonl") == [0, 1, 2, 3, 4]


# The scheduler in vLLM's own loop.


class Logged:
    """An engine that logs its steps."""

    def __init__(self, engine: FakeEngine, path: Path) -> None:
        self.engine = engine
        self.path = path
        self.turns: list[Turn] = []

    @property
    def scheduler(self) -> AdaptiveKScheduler:
        return scheduler_of(self.engine)

    @property
    def pilot(self) -> Pilot:
        return pilot_of(self.engine)

    def run(self, steps: int) -> None:
        self.turns += self.engine.run(steps)

    def end(self) -> list[StepRecord]:
        """Serves to the end and shuts down; the records, one for each output of a step."""
        self.turns += self.engine.drain()
        self.engine.check()
        assert self.scheduler.faults.count == 0, "a fault of ours"
        self.scheduler.shutdown()
        records = read(self.path)[1]
        assert len(records) == len(self.delivered)
        return records

    @property
    def delivered(self) -> list[Turn]:
        """The turns with the output of a step of at least one request."""
        return [turn for turn in self.turns if turn.delivered is not None and turn.delivered.num_scheduled_tokens]


Build = Callable[..., Logged]


@pytest.fixture
def build(build: adaptive_engine.Build, tmp_path: Path) -> Build:
    def logged(
        asynchronous: bool, settings: dict[str, Any], config: dict[str, Any] | None = None, **engine: Any
    ) -> Logged:
        path = tmp_path / "steps.jsonl"
        return Logged(build(asynchronous, {**settings, "step_log": str(path)}, config, **engine), path)

    return logged


def is_running_mean(error: float, records: Sequence[StepRecord]) -> bool:
    """Whether it is the cost model's mean error over the steps that the log says taught, by what it says of them."""
    mean = 0.0
    for record in records:
        if record.untaught == "":
            assert record.gap_ms is not None
            assert record.predicted_ms is not None
            mean += 0.05 * (abs(record.gap_ms - record.predicted_ms) / record.predicted_ms - mean)
    return error == pytest.approx(mean, rel=1e-9)


@pytest.mark.parametrize("settings", [DEFAULT, REFERENCE, PER_REQUEST], ids=["default", "reference", "per request"])
def test_the_records_are_the_steps_that_ran_and_what_came_of_them(
    build: Build, asynchronous: bool, settings: dict[str, Any]
) -> None:
    logged = build(asynchronous, settings, accept=bernoulli((0.9, 0.6, 0.5, 0.3, 0.2)))
    for number in range(6):
        logged.engine.add(10 + number, 40 + 10 * number)
    logged.run(30)
    logged.engine.add(100, 30)
    records = logged.end()
    ids: dict[int, str] = {}
    for turn, record in zip(logged.delivered, records, strict=True):
        step = turn.delivered
        assert step is not None
        drafts = {request: len(tokens) for request, tokens in step.scheduled_spec_decode_tokens.items()}
        assert record.requests == len(step.num_scheduled_tokens)
        assert record.drafts == sum(drafts.values())
        assert record.tokens == record.requests + record.drafts
        assert record.tokens + record.prefill == step.total_num_scheduled_tokens
        assert record.uneven == (len({drafts.get(request, 0) for request in step.num_scheduled_tokens}) > 1)
        assert record.k == record.drafting == step.num_spec_tokens_to_schedule
        assert not record.forced
        # The model drafts for requests too that are gone by the time.
        verified = [request for request in turn.drafted if request in turn.tokens]
        for number, request in zip(record.request, verified, strict=True):
            assert ids.setdefault(number, request) == request
        assert record.drafted == [turn.drafted[request] for request in verified]
        assert record.accepted == [turn.accepted[request] for request in verified]
        assert record.cut == record.mode == [0] * len(verified)
    assert sorted(ids) == list(range(7))
    assert len(set(ids.values())) == 7
    assert any(record.prefill for record in records)
    assert any(record.context > 100 for record in records)
    assert len({record.k for record in records}) > 1


@pytest.mark.parametrize("settings", [DEFAULT, REFERENCE], ids=["default", "reference"])
def test_times_predictions_and_what_taught_are_those_of_the_cost_model(
    build: Build, asynchronous: bool, settings: dict[str, Any]
) -> None:
    logged = build(asynchronous, settings)
    for number in range(30):
        logged.engine.add(10, 40 + number)
    records = logged.end()
    first, *rest = records
    assert (first.gap_ms, first.untaught) == (None, "idle")
    assert first.predicted_ms is not None
    for turn, record in zip(logged.delivered[1:], rest, strict=True):
        if record.untaught != "idle":
            assert record.gap_ms == pytest.approx(step_ms(turn.delivered), rel=1e-9)
    cost = logged.pilot.controller.settle().cost
    assert sum(record.untaught == "" for record in records) == int(cost.taught) > 50
    assert is_running_mean(float(cost.error), records)
    refused = {record.untaught for record in records} - {"", "idle", "surprise"}
    assert refused <= {"prompts" if settings is REFERENCE else "change"}


@pytest.mark.parametrize("settings", [DEFAULT, REFERENCE], ids=["default", "reference"])
def test_a_gap_in_which_the_engine_waited_is_idle(build: Build, asynchronous: bool, settings: dict[str, Any]) -> None:
    logged = build(asynchronous, settings)
    logged.engine.add(10, 60)
    logged.turns += logged.engine.drain()
    steps = len(logged.delivered)
    logged.engine.clock.now += 10.0
    logged.engine.add(10, 60)
    records = logged.end()
    assert [n for n, record in enumerate(records) if record.untaught == "idle"] == [0, steps]
    gap_ms = records[steps].gap_ms
    assert gap_ms is not None
    assert gap_ms > 10_000.0


def test_a_time_far_from_the_prediction_is_a_surprise(build: Build, asynchronous: bool) -> None:
    slow = False
    logged = build(asynchronous, DEFAULT, step_ms=lambda step: step_ms(step) * (30.0 if slow else 1.0))
    logged.engine.add(10, 400)
    logged.run(50)
    slow = True
    logged.run(1)
    slow = False
    records = logged.end()
    surprises = [record for record in records if record.untaught == "surprise"]
    assert len(surprises) == 1
    assert surprises[0].predicted_ms is not None
    assert surprises[0].gap_ms == pytest.approx(30.0 * surprises[0].predicted_ms, rel=0.2)


@pytest.mark.parametrize(("settings", "reason"), [(DEFAULT, ""), (REFERENCE, "prompts")], ids=["default", "reference"])
def test_steps_with_prompts_teach_the_default_and_not_the_reference(
    build: Build, asynchronous: bool, settings: dict[str, Any], reason: str
) -> None:
    logged = build(asynchronous, settings)
    for _ in range(4):
        logged.engine.add(10, 60)
    logged.run(20)
    logged.engine.add(10, 60)
    _, *later = [record for record in logged.end() if record.prefill]
    assert {record.untaught for record in later} == {reason}


def test_a_forced_k_is_marked_and_a_change_to_or_from_no_drafts_teaches_nothing(
    build: Build, asynchronous: bool, tmp_path: Path
) -> None:
    control = tmp_path / "control"
    logged = build(asynchronous, {**DEFAULT, "control": str(control)})
    logged.engine.add(10, 900)
    logged.run(10)
    for k in (0, 4):
        control.write_text(f"force {k}")
        logged.run(20)
    control.unlink()
    records = logged.end()
    forced = [record.k for record in records if record.forced]
    assert forced == [0] * 20 + [4] * 20
    for record in records[2:]:
        if (record.drafting > 0) != (record.drafts > 0):
            assert record.untaught == "change"
        else:
            assert record.untaught == ""
    assert any(record.untaught == "change" for record in records)
    assert len(records) > 60


def test_a_fixed_cost_says_so_and_predicts_by_its_table(build: Build, asynchronous: bool) -> None:
    logged = build(asynchronous, {"code_mode": 0, "online": False, "cost_ms": "1:10,11:20"})
    logged.engine.add(10, 50)
    records = logged.end()
    assert [record.untaught for record in records] == ["idle"] + ["fixed"] * (len(records) - 1)
    assert all(record.predicted_ms == pytest.approx(9.0 + record.tokens, rel=1e-9) for record in records)


def test_drafts_that_a_grammar_cut_are_told_apart(build: Build) -> None:
    logged = build(True, DEFAULT, {"schedule": None}, accept=lambda request, drafts, rng: 0)
    for name in ("a", "b"):
        logged.engine.add(10, 30, request_id=name)
    logged.run(6)
    step, _ = logged.engine._queue[0]
    step.num_invalid_spec_tokens = {"b": 2}
    logged.run(1)
    step, _ = logged.engine._queue[0]
    step.num_invalid_spec_tokens = {"a": DRAFT_LIMIT}
    logged.run(1)
    records = logged.end()
    (some,) = [record for record in records if any(record.cut)]
    assert (some.drafted, some.cut, some.drafts) == ([5, 3], [0, 2], 10)
    assert any(len(record.request) == 1 and record.drafts == 10 for record in records), "all of one's drafts were cut"


def test_the_kind_of_each_requests_text_is_told(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tiny = Path(__file__).parents[2] / "scripts/tiny_pair/target"

    def token(request: str, position: int) -> int:
        return ord("`") if request == "code" and position < 3 else ord("a")

    logged = build(True, {"code_mode": 1}, {"tokenizer": str(tiny)}, token=token)
    for name in ("prose", "code"):
        logged.engine.add(10, 60, request_id=name)
    records = logged.end()
    modes = {number: [] for number in range(2)}
    for record in records:
        for number, mode in zip(record.request, record.mode, strict=True):
            modes[number].append(mode)
    assert set(modes[0]) == {0}
    assert set(modes[1][-5:]) == {1}


def test_the_output_of_a_step_that_was_not_seen_is_unknown(
    build: Build, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = build(asynchronous, DEFAULT)
    logged.engine.add(10, 200)
    logged.run(10)
    planned = logged.pilot.scheduled

    def scheduled(*args: Any, **rest: Any) -> Any:
        plan = planned(*args, **rest)
        monkeypatch.setattr(logged.pilot, "scheduled", planned)
        logged.scheduler._in_flight.clear()
        return plan

    monkeypatch.setattr(logged.pilot, "scheduled", scheduled)
    logged.run(10)
    records = logged.end()
    unknown = [record for record in records if record.untaught == "unknown"]
    assert len(unknown) == (1 if asynchronous else 0)
    for record in unknown:
        assert record.predicted_ms is None
        assert record.k == record.drafting == record.context == 0
        assert len(record.request) == 1
        assert records[records.index(record) + 1].untaught == "idle"


def test_a_request_keeps_its_number_whatever_happens_to_it(build: Build, asynchronous: bool) -> None:
    """Preempted by a small cache, aborted, or with prompts in pieces."""
    rng = Random(3)
    logged = build(asynchronous, DEFAULT, {"max_num_batched_tokens": 64, "max_model_len": 512}, num_blocks=40)
    engine, ids, waiting = logged.engine, {}, 40
    observe = logged.pilot.output
    seen_ids: list[list[str]] = []

    def output(step: Any, verified: Any, *rest: Any, **more: Any) -> None:
        if step.tokens:
            seen_ids.append(verified.request_ids)
        observe(step, verified, *rest, **more)

    logged.pilot.output = output  # pyright: ignore[reportAttributeAccessIssue]
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.3:
            engine.add(rng.randint(1, 120), rng.randint(1, 100))
            waiting -= 1
        if engine.has_work:
            logged.run(1)
        if engine.requests and rng.random() < 0.02:
            engine.abort(rng.choice(list(engine.scheduler.requests) or list(engine.requests)), late=rng.random() < 0.5)
    records = logged.end()
    for record, verified in zip(records, seen_ids, strict=True):
        for number, request in zip(record.request, verified, strict=True):
            assert ids.setdefault(number, request) == request
    assert sorted(ids) == list(range(len(ids)))
    assert len(set(ids.values())) == len(ids) > 20
    assert any(request.num_preemptions for request in engine.requests.values()), "no request was preempted"
    assert not logged.pilot._step_log._numbers, "numbers of requests that are gone"  # pyright: ignore[reportOptionalMemberAccess]


def test_each_policys_steps_are_judged_by_its_own_cost_model(build: Build, asynchronous: bool, tmp_path: Path) -> None:
    control = tmp_path / "control"
    logged = build(asynchronous, {**DEFAULT, "control": str(control)})
    for _ in range(2):
        logged.engine.add(10, 900)
    for content in ("policy reference", "policy default", "policy reference"):
        logged.run(20)
        control.write_text(content)
    records = logged.end()
    taught = sum(int(c.settle().cost.taught) for c in logged.pilot._controllers.values())
    assert sum(record.untaught == "" for record in records) == taught > 100


def test_shutting_down_writes_the_last_step(build: Build, asynchronous: bool) -> None:
    logged = build(asynchronous, DEFAULT)
    logged.engine.add(10, 500)
    logged.run(20)
    logged.scheduler.shutdown()
    records = read(logged.path)[1]
    assert len(records) == len(logged.delivered) > 15
    assert records[-1].predicted_ms is not None
    assert sum(record.untaught == "" for record in records) == logged.pilot.controller.taught


def test_serving_goes_on_where_nothing_can_be_written(build: Build, asynchronous: bool, tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").mkdir()
    logged = build(asynchronous, DEFAULT)
    for _ in range(4):
        logged.engine.add(10, 60)
    logged.engine.drain()
    logged.engine.check()
    logged.scheduler.shutdown()
    assert int(logged.pilot.controller.settle().cost.taught) > 10


def test_without_the_setting_there_is_no_log() -> None:
    config = make_config(num_speculative_tokens=2, max_num_seqs=1, additional_config={"adaptive_k": DEFAULT})
    scheduler = FakeEngine(AdaptiveKScheduler, config).scheduler
    assert isinstance(scheduler, AdaptiveKScheduler)
    assert scheduler.faults.count == 0
    assert scheduler.pilot._step_log is None


def test_the_header_says_what_serves() -> None:
    config = make_config(num_speculative_tokens=5, max_num_seqs=12, schedule=[(1, 2, 5), (3, 12, 2)])
    config.parallel_config.tensor_parallel_size = 4
    config.parallel_config.pipeline_parallel_size = 2
    config.parallel_config.enable_expert_parallel = True
    header = header_of(config, "reference", (2, 5), Routing(64, 6), (8, 16))
    assert header.model == config.model_config.model
    assert (header.method, header.draft_limit, header.levels) == ("draft_model", 5, [2, 5])
    assert (header.experts, header.top_k, header.captured_sizes) == (64, 6, [8, 16])
    assert (header.tensor_parallel, header.pipeline_parallel, header.expert_parallel) == (4, 2, True)
    assert (header.max_requests, header.policy, header.device) == (12, "reference", "cpu")
    assert {"akjax", "vllm", "jax", "python"} == header.versions.keys()
    assert all(header.versions.values())
    dense = header_of(config, "default", (2, 5), None, ())
    assert (dense.experts, dense.top_k, dense.captured_sizes) == (None, None, [])
    assert dense.run != header.run


def test_a_files_header_is_of_the_engine_that_wrote_it(build: Build) -> None:
    logged = build(True, {**REFERENCE, "experts": 64, "top_k": 4, "step_log_mb": 0.001})
    logged.engine.add(10, 60)
    logged.engine.drain()
    logged.scheduler.shutdown()
    headers = [read(file)[0] for file in in_order(logged.path)]
    assert len(headers) > 5
    assert len({header.run for header in headers}) == 1
    assert headers[0].levels == [1, 3, 5]
    assert (headers[0].experts, headers[0].top_k, headers[0].policy) == (64, 4, "reference")
