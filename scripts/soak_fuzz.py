"""Everything that akjax reads, given what it should not be given.

Each reader takes bytes that hypothesis makes up, and valid ones that were spoiled: bytes flipped, cut, repeated and put
together from two, huge numbers, deep nesting, NUL, other encodings. It may refuse them by the errors that it documents,
in a second and 200 MB. What hypothesis finds it makes as small as it can.
"""

import io
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import hypothesis
import msgspec
import polars as pl
import zstandard
from hypothesis import strategies as st

from akjax.cost import parse_table
from akjax.fit_file import decoded_fit, start_of
from akjax.fits import command
from akjax.fits.reading import convert, read_log, read_table
from akjax.forms import FORMS, Engine, form_named
from akjax.presets import preset, preset_names
from akjax.scheduler.control_file import ControlFile
from akjax.scheduler.settings import PREFIX, SECTION, Settings, SettingsError, load_settings
from akjax.state_file import KeptPolicy, KeptState, decoded_state, encoded_state
from akjax.step_log import LogHeader, StepRecord
from measuring import SECONDS_BETWEEN_LINES, DiedError, apart, peak_megabytes, resident_megabytes, say

MOST_SECONDS, MOST_MEGABYTES = 1.0, 200.0
# A reader that hangs, which is a fault as well.
HANGS_SECONDS = 30
ENGINE = Engine(lengths=(0, 2, 4), experts=64, top_k=6, sizes=(8, 16))

HEADER = LogHeader(time=1.7e9, run="one", model="tiny", draft_limit=4, levels=[0, 2, 4], experts=64, top_k=4)
STEPS = [
    StepRecord(
        time=1.7e9 + number,
        gap_ms=12.25 if number else None,
        untaught="" if number else "idle",
        tokens=8,
        requests=2,
        prefill=0,
        context=500 + number,
        drafts=6,
        drafting=4,
        uneven=True,
        k=4,
        forced=False,
        predicted_ms=12.0,
        request=[number, number + 1],
        drafted=[4, 2],
        accepted=[1, 2],
        cut=[0, 2],
        mode=[0, 1],
    )
    for number in range(8)
]
STATE = KeptState(
    engine={"model": "m", "levels": [0, 2, 4], "top_k": None},
    policies={
        "default": KeptPolicy(form="serving", start="0" * 64, numbers={"cost.taught": [3.0], "pools.mean": [0.5]})
    },
)
LINES = b"".join(msgspec.json.encode(record) + b"\n" for record in (HEADER, *STEPS))
TABLE = b"ms,tokens,requests,context\n" + b"".join(b"%d.5,%d,1,%d\n" % (20 + n, 1 + n, 100 * n) for n in range(8))


class Reader(NamedTuple):
    """Something that reads what comes from outside.

    Attributes:
        read: what it does with bytes, in a folder that it may write to.
        valid: what it takes.
        refusals: errors that it documents.
        share: of all inputs, relative to the others'.
    """

    read: Callable[[bytes, Path], object]
    valid: Sequence[bytes]
    refusals: tuple[type[Exception], ...]
    share: float = 4.0


def text_of(content: bytes) -> str:
    """As an operating system hands text over."""
    return content.decode("utf-8", "surrogateescape")


def read_control(content: bytes, folder: Path) -> None:
    """Nothing is an error, and no length is out of bounds."""
    path = folder / "control"
    path.write_bytes(content)
    forced, policy = ControlFile(path, 6, 0).read()
    assert forced is None or 0 <= forced <= 6
    assert policy in (None, "default", "reference")


def read_environment(content: bytes, folder: Path) -> None:
    """A line for each variable; what no variable can be is left out."""
    given = {}
    for line in content.split(b"\n"):
        name, _, value = text_of(line.replace(b"\0", b"")).partition("=")
        if name:
            given[name] = value
    with patch.dict(os.environ, given):
        load_settings({})


def read_section(content: bytes, folder: Path) -> None:
    """As vLLM reads its --additional-config: what is no JSON never gets here."""
    try:
        section = json.loads(content)
    except (ValueError, RecursionError):
        return
    load_settings({SECTION: section})


def read_setting(name: str, content: bytes, folder: Path) -> None:
    """One setting, as text."""
    load_settings({SECTION: {name: text_of(content)}})


def read_fit_setting(content: bytes, folder: Path) -> None:
    """A fit by its path."""
    path = folder / "fit.json"
    path.write_bytes(content)
    load_settings({SECTION: {"model": str(path)}})


def read_form(content: bytes, folder: Path) -> None:
    """A form's name. The standard library's modules are not imported: some do things."""
    name = text_of(content)
    if name.partition(":")[0].partition(".")[0] not in sys.stdlib_module_names:
        form_named(name)


def read_fit(content: bytes, folder: Path) -> None:
    """A fit, and what a scheduler starts with from it."""
    start_of(decoded_fit(content, "fit.json"), ENGINE)


def read_steps(content: bytes, folder: Path) -> None:
    """A step log, in whatever form; what was read of it can be read again."""
    path = folder / "steps"
    path.write_bytes(content)
    log = read_log(path)
    convert(path, folder / "steps.parquet")
    assert read_log(folder / "steps.parquet").steps.equals(log.steps)


def read_state(content: bytes, folder: Path) -> None:
    """A state file."""
    decoded_state(content)


def read_measured(content: bytes, folder: Path) -> None:
    """A table of measurements."""
    path = folder / "table.csv"
    path.write_bytes(content)
    read_table(path)


def run_command(arguments: Sequence[str]) -> None:
    """The `akjax` command; it ends with 0, 2 or 3 and never with a traceback."""
    quiet, code = io.StringIO(), None
    with redirect_stdout(quiet), redirect_stderr(quiet):
        try:
            command.app(list(arguments), standalone_mode=True)
        except SystemExit as end:
            code = end.code
    assert code in (0, 2, 3), f"ended with {code}"


def show(content: bytes, folder: Path) -> None:
    """`akjax show` of a file."""
    path = folder / "fit.json"
    path.write_bytes(content)
    run_command(["show", str(path)])


def map_columns(content: bytes, folder: Path) -> None:
    """`akjax fit cost --columns`, of a table without rows, so that there is nothing to fit."""
    path = folder / "table.csv"
    path.write_bytes(TABLE.partition(b"\n")[0] + b"\n")
    run_command(["fit", "cost", str(path), f"--columns={text_of(content)}"])


def parquet_log() -> bytes:
    """A log as `convert` writes it."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "log")
        path.write_bytes(LINES)
        convert(path, Path(folder, "log.parquet"))
        return Path(folder, "log.parquet").read_bytes()


def parquet_table() -> bytes:
    """A table in Parquet."""
    out = io.BytesIO()
    pl.read_csv(TABLE).write_parquet(out)
    return out.getvalue()


def readers() -> dict[str, Reader]:
    """All of them, by name."""
    fits = [msgspec.json.encode(preset(name)) for name in preset_names()]
    names = [name.upper() for name in Settings.model_fields]
    tables = [b"2:47,4:53,8:65", b"1:1e300,2:2e300", b" 8:1 ,, 8:2"]
    models = [b"27.0,0.635,0.542", b"1,0,0", *(name.encode() for name in preset_names()), b"fit.json"]
    forms = [*(name.encode() for name in FORMS), b"akjax.forms:dense_cost", b"akjax:PerToken"]
    values = [b"1", b"0", b"0.25", b"default", b"gated", b"x.zst", *tables, *models, *forms]
    variables = [f"{PREFIX}{name}=".encode() + value for name in names for value in values]
    sections = [
        b'{"alpha": 0.5, "policy": "reference", "per_request": true, "code_mode": 1, "experts": 64, "top_k": 8}',
        b'{"model": [27.0, 0.635, 0.542], "cost_ms": "2:47,4:53", "form": "line", "online": 0, "margin": 0}',
        b'{"control": "/tmp/control", "step_log": "steps.jsonl.zst", "step_log_mb": 0.5}',
    ]
    controls = [b"force 3\n", b"policy reference", b"policy default\n", b"force 99", b""]
    return {
        "control file": Reader(read_control, controls, ()),
        "environment": Reader(read_environment, variables, (SettingsError,), 8),
        "additional_config": Reader(read_section, sections, (SettingsError,), 8),
        "COST_MS": Reader(partial(read_setting, "cost_ms"), tables, (SettingsError,), 3),
        "table of costs": Reader(lambda content, folder: parse_table(text_of(content)), tables, (ValueError,), 3),
        "MODEL": Reader(partial(read_setting, "model"), models, (SettingsError,), 3),
        "MODEL, a file": Reader(read_fit_setting, fits, (SettingsError,), 3),
        "FORM": Reader(read_form, forms, (ValueError,), 3),
        "fit": Reader(read_fit, fits, (ValueError,), 8),
        "STATE": Reader(read_state, [encoded_state(STATE)], (ValueError,), 8),
        "step log": Reader(read_steps, [LINES], (ValueError,), 8),
        "step log, compressed": Reader(read_steps, [zstandard.compress(LINES), _framed(LINES)], (ValueError,)),
        "step log, Parquet": Reader(read_steps, [parquet_log()], (ValueError,)),
        "table": Reader(read_measured, [TABLE], (ValueError,)),
        # Each starts a process.
        "table, Parquet": Reader(read_measured, [parquet_table()], (ValueError,), 0.1),
        "akjax show": Reader(show, fits, (), 2),
        "akjax --columns": Reader(
            map_columns, [b"ms=ms,tokens=tokens", b"ms=ms,requests=requests,drafts=tokens"], (), 2
        ),
    }


def _framed(content: bytes) -> bytes:
    return b"".join(zstandard.compress(line) for line in content.splitlines(keepends=True))


def spoiled(valid: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Valid inputs that something was done to, several times."""
    numbers = st.sampled_from(
        [
            b"1e999",
            b"-1",
            b"0",
            b"NaN",
            b"Infinity",
            b"9" * 400,
            b"9" * 5000,
            b"1e-400",
            b"0x10",
            b"18446744073709551616",
        ]
    )
    pieces = st.one_of(
        st.binary(max_size=8),
        numbers,
        st.sampled_from(
            [b"\0", b"\xff\xfe", b"\xed\xa0\x80", b'"\\ud800"', b"\r", b"\n", b"null", b"{}", b"[]", b'""']
        ),
        st.sampled_from([b"[", b"{", b'{"a":', b"("]).flatmap(
            lambda opening: st.sampled_from([10, 400, 990, 100_000]).map(lambda depth: opening * depth)
        ),
        st.sampled_from([400, 990]).map(lambda depth: b"[" * depth + b"]" * depth),
    )

    @st.composite
    def spoil(draw: st.DrawFn) -> bytes:
        content = draw(st.sampled_from(valid))
        for _ in range(draw(st.integers(1, 4))):
            start = draw(st.integers(0, len(content)))
            end = min(start + draw(st.integers(0, 12) | st.integers(0, len(content))), len(content))
            content = draw(
                st.one_of(
                    pieces.map(partial(_put, content, start, end)),
                    st.integers(0, 7).map(partial(_flipped, content, start)),
                    st.just(content[:start]),
                    st.just(content[:start] + content[end:]),
                    st.just(content[:end] + content[start:]),
                    st.sampled_from(valid).map(partial(_spliced, content, start, end)),
                    _number_at(content, start, numbers),
                    st.sampled_from(["utf-16", "utf-32", "utf-8-sig", "cp500"]).map(partial(_encoded, content)),
                )
            )
        return content

    return spoil()


def _put(content: bytes, start: int, end: int, piece: bytes) -> bytes:
    return content[:start] + piece + content[end:]


def _spliced(content: bytes, start: int, end: int, other: bytes) -> bytes:
    return content[:start] + other[end:]


def _flipped(content: bytes, at: int, bit: int) -> bytes:
    return content[:at] + bytes(byte ^ 1 << bit for byte in content[at : at + 1]) + content[at + 1 :]


def _encoded(content: bytes, encoding: str) -> bytes:
    return content.decode("latin-1").encode(encoding, "replace")


def _number_at(content: bytes, start: int, numbers: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """The next number after `start` is another."""
    digits = b"0123456789.eE+-"
    first = next((at for at in range(start, len(content)) if content[at] in b"0123456789"), len(content))
    last = next((at for at in range(first, len(content)) if content[at] not in digits), len(content))
    return numbers.map(partial(_put, content, first, last))


class FaultError(AssertionError):
    """What a reader did that it must not."""


@contextmanager
def limited() -> Iterator[None]:
    """What is inside takes neither too long nor too much memory.

    Raises:
        FaultError: it does.
    """

    def alarmed(number: int, frame: FrameType | None) -> None:
        raise FaultError(f"it hung for {HANGS_SECONDS} s")

    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of this input
    megabytes, began = resident_megabytes(), time.process_time()
    before = signal.signal(signal.SIGALRM, alarmed)
    signal.alarm(HANGS_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        # Of the processor, as others may have it at the time.
        seconds, more = time.process_time() - began, peak_megabytes() - megabytes
    if seconds > MOST_SECONDS or more > MOST_MEGABYTES:
        raise FaultError(f"it took {seconds:.2f} s and {more:.0f} MB")


def checked(reader: Reader, content: bytes, folder: Path) -> bool:
    """Whether the reader takes the content, which it may refuse by its own errors.

    Raises:
        FaultError: anything else.
    """
    try:
        with limited():
            reader.read(content, folder)
    except reader.refusals:
        return False
    except FaultError as fault:
        raise FaultError(f"{fault}, given {_shown(content)}") from None
    # Rust's panics are no Exceptions.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | GeneratorExit) or type(error).__module__.startswith("hypothesis"):
            raise
        raise FaultError(f"{type(error).__name__}: {str(error)[:500]}, given {_shown(content)}") from error
    return True


def _shown(content: bytes) -> str:
    return repr(content) if len(content) <= 1000 else f"{content[:1000]!r} and {len(content) - 1000} bytes more"


def fuzz_one(name: str, inputs: int, seed: int) -> dict[str, Any]:
    """One of `readers` with so many inputs: how many it took, and what was wrong, if anything was."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    reader = readers()[name]
    report: dict[str, Any] = {"inputs": 0, "taken": 0, "fault": None}
    said = time.perf_counter()
    worst = 0.0
    with TemporaryDirectory() as folder:

        def one(content: bytes) -> None:
            nonlocal said, worst
            began = time.perf_counter()
            report["inputs"] += 1
            report["taken"] += checked(reader, content, Path(folder))
            worst = max(worst, time.perf_counter() - began)
            if time.perf_counter() > said + SECONDS_BETWEEN_LINES:
                said = time.perf_counter()
                say(f"fuzz, {name}: {report['inputs']:,} inputs")

        kinds = {"made up": (st.binary(max_size=200) | st.text(max_size=100).map(str.encode), inputs // 4)}
        kinds["spoiled"] = (spoiled(reader.valid), inputs - inputs // 4)
        for content in reader.valid:
            one(content)
        for kind, (strategy, count) in kinds.items():
            settings = hypothesis.settings(
                max_examples=max(count, 1),
                deadline=None,
                database=None,
                suppress_health_check=list(hypothesis.HealthCheck),
                report_multiple_bugs=False,
            )
            try:
                hypothesis.seed(seed)(settings(hypothesis.given(strategy)(one)))()
            except FaultError as fault:
                report["fault"] = f"{kind}: {fault}"
                break
    return report | {"slowest_seconds": worst}


def fuzz(inputs: int, seed: int) -> dict[str, Any]:
    """All of `readers`, each in a process of its own."""
    every = readers()
    shares = sum(reader.share for reader in every.values())
    report: dict[str, Any] = {}
    for number, (name, reader) in enumerate(every.items()):
        say(f"fuzz, {name}: starting ...")
        of_reader = max(round(inputs * reader.share / shares), 1)
        try:
            report[name] = apart(fuzz_one, name, of_reader, seed + number)
        except DiedError as died:
            report[name] = {"inputs": 0, "taken": 0, "fault": str(died), "slowest_seconds": 0.0}
    return report
