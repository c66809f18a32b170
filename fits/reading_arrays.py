"""From the columns of a log to the arrays that fits take."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from jaxtyping import Bool, Float, Int

from akjax.cost import UNEVEN
from akjax.features import StepFeatures
from akjax.forms import Engine

from .acceptance import DraftSequence
from .reading_schema import LIST_COLUMNS, StepLog


class CostSteps(NamedTuple):
    """Steps whose time is known to be their own.

    Attributes:
        features: of the steps, every field a float64 for each.
        ms: that they took.
        log: the run that each belongs to, as in `StepLog.headers`; all 0 for a table.
        row: of each, its row in `StepLog.steps` or in the table: those that are not here were left out.
        left_out: how many rows were, by reason; a row with several reasons counts for the first.
        told: the names of the features that the log or the table tells; the others are 0 for want of better.
    """

    features: StepFeatures
    ms: Float[np.ndarray, " steps"]
    log: Int[np.ndarray, " steps"]
    row: Int[np.ndarray, " steps"]
    left_out: dict[str, int]
    told: tuple[str, ...]


class AcceptanceSequences(NamedTuple):
    """What became of drafts, ready for a scan over steps; a step has as many rows as the step with most requests.

    Rows beyond a step's own requests are padding: `counts` is False, and drafted, accepted and mode are 0.

    Attributes:
        request: of each row, its request, numbered from 0 over all runs; `requests` marks padding.
        drafted: drafts verified.
        accepted: of them.
        mode: of the request's text: 0 usual, 1 code, 2 tool call.
        fresh: whether the request is seen for the first time.
        counts: whether the row is a request at all.
        requests: how many there are in all.
        features: of each step, those without drafts included.
        log: of each step, the run that it belongs to, as in `StepLog.headers`; a run's steps are next to each other.
    """

    request: Int[np.ndarray, "steps rows"]
    drafted: Int[np.ndarray, "steps rows"]
    accepted: Int[np.ndarray, "steps rows"]
    mode: Int[np.ndarray, "steps rows"]
    fresh: Bool[np.ndarray, "steps rows"]
    counts: Bool[np.ndarray, "steps rows"]
    requests: int
    features: StepFeatures
    log: Int[np.ndarray, " steps"]


# No step is as short, and a fit of relative errors would go by those that say they are.
_LEAST_MS = 1e-3


def cost_steps(log: StepLog) -> CostSteps:
    """The steps that tell what steps cost: those whose gap is their own time, whatever the learner made of it.

    So also those that it refused as a surprise. Left out are gaps with waiting in them, steps that nobody saw
    scheduled, and what has no time.
    """
    steps = log.steps
    untaught, gap = steps["untaught"], steps["gap_ms"].fill_null(np.nan).to_numpy()
    row, left_out = kept(
        len(steps),
        {
            "the engine was idle in the gap": (untaught == "idle").to_numpy(),
            "the step is unknown": (untaught == "unknown").to_numpy(),
            "no gap": np.isnan(gap),
            "a gap below a microsecond": gap < _LEAST_MS,
        },
    )
    features = _features(steps)
    return CostSteps(
        StepFeatures(**{name: values[row] for name, values in features.items()}),
        gap[row],
        steps["log"].to_numpy()[row],
        row,
        left_out,
        tuple(features),
    )


def acceptance_sequences(log: StepLog) -> AcceptanceSequences:
    """What became of the drafts of every step.

    It takes 18 bytes for each step and each request of the step with most: `StepLog.steps` may be cut beforehand.
    """
    steps = log.steps
    size = steps["request"].list.len().to_numpy().astype(np.int64)
    shape = len(steps), int(size.max(initial=0))
    flat = steps.filter(pl.col("request").list.len() > 0).select(*LIST_COLUMNS).explode(*LIST_COLUMNS)
    counts = np.arange(shape[1]) < size[:, None]

    runs = np.repeat(steps["log"].to_numpy().astype(np.int64), size)
    keys = (runs << 32) + flat["request"].to_numpy().astype(np.int64)
    requests, first, number = np.unique(keys, return_index=True, return_inverse=True)
    fresh = np.zeros(shape, bool)
    fresh[counts] = np.isin(np.arange(len(keys)), first, assume_unique=True)

    def padded(values: Int[np.ndarray, " drafted"], padding: int = 0) -> Int[np.ndarray, "steps rows"]:
        table = np.full(shape, padding, np.int32)
        table[counts] = values
        return table

    return AcceptanceSequences(
        request=padded(number, len(requests)),
        drafted=padded(flat["drafted"].to_numpy()),
        accepted=padded(flat["accepted"].to_numpy()),
        mode=padded(flat["mode"].to_numpy()),
        fresh=fresh,
        counts=counts,
        requests=len(requests),
        features=StepFeatures(**_features(steps)),
        log=steps["log"].to_numpy(),
    )


def draft_sequence(log: StepLog) -> DraftSequence:
    """What became of drafts, as the fit of acceptance takes it: the steps that had drafts, of all text as one."""
    all_steps = acceptance_sequences(log)
    some = all_steps.counts.any(1)
    return DraftSequence(
        all_steps.request[some],
        all_steps.drafted[some],
        all_steps.accepted[some],
        all_steps.fresh[some],
        all_steps.requests,
    )


def engine_of(log: StepLog) -> Engine:
    """What a cost form may know of the engine that a log is of.

    Raises:
        ValueError: the runs are of engines that differ in more than the draft lengths to choose from: what one learned
            of its steps says nothing of the other's.
    """
    told = {
        name: [getattr(header, name) for header in log.headers]
        for name in ("model", "device", "experts", "top_k", "captured_sizes", "tensor_parallel", "expert_parallel")
    }
    different = {name: values for name, values in told.items() if any(value != values[0] for value in values)}
    if different:
        named = "; ".join(
            f"{name} {' and '.join(sorted({repr(v) for v in values}))}" for name, values in different.items()
        )
        raise ValueError(f"the logs are of engines that differ: {named}. Fit each by itself")
    header = log.headers[0]
    lengths = {length for header in log.headers for length in header.levels} or {*log.steps["k"].unique()}
    return Engine(
        lengths=tuple(sorted(lengths)) or Engine().lengths,
        experts=header.experts,
        top_k=header.top_k,
        sizes=tuple(header.captured_sizes),
        uneven=UNEVEN if log.steps["uneven"].any() else None,
    )


def kept(
    rows: int, faults: Mapping[str, Bool[np.ndarray, " rows"]]
) -> tuple[Int[np.ndarray, " steps"], dict[str, int]]:
    """The rows that have none of the faults, and how many others have which for their first."""
    sound = np.ones(rows, bool)
    left_out: dict[str, int] = {}
    for reason, has in faults.items():
        if count := int(np.count_nonzero(has & sound)):
            left_out[reason] = count
        sound &= ~has
    return np.flatnonzero(sound), left_out


def _features(steps: pl.DataFrame) -> dict[str, Any]:
    """The fields of `StepFeatures`, float64 of each step."""
    names = ("tokens", "requests", "drafting", "context", "prefill", "uneven")
    return {name: steps[name].cast(pl.Float64).to_numpy() for name in names}
