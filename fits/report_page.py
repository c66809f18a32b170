"""A report as one HTML page, which needs nothing beside it."""

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import jinja2
import numpy as np
from markupsafe import Markup

from akjax.fit_file import FitFile
from akjax.step_log import LogHeader

from .report import Report
from .report_drafts import LONGEST_PAUSE_S, Acceptance, Goodput, Lengths
from .report_figures import (
    acceptance_figure,
    cost_figure,
    experts_figure,
    goodput_figure,
    lengths_figure,
    residuals_by_time_figure,
    residuals_by_tokens_figure,
)

# Rows of a table that a reader may be asked to go through.
_MOST_ROWS = 30
_TEMPLATE = Path(__file__).with_name("report.html")


class Table(NamedTuple):
    """A table of a page.

    Attributes:
        head: of each column.
        rows: of cells, as many as there are columns. A table without rows is not shown.
        caption: of it.
        words: whether the cells are words and not numbers.
    """

    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    caption: str = ""
    words: bool = False


class Section(NamedTuple):
    """A part of a page.

    Attributes:
        title: of it.
        figure: an SVG element.
        lacking: why there is no figure, in place of one.
        text: how the figure is to be read.
        points: a sentence each.
        tables: with the numbers.
        wide: whether it takes the width of two.
    """

    title: str
    figure: Markup | None = None
    lacking: str = ""
    text: str = ""
    points: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    wide: bool = False


def sections_of(report: Report) -> list[Section]:
    """The parts of the page, figures first."""
    return [
        _cost(report),
        *_residuals(report),
        _experts(report),
        _acceptance(report.acceptance),
        _lengths(report.lengths),
        _goodput(report.goodput),
        *([] if report.fit is None else [_parameters(report)]),
        _errors(report),
        _rows(report),
        _provenance(report),
    ]


def page_of(report: Report, sections: Iterable[Section]) -> str:
    """The page. What comes from logs and fits is text in it, whatever they say."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    model = " and ".join(sorted({header.model or "a model without a name" for header in report.headers}))
    device = " and ".join(sorted({header.device for header in report.headers if header.device}))
    facts = [("steps read", f"{report.rows:,}"), ("with a time of their own", f"{report.steps:,}")]
    if report.fit is not None and report.error_percent is not None:
        facts += [
            ("mean error of the fit", f"{report.error_percent:.2f}%"),
            ("form", report.fit.file.form),
        ]
    if report.span is not None:
        facts.append(("first step", _when(report.span[0])))
    return environment.from_string(_TEMPLATE.read_text("utf-8")).render(
        model=model,
        device=device,
        runs=_count(len(report.headers), "run"),
        facts=facts,
        sections=sections,
    )


def write_page(path: Path, page: str) -> int:
    """Writes a page, whole or not at all: a file that is there already is replaced at the end. Returns its bytes.

    Raises:
        OSError: it cannot be written.
    """
    # The name of a file need not be text.
    content = page.encode("utf-8", "replace")
    beside = path.with_name(path.name + ".part")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return len(content)


def _cost(report: Report) -> Section:
    title, picture = "What a step costs", report.cost
    if isinstance(picture, str) or report.fit is None:
        return Section(title, lacking=str(picture))
    shown = len(picture.curves)
    drawn = sum(map(len, picture.ms))
    batches = (
        "" if shown == picture.batches else f" {shown} of {picture.batches} batch sizes are shown, evenly among them."
    )
    return Section(
        title,
        Markup(cost_figure(picture)),
        text=f"Points: {_some(drawn, picture.steps)} without prompts. Lines: the fit, at the context and the drafting"
        " that steps of as many tokens had on average, as far as the steps go. Bands, often thinner than the line:"
        f" where the line lies (95%) by the fit's covariance. A step is {report.error_percent:.1f}% off what the fit"
        f" says on average, those with prompts included.{batches}",
    )


def _residuals(report: Report) -> Iterator[Section]:
    residuals = report.residuals
    titles = "Error of the fit against tokens", "Error of the fit over time"
    if isinstance(residuals, str):
        yield from (Section(title, lacking=residuals) for title in titles)
        return
    seen = f"Points: {_some(len(residuals.percent), residuals.steps)}; 1% of them lie beyond the edges."
    yield Section(
        titles[0],
        Markup(residuals_by_tokens_figure(residuals)),
        text=f"(measured - predicted) / measured, steps with prompts too. {seen} A median away from 0 at some tokens is"
        " what the form cannot say.",
    )
    yield Section(
        titles[1],
        Markup(residuals_by_time_figure(residuals)),
        text=f"The same over time. {_time(report)} A median that wanders is a machine that changed its speed, or text"
        " that routes otherwise.",
    )


def _experts(report: Report) -> Section:
    title, picture = "Experts touched", report.experts
    if isinstance(picture, str):
        return Section(title, lacking=picture)
    padded = any(header.captured_sizes for header in report.headers)
    alone = picture.curves[0]
    one_token = ""
    if alone.tokens[0] == 1 and abs(alone.value[0] / picture.top_k - 1.0) > 0.1:
        one_token = (
            f" A token alone touches {picture.top_k}, and the rule says {alone.value[0]:.2g}: take it for what fits the"
            " times, and not for a count."
        )
    return Section(
        title,
        Markup(experts_figure(picture)),
        text=f"Distinct experts of a layer that a step's tokens touch together, by the fit's rule {picture.rule}; the"
        " band is where the line lies (95%). A log has no count of experts: this is what the times suggest."
        + one_token
        + (" Tokens are counted as padded to the captured sizes." if padded else ""),
    )


def _acceptance(acceptance: tuple[Acceptance, ...] | str) -> Section:
    title = "Which drafts get accepted"
    if isinstance(acceptance, str):
        return Section(title, lacking=acceptance)
    kinds = acceptance[:-1] if len(acceptance) == 2 else acceptance
    rows = [
        (
            str(at + 1),
            *(f"{k.rates[at]:.3f} of {k.tested[at]:,}" if k.tested[at] else "-" for k in kinds),
        )
        for at in range(len(acceptance[-1].tested))
    ]
    alone = f" All drafts were of one kind, {kinds[0].text}." if len(kinds) == 1 else ""
    return Section(
        title,
        Markup(acceptance_figure(acceptance)),
        text="Of the drafts at a position that were tested, that is all before them were accepted, the share accepted;"
        f" bars: 95% intervals.{alone} Text that is accepted well gets to deep positions, so rates of mixed text rise"
        " with the position; where k adapts, such text is also drafted more deeply, and the deep rates flatter.",
        tables=(Table(("position", *(kind.text for kind in kinds)), rows, "Accepted, of drafts tested"),),
    )


def _lengths(lengths: Lengths | str) -> Section:
    title = "k over time"
    if isinstance(lengths, str):
        return Section(title, lacking=lengths)
    total = int(lengths.steps.sum()) + lengths.others
    rows = [
        (f"{level:,}", f"{steps:,}", f"{100 * steps / total:.1f}", f"{forced:,}")
        for level, steps, forced in zip(lengths.levels, lengths.steps, lengths.forced, strict=True)
    ]
    others = f" {lengths.others:,} steps at other k are not shown." if lengths.others else ""
    return Section(
        title,
        Markup(lengths_figure(lengths)),
        text=f"Of the steps of each of {len(lengths.edges) - 1} slices of time, the share that planned each k.{others}",
        tables=(Table(("k", "steps", "%", "forced"), rows, "Steps by the k that they planned"),),
    )


def _goodput(goodput: tuple[Goodput, ...] | str) -> Section:
    title = "Which k is best"
    if isinstance(goodput, str):
        return Section(title, lacking=goodput)
    rows = []
    for curve in goodput:
        best = curve.best
        rivals = [
            f"{k}"
            for k, value, error, allowed in zip(
                curve.k, curve.tokens_per_ms, curve.relative_error, curve.allowed, strict=True
            )
            if allowed and value >= 0.99 * curve.tokens_per_ms[best]
        ]
        reach = 1.96 * curve.relative_error[best]
        rows.append(
            (
                f"{curve.requests:,.0f}",
                f"{curve.k[best]}",
                f"{curve.tokens_per_ms[best]:.4g}",
                f"{100 * reach:.1f}",
                ", ".join(rivals),
            )
        )
    return Section(
        title,
        Markup(goodput_figure(goodput)),
        text="Expected tokens per ms by the fitted cost and the measured acceptance of all text, relative to the best k"
        " of the schedule at each batch size. A step has no prompts, and as many drafts are made as verified. Marks: k"
        " of the schedule, filled where steps like that are in the log, hollow where the fit alone says so. Bands: 95%,"
        " of the level; what a curve's points share moves them together. What flatters acceptance flatters a large k.",
        tables=(
            Table(
                ("requests", "best k", "tokens per ms", "95% ± %", "k within 1% of it"),
                rows,
                "Goodput by batch size",
            ),
        ),
    )


def _parameters(report: Report) -> Section:
    assert report.fit is not None
    fit = report.fit
    rows = [
        (
            each.name,
            f"{each.value:.5g}",
            "not known" if each.standard_error is None else f"{each.standard_error:.2g}",
            "" if each.unit == "1" else each.unit,
            "yes" if each.determined else "no",
        )
        for each in fit.file.parameters
    ]
    sure = ["The steps that were fitted determine every parameter."] if fit.file.rows else []
    told = fit.file.findings or sure
    fitted = (
        f" {fit.file.rows:,} steps were fitted, mean error {fit.file.error_percent:.2f}%, noise of a step"
        f" {100 * fit.file.noise:.2f}%."
        if fit.file.rows
        else ""
    )
    return Section(
        "The fit",
        text=f"Cost model of form {fit.file.form}, {fit.source}.{fitted}",
        points=(*fit.notes, *told),
        tables=(Table(("parameter", "value", "standard error", "unit", "determined"), rows),),
    )


def _errors(report: Report) -> Section:
    title = "Error by requests and tokens"
    if not report.cells:
        return Section(title, lacking=str(report.residuals))
    rows = [
        (
            f"{cell.requests:,.0f}",
            f"{cell.tokens:,.0f}",
            f"{cell.steps:,}",
            f"{cell.ms:.3f}",
            f"{cell.predicted_ms:.3f}",
            f"{cell.error_percent:.2f}",
            f"{cell.bias_percent:+.2f}",
        )
        for cell in report.cells[:_MOST_ROWS]
    ]
    total = len(report.cells)
    which = (
        f"The {_MOST_ROWS} most frequent of {total:,} kinds of steps" if total > _MOST_ROWS else "All kinds of steps"
    )
    return Section(
        title,
        text=f"{which}: medians of ms; the mean of |predicted - measured| / measured; and the median of (measured -"
        " predicted) / measured.",
        tables=(Table(("requests", "tokens", "steps", "ms", "predicted", "error %", "median %"), rows),),
    )


def _rows(report: Report) -> Section:
    left_out = [(reason, f"{rows:,}") for reason, rows in report.left_out.items()]
    refused = [
        (
            each.path,
            each.reason,
            f"{each.rows:,}" if each.line else "-",
            f"{each.line}" if each.line else "-",
            each.found,
        )
        for each in report.refusals
    ]
    points = []
    if not refused:
        points.append("No row was refused in reading.")
    if not left_out:
        points.append("Every step has a time of its own.")
    return Section(
        "Rows",
        text=f"{report.rows:,} steps were read, and {report.steps:,} of them have a time of their own.",
        points=tuple(points),
        tables=(
            Table(("steps without a time of their own", "rows"), left_out),
            _cut(Table(("file", "refused in reading", "rows", "first line", "what was wrong"), refused, words=True)),
        ),
    )


def _provenance(report: Report) -> Section:
    made = [("this report", _when(datetime.now(UTC).timestamp()), f"akjax {version('akjax')}")]
    if report.fit is not None:
        made.append((f"the fit, {report.fit.source}", _when(report.fit.file.created), _fit_made_of(report.fit.file)))
    if report.span is not None:
        made.append(("the steps", f"{_when(report.span[0])} to {_when(report.span[1])}", ""))
    runs = [(header.run or "-", _when(header.time), header.policy or "-") for header in report.headers]
    return Section(
        "Where it is from",
        tables=(
            Table(("what", "when", "by"), made, words=True),
            Table(("engine", ""), _engine(report.headers), words=True),
            _cut(Table(("run", "begun", "policy"), runs, words=True)),
            _cut(Table(("file read",), [(str(path),) for path in report.paths], words=True)),
        ),
        wide=True,
    )


def _engine(headers: tuple[LogHeader, ...]) -> list[tuple[str, ...]]:
    """What the runs' headers say of the engine; where they differ, all that they say."""
    every = [_facts_of(header) for header in headers]
    values = {name: dict.fromkeys(facts[name] for facts in every if facts[name]) for name in every[0]}
    return [(name, "; ".join(said) or "-") for name, said in values.items()]


def _facts_of(header: LogHeader) -> dict[str, str]:
    experts = "none" if header.experts is None else f"{header.experts:,}, {header.top_k} for each token"
    expert_parallel = ", experts spread over them" if header.expert_parallel else ""
    return {
        "model": header.model,
        "device": header.device,
        "experts of a layer": experts,
        "captured sizes": ", ".join(map(str, header.captured_sizes)),
        "ranks": f"TP {header.tensor_parallel}, PP {header.pipeline_parallel}{expert_parallel}",
        "requests at once": f"{header.max_requests:,}" if header.max_requests else "",
        "drafting": header.method,
        "k to choose from": ", ".join(map(str, header.levels)),
        "versions": _versions(header.versions),
    }


def _cut(table: Table) -> Table:
    """The table with a last row that says so where it is too long."""
    left = len(table.rows) - _MOST_ROWS
    if left <= 0:
        return table
    rest = (f"and {left:,} more", *[""] * (len(table.head) - 1))
    return table._replace(rows=[*table.rows[:_MOST_ROWS], rest])


def _fit_made_of(file: FitFile) -> str:
    made_by = f"{_versions(file.versions)}; " if file.versions else ""
    return f"{made_by}from {', '.join(file.logs) or 'steps without a name'}"


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def _time(report: Report) -> str:
    runs = " Runs follow each other at once." if len(report.headers) > 1 else ""
    return f"Pauses of more than {LONGEST_PAUSE_S:.0f} s are cut to that.{runs}"


def _some(drawn: int, steps: int) -> str:
    if drawn == steps:
        return f"all {_count(steps, 'step')}"
    return f"{drawn:,} of {steps:,} steps, drawn at random"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _when(seconds: float) -> str:
    """A time of the day, UTC; what is no such time stays a number."""
    if not np.isfinite(seconds) or not 0.0 < seconds < 2.5e11:
        return f"{seconds:g} s"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
