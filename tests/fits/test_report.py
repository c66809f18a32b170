"""Reports: their numbers against logs made by hand, and the page that shows them."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from step_records import step_record
from typer.testing import CliRunner

from akjax import Constant, Context, ExpertReads, PerToken, SplitPower, StepFeatures
from akjax.cost import AbstractCostModel
from akjax.fit_file import FitFile, FittedParameter
from akjax.fits.command import app
from akjax.fits.fit_file import write_fit
from akjax.fits.reading import StepLog, cost_steps, engine_of, read_log
from akjax.fits.report import Report, report_of
from akjax.fits.report_cost import (
    FittedCost,
    band,
    batches_shown,
    cost_picture,
    errors_by_tokens,
    expert_picture,
    percent_longer,
    residuals_of,
    with_error,
)
from akjax.fits.report_drafts import Acceptance, acceptance_of, elapsed_seconds, goodput_of, lengths_of
from akjax.fits.report_page import page_of, sections_of
from akjax.forms import Engine
from akjax.step_log import LogHeader, StepRecord

HOSTILE = "</h1><script src=//evil.example/x.js></script><img src=x onerror=alert(1)>\"'&\u202e\x00{{ 1 / 0 }}"
FIGURES = [
    "What a step costs",
    "Error of the fit against tokens",
    "Error of the fit over time",
    "Experts touched",
    "Which drafts get accepted",
    "k over time",
    "Which k is best",
]
HEADER = LogHeader(time=1.7e9, run="one", model="tiny", levels=[0, 1, 2, 4], experts=64, top_k=6)


def drafted(*rows: tuple[int, int, int], **changes: Any) -> StepRecord:
    """A step whose requests have these modes, drafts and accepted drafts."""
    modes, drafts, accepted = zip(*rows, strict=True)
    lists = {"mode": [*modes], "drafted": [*drafts], "accepted": [*accepted], "cut": [0] * len(rows)}
    return step_record(request=[*range(len(rows))], drafts=sum(drafts), **lists, **changes)


def served(number: int, rng: np.random.Generator, levels: tuple[int, ...] = (0, 1, 2, 4)) -> StepRecord:
    """A step of a machine that takes 5 ms, 0.1 for each expert and 0.02 for each token."""
    requests, drafts = 2 ** (number // 20 % 3), levels[number // 7 % len(levels)]
    tokens = requests * (drafts + 1)
    ms = (5.0 + 6.4 * (1 - (1 - 6 / 64) ** tokens) + 0.02 * tokens) * np.exp(0.03 * rng.standard_normal())
    changes: dict[str, Any] = dict(time=1.7e9 + number / 100, gap_ms=float(ms) if number else None)
    changes |= dict(untaught="" if number else "idle", tokens=tokens, requests=requests, drafting=drafts, k=drafts)
    if not drafts:
        return step_record(**changes)
    accepted = np.cumprod(rng.random((requests, drafts)) < 0.7, axis=1).sum(1)
    return drafted(*((each % 2, drafts, int(a)) for each, a in enumerate(accepted)), **changes)


def written(path: Path, *records: LogHeader | StepRecord, rest: bytes = b"") -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records) + rest)
    return path


def read(folder: Path, *records: LogHeader | StepRecord) -> StepLog:
    return read_log(written(folder / "log.jsonl", *records))


def fitted(model: AbstractCostModel, covariance: Any = None) -> FittedCost:
    size = len(model.parameters())
    return FittedCost(
        model,
        np.zeros((size, size)) if covariance is None else np.asarray(covariance, np.float64),
        FitFile(form="by hand", engine={}, parameters=[], covariance=[], noise=0.03, error_percent=2.0, rows=1),
        "made by hand",
    )


def features(**of_steps: Any) -> StepFeatures:
    columns = {name: np.asarray(values, np.float64) for name, values in of_steps.items()}
    others = ("drafting", "context", "prefill", "uneven")
    return StepFeatures(**{name: np.zeros(len(columns["tokens"])) for name in others} | columns)  # pyright: ignore


def reported(log: StepLog, fit: FittedCost | None) -> Report:
    return report_of(log, cost_steps(log), engine_of(log), fit)


class Page(HTMLParser):
    """What a browser would find in a page: tags, what they refer to, ids, and text."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.references: list[str] = []
        self.ids: list[str] = []
        self.handlers: list[str] = []
        self.text = ""
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "data"):
                self.references.append(value or "")
            self.handlers += [name] if name.startswith("on") else []
            self.ids += [value or ""] if name == "id" else []

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    records = [served(number, rng) for number in range(600)]
    return written(tmp_path_factory.mktemp("log") / "steps.jsonl", HEADER, *records, rest=b'{"kind":"step"}\nto')


@pytest.fixture(scope="module")
def made(log: Path) -> tuple[Path, dict[str, Any]]:
    """A page, and what the command said of it."""
    page = log.with_name("report.html")
    return page, json.loads(run("report", log, "-o", page, "--form", "reference", "--json"))


def run(*arguments: object, expected: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == expected, result.output
    return result.stdout if expected == 0 else result.output


def test_a_report_has_all_figures_and_says_where_it_is(made: tuple[Path, dict[str, Any]]) -> None:
    page, told = made
    assert told["figures"] == FIGURES
    assert told["lacking"] == {}
    assert (told["written"], told["bytes"]) == (str(page), page.stat().st_size)
    assert (told["steps"], told["steps_with_times"]) == (600, 599)
    assert told["error_percent"] < 4.0
    parsed = Page(page.read_text())
    assert parsed.tags["svg"] == len(FIGURES)
    for said in ("per_expert", "fitted to these logs", "steps.jsonl", "missing field", "torn last line", "599"):
        assert said in parsed.text
    assert not [*page.parent.glob("*.part")]


def test_a_page_refers_to_nothing_outside_itself(made: tuple[Path, dict[str, Any]]) -> None:
    content = made[0].read_text()
    parsed = Page(content)
    assert all(reference.startswith("#") for reference in parsed.references)
    assert {reference[1:] for reference in parsed.references} <= {*parsed.ids}
    assert len({*parsed.ids}) == len(parsed.ids)
    assert not parsed.tags.keys() & {"script", "link", "iframe", "img", "image", "object", "embed", "form", "base"}
    assert "@import" not in content
    assert content.count("url(") == content.count("url(#")
    assert "default-src 'none'" in content


def test_what_logs_say_is_text_on_the_page_and_no_markup(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    header = LogHeader(
        time=1e300, run=HOSTILE, model=HOSTILE, method=HOSTILE, device=HOSTILE, policy=HOSTILE, versions={HOSTILE: "1"}
    )
    name = tmp_path / "<b onclick=x>{{ 1 % 0 }}.jsonl"
    log = read_log(written(name, header, *(served(n, rng) for n in range(60)), rest=HOSTILE.encode()))
    fit = fitted(Constant(5.0) + PerToken(0.3))
    file = replace(fit.file, form=HOSTILE, findings=[HOSTILE], logs=[HOSTILE])
    report = reported(log, fit._replace(file=file, source=HOSTILE))
    parsed = Page(page_of(report, sections_of(report)))
    assert not parsed.tags.keys() & {"script", "img", "b"}
    assert not parsed.handlers
    assert parsed.text.count(HOSTILE) >= 9
    assert name.name in parsed.text


def test_a_report_is_on_the_fit_that_is_given(log: Path, tmp_path: Path) -> None:
    page, fit = tmp_path / "report.html", tmp_path / "fit.json"
    parameters = [
        FittedParameter(name=name, unit=unit, value=value, standard_error=None, determined=False)
        for name, unit, value in (("base", "ms", 20.0), ("per_token", "ms/token", 0.0123))
    ]
    file = FitFile(
        form="line",
        engine={},
        parameters=parameters,
        covariance=[[0.0, 0.0], [0.0, 0.0]],
        noise=0.0,
        error_percent=0.0,
        rows=0,
    )
    write_fit(fit, file)
    told = json.loads(run("report", log, "-o", page, "--fit", fit, "--json"))
    assert told["error_percent"] > 50.0
    assert told["lacking"] == {"Experts touched": "The form line has no term for experts."}
    text = Page(page.read_text()).text
    for said in ("0.0123", f"read from {fit}", "no bands", "made for a model with other experts"):
        assert said in text


def test_a_page_is_for_html_and_leaves_other_files_alone(log: Path, tmp_path: Path) -> None:
    before = log.read_bytes()
    assert "must end in .html" in run("report", log, "-o", log, expected=2)
    assert "a folder that there is" in " ".join(
        run("report", log, "-o", tmp_path / "no" / "x.html", expected=2).split()
    )
    assert "no fit of a cost model" in run("report", log, "-o", tmp_path / "x.html", "--fit", log, expected=2)
    assert log.read_bytes() == before
    assert not [*tmp_path.iterdir()]


def test_other_commands_do_not_wait_for_figures() -> None:
    check = "import sys, akjax.fits.command; assert not {'matplotlib', 'jinja2', 'polars'} & {*sys.modules}"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("header", "records", "lacking", "said"),
    [
        (HEADER, [], {*FIGURES}, "has a time of its own"),
        (HEADER, [step_record(gap_ms=None, untaught="idle")] * 30, {*FIGURES}, "verified drafts"),
        (HEADER, [step_record(k=n % 2) for n in range(30)], {FIGURES[4], FIGURES[6]}, "verified drafts"),
        (
            HEADER,
            [drafted((0, 2, 1), (0, 2, 2), k=2, tokens=6)] * 30,
            {FIGURES[5], FIGURES[6]},
            "All steps verified 2 drafts a request",
        ),
        (
            LogHeader(time=1.7e9, levels=[0, 1]),
            [drafted((0, 1, 1), k=n % 2, tokens=1 + n % 2, requests=1) for n in range(30)],
            {FIGURES[3]},
            "The model is dense",
        ),
        (HEADER, [drafted((0, 1, 1), k=n, tokens=1 + n, requests=1) for n in range(2)], {*FIGURES[1:3]}, "too few"),
        (
            LogHeader(time=1.7e9, levels=[3, 4], experts=8, top_k=2),
            [drafted((0, 1, 1), k=3 + n % 2, tokens=1 + n % 2, requests=1) for n in range(30)],
            {FIGURES[6]},
            "the schedule's least, 3",
        ),
    ],
)
def test_what_a_log_lacks_is_said_in_place_of_a_figure(
    tmp_path: Path, header: LogHeader, records: list[StepRecord], lacking: set[str], said: str
) -> None:
    log = read(tmp_path, header, *records)
    model = Constant(5.0) + ExpertReads(0.1, SplitPower(0.9, 0.8, 64, 6)) + PerToken(0.1)
    report = reported(log, fitted(model) if len(cost_steps(log).ms) else None)
    sections = sections_of(report)
    assert {section.title for section in sections if section.lacking} - {"Error by requests and tokens"} == lacking
    assert all(bool(section.figure) != bool(section.lacking) for section in sections if section.title in FIGURES)
    assert said in Page(page_of(report, sections)).text


def test_acceptance_has_its_own_denominators_by_position_and_text(tmp_path: Path) -> None:
    log = read(
        tmp_path,
        HEADER,
        drafted((0, 3, 1), (1, 2, 2)),
        drafted((0, 1, 0), (1, 3, 3)),
        step_record(),
        drafted((0, 3, 3)),
    )
    usual, code, every = acceptance_of(log.steps)
    assert (usual.text, code.text, every.text) == ("usual text", "code", "all text")
    # A draft behind a rejected one was not tested.
    assert usual.tested.tolist() == [3, 2, 1]
    assert usual.accepted.tolist() == [2, 1, 1]
    assert code.tested.tolist() == [2, 2, 1]
    assert code.accepted.tolist() == [2, 2, 1]
    assert every.tested.tolist() == [5, 4, 2]
    low, high = usual.interval()
    assert np.all((low < usual.rates) & (usual.rates <= high) & (high <= 1.0))


def test_time_leaves_out_pauses_and_what_is_between_runs(tmp_path: Path) -> None:
    times = [0.0, 1.0, 1.5, 1e4, 9e3, 9e3 + 2.0]
    log = read(tmp_path, HEADER, *(step_record(time=time) for time in times))
    assert elapsed_seconds(log.steps).tolist() == [0.0, 1.0, 1.5, 6.5, 6.5, 8.5]
    other = written(
        tmp_path / "other.jsonl", LogHeader(time=0.0, run="two"), step_record(time=5.0), step_record(time=6.0)
    )
    both = read_log([tmp_path / "log.jsonl", other])
    assert elapsed_seconds(both.steps).tolist() == [0.0, 1.0, 1.5, 6.5, 6.5, 8.5, 8.5, 9.5]


def test_k_over_time_is_shares_of_the_steps_of_each_slice(tmp_path: Path) -> None:
    steps = [step_record(time=0.1 * n, k=2 if n < 50 else 4 * (n % 2), forced=n >= 90) for n in range(100)]
    lengths = lengths_of(read(tmp_path, HEADER, *steps, step_record(untaught="unknown", k=9)).steps)
    assert lengths is not None
    assert lengths.levels.tolist() == [0, 2, 4]
    assert lengths.steps.tolist() == [25, 50, 25]
    assert lengths.forced.tolist() == [5, 0, 5]
    assert lengths.shares.shape == (len(lengths.edges) - 1, 3)
    np.testing.assert_allclose(lengths.shares.sum(1), 1.0)
    assert lengths.shares[10].tolist() == [0.0, 1.0, 0.0]


def test_goodput_is_expected_tokens_by_predicted_time() -> None:
    many = 10**9
    acceptance = Acceptance("all text", np.array([many // 2, many // 4, 0]), np.array([many, many // 2, 0]))
    # Three tokens of one request are not two drafts where its draft lengths are said to be uneven.
    steps = features(
        tokens=[1, 2, 3, 4, 8], requests=[1, 1, 1, 4, 4], context=[100, 300, 200, 0, 0], uneven=[0, 0, 1, 0, 0]
    )
    fit = fitted(Constant(10.0) + PerToken(1.0) + Context(0.01), np.diag([0.04, 0.0, 0.0]))
    one, four = goodput_of(fit, steps, acceptance, (0, 2, 3))
    # The third position was never tested, so nothing is said of k = 3.
    assert one.k.tolist() == [0, 1, 2]
    np.testing.assert_allclose(one.tokens_per_ms, [1 / 13, 1.5 / 14, 1.75 / 15])
    np.testing.assert_allclose(four.tokens_per_ms, [4 / 14, 6 / 18, 7 / 22])
    np.testing.assert_allclose(one.relative_error, [0.2 / 13, 0.2 / 14, 0.2 / 15], rtol=1e-4)
    assert one.allowed.tolist() == [True, False, True]
    assert one.served.tolist() == [True, True, False]
    # k = 1 has the most, and is not in the schedule.
    assert (one.k[one.best], four.k[four.best]) == (2, 2)


def test_doubt_of_acceptance_is_in_goodput() -> None:
    acceptance = Acceptance("all text", np.array([50]), np.array([100]))
    (curve,) = goodput_of(fitted(Constant(1.0)), features(tokens=[1], requests=[1]), acceptance, (0, 1))
    np.testing.assert_allclose(curve.relative_error, [0.0, 0.05 / 1.5], rtol=0.02)


def test_curves_have_the_standard_error_of_the_covariance() -> None:
    covariance = np.array([[0.04, -0.01], [-0.01, 0.01]])
    steps = features(tokens=[1, 3], requests=[1, 1])
    ms, error = with_error(fitted(Constant(2.0) + PerToken(1.0), covariance), lambda model, at: model(at), steps)
    np.testing.assert_allclose(ms, [3.0, 5.0])
    np.testing.assert_allclose(error, np.sqrt([0.04 - 0.02 + 0.01, 0.04 - 0.06 + 0.09]))


def test_cost_curves_go_where_steps_without_prompts_went() -> None:
    steps = features(
        tokens=[2, 4, 4, 9, 3, 6],
        requests=[1, 1, 1, 1, 3, 3],
        context=[100, 200, 300, 0, 0, 0],
        prefill=[0, 0, 0, 50, 0, 0],
    )
    picture = cost_picture(fitted(Constant(1.0) + Context(0.01)), steps, np.arange(1.0, 7.0))
    one, three = picture.curves
    assert (one.requests, one.tokens.tolist()) == (1.0, [2, 3, 4])
    np.testing.assert_allclose(one.value, [2.0, 2.75, 3.5])
    assert three.tokens.tolist() == [3, 4, 5, 6]
    assert [ms.tolist() for ms in picture.ms] == [[1.0, 2.0, 3.0], [5.0, 6.0]]
    assert (picture.steps, picture.batches) == (5, 2)


def test_many_steps_are_thinned_and_many_batch_sizes_too() -> None:
    requests = np.repeat(np.arange(1.0, 41.0), 1000)
    steps = features(tokens=requests, requests=requests)
    picture = cost_picture(fitted(Constant(1.0)), steps, requests)
    assert picture.steps == 6000
    assert sum(map(len, picture.ms)) == 1200
    assert [curve.requests for curve in picture.curves] == [1, 9, 17, 24, 32, 40]
    assert batches_shown(np.array([8.0] * 50 + [3.0])).tolist() == [8.0]


def test_residuals_are_above_0_where_steps_take_longer_than_predicted() -> None:
    tokens, ms = np.repeat([1.0, 2.0, 3.0], [50, 50, 2]), np.repeat([10.0, 20.0, 30.0], [50, 50, 2])
    percent = percent_longer(ms, np.repeat([8.0, 25.0, 30.0], [50, 50, 2]))
    residuals = residuals_of(tokens, np.arange(102.0), percent)
    # The group of two is too small.
    assert residuals.by_tokens.x.tolist() == [1.0, 2.0]
    np.testing.assert_allclose(residuals.by_tokens.median, [20.0, -25.0])
    assert len(residuals.by_time.x) == 5
    assert residuals.reach == pytest.approx(25.0)
    tenths = band(np.arange(101.0), np.arange(101.0))
    assert (tenths.low[0], tenths.x[0], tenths.high[0]) == pytest.approx((1.9, 9.5, 17.1))


def test_experts_are_the_rule_of_the_fit() -> None:
    engine = Engine(experts=64, top_k=6)
    steps = features(tokens=np.tile([4, 8], 30), requests=np.tile([1, 2], 30))
    split = fitted(Constant(1.0) + ExpertReads(0.1, SplitPower(1.0, 0.5, 64, 6)), np.diag([0.0, 0.0, 0.0, 0.01]))
    picture = expert_picture(split, engine, steps)
    assert picture is not None
    one, two = picture.curves
    assert (one.requests, two.requests) == (1.0, 2.0)
    np.testing.assert_allclose(one.value[[0, -1]], [6.0, 64 * (1 - (58 / 64) ** 2)])
    np.testing.assert_allclose(two.value[-1], 64 * (1 - (58 / 64) ** 4))
    assert one.error[0] == pytest.approx(0.0)
    assert one.error[-1] > 0
    assert expert_picture(fitted(Constant(1.0)), engine, steps) is None


def test_errors_are_by_requests_and_tokens_the_most_frequent_first() -> None:
    steps = features(tokens=[2, 4, 4, 4], requests=[1, 2, 2, 2])
    often, once = errors_by_tokens(steps, np.array([10.0, 8.0, 10.0, 20.0]), np.array([9.0, 10.0, 10.0, 10.0]))
    assert (often.requests, often.tokens, often.steps, often.ms, often.predicted_ms) == (2, 4, 3, 10.0, 10.0)
    assert often.error_percent == pytest.approx((25 + 0 + 50) / 3)
    assert often.bias_percent == pytest.approx(0.0)
    assert once.bias_percent == pytest.approx(10.0)
