"""All that a report says of a log, as numbers; in place of what the log lacks, a sentence that says so."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from akjax.forms import Engine
from akjax.step_log import LogHeader

from .reading_arrays import CostSteps
from .reading_schema import Refused, StepLog
from .report_cost import (
    CostPicture,
    ExpertPicture,
    FittedCost,
    Residuals,
    TokenError,
    cost_picture,
    errors_by_tokens,
    expert_picture,
    percent_longer,
    predicted,
    residuals_of,
)
from .report_drafts import (
    Acceptance,
    Goodput,
    Lengths,
    acceptance_of,
    elapsed_seconds,
    goodput_of,
    lengths_of,
)

_NO_TIMES = "No step of these logs has a time of its own, so they say nothing of what steps cost."
# Of fewer steps no picture says how their errors are spread.
_FEW_STEPS = 20
_NO_DRAFTS = "No step of these logs verified drafts, so they say nothing of acceptance."


class Report(NamedTuple):
    """What a report says.

    Attributes:
        headers: of the runs.
        paths: the files that were read.
        rows: steps that were read.
        span: Unix seconds of the first and the last step; None without steps.
        refusals: rows that were refused in reading.
        left_out: steps that do not count for the cost, by reason.
        steps: that count.
        fit: of the cost; None if there is nothing to fit.
        error_percent: mean of |predicted - measured| / measured on the steps that count; None without.
        cells: the error by requests and tokens.
        cost: step times, or why there are none, as all that follow.
        residuals: of them.
        experts: touched.
        acceptance: by kind of text, at last of all text.
        lengths: k over time.
        goodput: by batch size.
    """

    headers: tuple[LogHeader, ...]
    paths: tuple[Path, ...]
    rows: int
    span: tuple[float, float] | None
    refusals: tuple[Refused, ...]
    left_out: dict[str, int]
    steps: int
    fit: FittedCost | None
    error_percent: float | None
    cells: list[TokenError]
    cost: CostPicture | str
    residuals: Residuals | str
    experts: ExpertPicture | str
    acceptance: tuple[Acceptance, ...] | str
    lengths: Lengths | str
    goodput: tuple[Goodput, ...] | str


def report_of(log: StepLog, steps: CostSteps, engine: Engine, fit: FittedCost | None) -> Report:
    """The report on a log.

    Args:
        log: that was read.
        steps: of it that tell what steps cost.
        engine: that it is of.
        fit: of the cost, of these steps or of others; None if `steps` is empty.
    """
    acceptance = acceptance_of(log.steps) or _NO_DRAFTS
    times = (pl.col("time").min(), pl.col("time").max().alias("last"))
    report = Report(
        headers=log.headers,
        paths=log.paths,
        rows=len(log.steps),
        span=log.steps.select(times).row(0) if len(log.steps) else None,
        refusals=log.refusals,
        left_out=steps.left_out,
        steps=len(steps.ms),
        fit=fit,
        error_percent=None,
        cells=[],
        cost=_NO_TIMES,
        residuals=_NO_TIMES,
        experts=_NO_TIMES,
        acceptance=acceptance,
        lengths=_lengths(log.steps),
        goodput=_NO_TIMES,
    )
    if fit is None or not len(steps.ms):
        return report
    predicted_ms = predicted(fit.model, steps.features)
    percent = percent_longer(steps.ms, predicted_ms)
    tokens, seconds = np.asarray(steps.features.tokens), elapsed_seconds(log.steps)[steps.row]
    return report._replace(
        error_percent=float(np.mean(np.abs(percent))),
        cells=errors_by_tokens(steps.features, steps.ms, predicted_ms),
        cost=cost_picture(fit, steps.features, steps.ms),
        residuals=residuals_of(tokens, seconds, percent)
        if len(steps.ms) >= _FEW_STEPS
        else f"Fewer than {_FEW_STEPS} steps have a time of their own: too few to say how errors are spread.",
        experts=_experts(fit, engine, steps),
        goodput=_goodput(fit, engine, steps, acceptance),
    )


def _lengths(steps: pl.DataFrame) -> Lengths | str:
    lengths = lengths_of(steps)
    if lengths is None:
        return "No step of these logs says which k was planned."
    if len(lengths.levels) == 1:
        (level,), (count,) = lengths.levels, lengths.steps
        return f"k was {level} in {'the only step' if count == 1 else f'all {count:,} steps'}."
    return lengths


def _experts(fit: FittedCost, engine: Engine, steps: CostSteps) -> ExpertPicture | str:
    if engine.routing is None:
        return "The model is dense, as far as these logs say: every token reads the same weights."
    return expert_picture(fit, engine, steps.features) or f"The form {fit.file.form} has no term for experts."


def _goodput(
    fit: FittedCost, engine: Engine, steps: CostSteps, acceptance: tuple[Acceptance, ...] | str
) -> tuple[Goodput, ...] | str:
    if isinstance(acceptance, str):
        return acceptance
    features = steps.features
    drafts = np.unique(np.round(np.asarray(features.tokens) / np.asarray(features.requests) - 1.0))
    if len(drafts) == 1:
        return f"All steps verified {drafts[0]:.0f} drafts a request, so nothing says what another k would cost."
    curves = goodput_of(fit, features, acceptance[-1], engine.lengths)
    return curves or f"No step verified as many drafts as the schedule's least, {engine.lengths[0]}."
