"""Which form predicts best what it was not fitted on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from jaxtyping import Bool, Float, Int

from akjax.arrays import Array
from akjax.cost import AbstractCostModel
from akjax.features import StepFeatures

from .cost import CostFit, fit_cost
from .loss import FREEDOM, SCALE_OF_NORMAL

# Fits for each form, beside the one of all steps and that of the small batches.
FOLDS = 8
# Share of a mean's sampling distribution that its interval holds.
CONFIDENCE = 0.95


class Comparison(NamedTuple):
    """How well a form predicts.

    Errors are means of |predicted - measured| / measured in percent, each cell's own mean counting alike.

    Attributes:
        form: its name.
        parameters: how many it has.
        fit: of all steps.
        fitted_percent: error on the steps that it was fitted on.
        held_out_percent: error on cells that it was not fitted on.
        held_out_interval: of that error, from where to where the mean over cells is likely to lie (95%).
        log_likelihood: of held-out steps, a step, under Student's t about the logarithm of the prediction.
        larger_percent: error on the larger half of the batches, fitted on the smaller; None where all are of one size.
    """

    form: str
    parameters: int
    fit: CostFit
    fitted_percent: float
    held_out_percent: float
    held_out_interval: tuple[float, float]
    log_likelihood: float
    larger_percent: float | None


def cells_of(steps: StepFeatures) -> Int[np.ndarray, " steps"]:
    """The cell of each step, a number for each pair of requests and drafts per request that there is."""
    requests, tokens = np.asarray(steps.requests), np.asarray(steps.tokens)
    drafts = np.round((tokens - requests) / np.maximum(requests, 1.0))
    _, cell = np.unique(np.stack([np.broadcast_to(requests, tokens.shape), drafts]), axis=1, return_inverse=True)
    return np.ravel(cell)


def compared(
    forms: Mapping[str, AbstractCostModel],
    steps: StepFeatures,
    ms: Float[Array, " steps"],
    *,
    report: Callable[[str], object] = lambda form: None,
) -> list[Comparison]:
    """The forms by their held-out error, the best first.

    Cross-validated over cells, so that no step is predicted from others of its own batch and draft length: the cells
    are dealt at random into at most eight folds, each predicted by a fit of the others.

    Args:
        forms: by name, each where its search begins.
        steps: that were measured, along one axis.
        ms: that they took.
        report: told the name of each form before it is fitted.

    Raises:
        ValueError: fewer than two cells, or what `fit_cost` refuses.
    """
    cell = cells_of(steps)
    cells = int(cell.max()) + 1
    if cells < 2:
        raise ValueError("these steps are all of one batch size and draft length: nothing can be held out")
    fold_of_cell = np.random.default_rng(0).permutation(cells) % min(FOLDS, cells)
    fold = fold_of_cell[cell]
    requests = np.broadcast_to(np.asarray(steps.requests), cell.shape)
    small = requests <= np.median(np.unique(requests))
    measured: Any = np.asarray(ms, np.float64)
    comparisons = []
    for name, model in forms.items():
        report(name)
        comparisons.append(_comparison(name, model, steps, measured, cell, fold, small))
    return sorted(comparisons, key=lambda comparison: comparison.held_out_percent)


class CellError(NamedTuple):
    """What a fit says of the steps of one kind, by their medians.

    Attributes:
        requests: of each step.
        drafts: verified per request.
        steps: how many there are.
        ms: measured.
        predicted_ms: by the fit.
        error_percent: mean of |predicted - measured| / measured.
    """

    requests: float
    drafts: float
    steps: int
    ms: float
    predicted_ms: float
    error_percent: float


def errors_by_cell(steps: StepFeatures, ms: Float[Array, " steps"], fit: CostFit) -> list[CellError]:
    """A fit's error by requests and drafts per request, the most frequent kind of step first."""
    cell, predicted, measured = cells_of(steps), _predicted(fit, steps), np.asarray(ms, np.float64)
    requests = np.broadcast_to(np.asarray(steps.requests), measured.shape)
    rows = []
    for number in range(int(cell.max()) + 1):
        here = cell == number
        batch = float(requests[here][0])
        rows.append(
            CellError(
                requests=batch,
                drafts=float(np.round(np.asarray(steps.tokens)[here][0] / max(batch, 1.0) - 1.0)),
                steps=int(here.sum()),
                ms=float(np.median(measured[here])),
                predicted_ms=float(np.median(predicted[here])),
                error_percent=float(100.0 * np.mean(np.abs(predicted[here] - measured[here]) / measured[here])),
            )
        )
    return sorted(rows, key=lambda row: -row.steps)


def _comparison(
    name: str,
    start: AbstractCostModel,
    steps: StepFeatures,
    ms: Any,
    cell: Int[np.ndarray, " steps"],
    fold: Int[np.ndarray, " steps"],
    small: Bool[np.ndarray, " steps"],
) -> Comparison:
    fit = fit_cost(start, steps, ms)
    held_out, noise = np.zeros_like(ms), np.zeros_like(ms)
    for number in np.unique(fold):
        here = fold == number
        others: Any = (~here).astype(np.float64)
        of_others = fit_cost(start, steps, ms, weights=others)
        held_out[here], noise[here] = _predicted(of_others, steps)[here], of_others.noise
    errors = _cell_errors(held_out, ms, cell)
    larger = None
    if not np.all(small):
        smaller: Any = small.astype(np.float64)
        of_small = fit_cost(start, steps, ms, weights=smaller)
        larger = float(np.mean(_cell_errors(_predicted(of_small, steps)[~small], ms[~small], cell[~small])))
    log_likelihood = scipy.stats.t.logpdf(
        np.log(ms / np.maximum(held_out, 1e-9)), FREEDOM, scale=SCALE_OF_NORMAL * noise
    )
    return Comparison(
        form=name,
        parameters=len(fit.values),
        fit=fit,
        fitted_percent=float(np.mean(_cell_errors(_predicted(fit, steps), ms, cell))),
        held_out_percent=float(np.mean(errors)),
        held_out_interval=_interval(errors),
        log_likelihood=float(np.mean(log_likelihood)),
        larger_percent=larger,
    )


def _predicted(fit: CostFit, steps: StepFeatures) -> Float[np.ndarray, " steps"]:
    with jax.enable_x64(True):
        return np.asarray(fit.model(jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), steps)))


def _cell_errors(
    predicted: Float[np.ndarray, " steps"], ms: Float[np.ndarray, " steps"], cell: Int[np.ndarray, " steps"]
) -> Float[np.ndarray, " cells"]:
    """The mean error of each cell that there is, in percent."""
    _, number = np.unique(cell, return_inverse=True)
    errors = np.abs(predicted - ms) / ms
    return 100.0 * np.bincount(number, errors) / np.bincount(number)


def _interval(errors: Sequence[float] | Float[np.ndarray, " cells"]) -> tuple[float, float]:
    """Of the mean, by Student's t; it cannot be negative."""
    mean, error = float(np.mean(errors)), float(scipy.stats.sem(errors)) if len(errors) > 1 else float("inf")
    reach = float(scipy.stats.t.ppf(0.5 + CONFIDENCE / 2, max(len(errors) - 1, 1))) * error
    return max(mean - reach, 0.0), mean + reach
