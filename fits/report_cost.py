"""What a fitted cost model makes of logged steps: curves, residuals and errors, as numbers to draw and to list."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import polars as pl
from jax.flatten_util import ravel_pytree
from jaxtyping import Bool, Float, Int

from akjax.cost import AbstractCostModel, AbstractExpertUnion, IndependentTokens
from akjax.features import StepFeatures
from akjax.fit_file import FitFile, start_of
from akjax.forms import Engine

from .cost import CostFit

# Of the batch sizes that there are, so many get a curve, and none that is rare: so many steps are enough.
_MOST_BATCHES, _ENOUGH_STEPS = 6, 20
# A figure is a text file: so many single steps are drawn, and so many places are a curve's or a band's.
_MOST_POINTS, _MOST_PLACES, _MOST_BINS = 1200, 300, 40
# Of fewer neighbours tenths say nothing; where there are many, so many stand together at least.
_FEW_NEIGHBOURS, _NEIGHBOURS = 5, 20


class FittedCost(NamedTuple):
    """A fit to report on.

    Attributes:
        model: with the fitted parameters.
        covariance: of them, in the order of `model.parameters()`.
        file: what the fit says of itself.
        source: where it is from, in words.
        notes: what to know of it, a sentence each, beside the findings of `file`.
    """

    model: AbstractCostModel
    covariance: Float[np.ndarray, "p p"]
    file: FitFile
    source: str
    notes: tuple[str, ...] = ()


def fitted_here(fit: CostFit, file: FitFile) -> FittedCost:
    """The fit that was made of the very steps that are reported on."""
    notes = [] if fit.converged else ["The search has not converged: treat the parameters with care."]
    if outliers := len(fit.outliers):
        named = "step is an outlier" if outliers == 1 else "steps are outliers"
        notes.append(f"{outliers:,} {named}, more than five standard deviations off.")
    return FittedCost(fit.model, fit.covariance, file, "fitted to these logs", tuple(notes))


def fitted_before(file: FitFile, name: str, engine: Engine, *, runs: str = "") -> FittedCost:
    """A fit from its file, as serving on the engine of the logs would start from it.

    Args:
        file: that was read.
        name: of the file.
        engine: of the logs.
        runs: the form of another module that may be imported, as `akjax.fit_file.start_of` takes it.

    Raises:
        ValueError: what `start_of` refuses.
    """
    start = start_of(file, engine, runs=runs)
    notes = []
    if start.unmatched:
        notes.append(f"The fit and the engine of these logs do not share {', '.join(start.unmatched)}.")
    made_for = Engine()._replace(**{name: value for name, value in file.engine.items() if name in ("experts", "top_k")})
    if made_for.routing != engine.routing:
        notes.append("The fit was made for a model with other experts: here it is that of the logs.")
    covariance = start.covariance
    if covariance is None:
        notes.append("The fit gives no errors, so its curves have no bands.")
        covariance = np.zeros((len(start.model.parameters()),) * 2)
    return FittedCost(start.model, covariance, file, f"read from {name}", tuple(notes))


class Curve(NamedTuple):
    """Something that a fit says against tokens.

    Attributes:
        requests: of the steps; None where it is the same for any.
        tokens: ascending.
        value: at each.
        error: its standard error, from the covariance of the parameters.
    """

    requests: float | None
    tokens: Float[np.ndarray, " points"]
    value: Float[np.ndarray, " points"]
    error: Float[np.ndarray, " points"]


class CostPicture(NamedTuple):
    """Step times against tokens.

    Attributes:
        curves: of the fit, one for each batch size that is shown, each as far as its steps go.
        tokens: of the steps drawn with each curve.
        ms: that they took.
        steps: of which those are a sample.
        batches: sizes that there are.
    """

    curves: tuple[Curve, ...]
    tokens: tuple[Float[np.ndarray, " drawn"], ...]
    ms: tuple[Float[np.ndarray, " drawn"], ...]
    steps: int
    batches: int


class Band(NamedTuple):
    """What most of the steps near each other have.

    Attributes:
        x: the median place of each group of neighbours, ascending.
        low: a tenth of its steps are below.
        median: of them.
        high: a tenth of them are above.
    """

    x: Float[np.ndarray, " bins"]
    low: Float[np.ndarray, " bins"]
    median: Float[np.ndarray, " bins"]
    high: Float[np.ndarray, " bins"]


class Residuals(NamedTuple):
    """By how much steps took longer than predicted, in percent of what they took.

    Attributes:
        by_tokens: of all steps.
        by_time: of all steps, against elapsed seconds.
        tokens: of the steps drawn.
        seconds: of them, elapsed.
        percent: of them.
        steps: of which they are a sample.
        reach: of the picture, up and down: 1% of the steps are further off.
    """

    by_tokens: Band
    by_time: Band
    tokens: Float[np.ndarray, " drawn"]
    seconds: Float[np.ndarray, " drawn"]
    percent: Float[np.ndarray, " drawn"]
    steps: int
    reach: float


class ExpertPicture(NamedTuple):
    """Distinct experts of a layer that a step touches, as the fit has it.

    Attributes:
        curves: of the fit's rule: one, or one for each batch size if the rule asks for requests.
        independent: what independent tokens would touch, at the first curve's tokens.
        experts: routed experts of the layer.
        top_k: that a token picks.
        rule: the name of its class.
    """

    curves: tuple[Curve, ...]
    independent: Float[np.ndarray, " points"]
    experts: int
    top_k: int
    rule: str


class TokenError(NamedTuple):
    """A fit's error on the steps with as many requests and tokens.

    Attributes:
        requests: of each step.
        tokens: verified in each.
        steps: how many there are.
        ms: measured, the median.
        predicted_ms: the median.
        error_percent: mean of |predicted - measured| / measured.
        bias_percent: median of (measured - predicted) / measured: above 0 where steps take longer than predicted.
    """

    requests: float
    tokens: float
    steps: int
    ms: float
    predicted_ms: float
    error_percent: float
    bias_percent: float


def predicted(model: AbstractCostModel, steps: StepFeatures) -> Float[np.ndarray, " steps"]:
    """The milliseconds of each step."""
    with jax.enable_x64(True):
        return np.asarray(model(_on_device(steps)))


def with_error(
    fit: FittedCost, what: Callable[[AbstractCostModel, StepFeatures], Any], steps: StepFeatures
) -> tuple[Float[np.ndarray, " steps"], Float[np.ndarray, " steps"]]:
    """What a fit says of each step, and its standard error to first order in the parameters.

    Args:
        fit: with its covariance.
        what: of a model and steps.
        steps: along one axis.
    """
    with jax.enable_x64(True):
        values, unravel = ravel_pytree(jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), fit.model))
        features = _on_device(steps)

        def of_values(values: Any) -> Any:
            return what(unravel(values), features)

        slopes = np.asarray(jax.jacfwd(of_values)(values))
        variance = np.einsum("sp,pq,sq->s", slopes, fit.covariance, slopes)
        return np.asarray(of_values(values)), np.sqrt(np.maximum(variance, 0.0))


def batches_shown(requests: Float[np.ndarray, " steps"]) -> Float[np.ndarray, " shown"]:
    """The batch sizes that get a curve, ascending: evenly among those that are not rare."""
    sizes, steps = np.unique(requests, return_counts=True)
    frequent = sizes[steps >= min(_ENOUGH_STEPS, steps.max() / 10)]
    return frequent[np.unique(np.linspace(0, len(frequent) - 1, _MOST_BATCHES).round().astype(int))]


def alike(steps: StepFeatures) -> Bool[np.ndarray, " steps"]:
    """The steps without prompts, as a picture of decoding has them; all, if each takes in some."""
    without = np.asarray(steps.prefill) == 0
    return without if without.any() else np.ones_like(without)


def cost_picture(fit: FittedCost, steps: StepFeatures, ms: Float[np.ndarray, " steps"]) -> CostPicture:
    """Step times against tokens, by batch size, without those that take in prompts.

    A curve has, at each number of tokens, the context and the drafting that the steps had there on average. Of a batch
    size, either the steps with equal draft lengths are shown or the others, whichever are more.
    """
    requests, uneven = np.asarray(steps.requests), np.asarray(steps.uneven) != 0
    decoding = alike(steps)
    sizes = batches_shown(requests[decoding])
    curves, tokens, times, count = [], [], [], 0
    for size in sizes:
        here = np.flatnonzero(decoding & (requests == size))
        here = here[uneven[here] == (np.mean(uneven[here]) > 0.5)]
        count += len(here)
        curves.append(_cost_curve(fit, jax.tree.map(lambda leaf, here=here: leaf[here], steps), float(size)))
        drawn = here[sample(len(here), _MOST_POINTS // len(sizes))]
        tokens.append(np.asarray(steps.tokens)[drawn])
        times.append(ms[drawn])
    return CostPicture(tuple(curves), tuple(tokens), tuple(times), count, len(np.unique(requests)))


def percent_longer(
    ms: Float[np.ndarray, " steps"], predicted_ms: Float[np.ndarray, " steps"]
) -> Float[np.ndarray, " steps"]:
    """(measured - predicted) / measured in percent."""
    # No step takes less than a nanosecond; a log may say so, and then its error would be infinite.
    return 100.0 * (ms - predicted_ms) / np.maximum(ms, 1e-6)


def residuals_of(
    tokens: Float[np.ndarray, " steps"], seconds: Float[np.ndarray, " steps"], percent: Float[np.ndarray, " steps"]
) -> Residuals:
    """The residuals of all steps, and a sample of them to draw.

    Args:
        tokens: of each step.
        seconds: elapsed when it ended.
        percent: by how much it took longer than predicted.
    """
    drawn = sample(len(percent), _MOST_POINTS)
    return Residuals(
        by_tokens=band(tokens, percent),
        by_time=band(seconds, percent),
        tokens=tokens[drawn],
        seconds=seconds[drawn],
        percent=percent[drawn],
        steps=len(percent),
        reach=max(float(np.quantile(np.abs(percent), 0.99)), 1.0),
    )


def expert_picture(fit: FittedCost, engine: Engine, steps: StepFeatures) -> ExpertPicture | None:
    """Experts touched from 1 token to the most of these steps; None if the fit has no rule for them."""
    if engine.routing is None or not (rules := _unions(fit.model)):
        return None
    experts, top_k = engine.routing
    requests, tokens = np.asarray(steps.requests), np.asarray(steps.tokens)
    most = float(np.max(tokens))

    def curve(size: float | None, least: float, most: float) -> Curve:
        grid: Any = np.geomspace(least, most, _MOST_PLACES)
        at = StepFeatures(tokens=grid, requests=np.full_like(grid, least))
        return Curve(size, grid, *with_error(fit, lambda model, step: _unions(model)[0](step), at))

    # Whether the rule asks for requests shows where they are very different.
    if np.allclose(curve(None, 1.0, most).value[-1], curve(None, most, most).value):
        curves = [curve(None, 1.0, most)]
    else:
        sizes = batches_shown(requests)
        curves = [curve(float(size), size, float(np.max(tokens[requests == size]))) for size in sizes]
    with jax.enable_x64(True):
        at: Any = jnp.asarray(curves[0].tokens)
        independent = np.asarray(IndependentTokens(experts, top_k)(StepFeatures(tokens=at, requests=at)))
    return ExpertPicture(tuple(curves), independent, experts, top_k, type(rules[0]).__name__)


def errors_by_tokens(
    steps: StepFeatures, ms: Float[np.ndarray, " steps"], predicted_ms: Float[np.ndarray, " steps"]
) -> list[TokenError]:
    """A fit's error by requests and tokens, the most frequent pair first."""
    columns: dict[str, Any] = {
        "requests": steps.requests,
        "tokens": steps.tokens,
        "ms": ms,
        "predicted_ms": predicted_ms,
        "bias_percent": percent_longer(ms, predicted_ms),
    }
    rows = (
        pl.DataFrame(columns)
        .group_by("requests", "tokens")
        .agg(
            pl.len().alias("steps"),
            pl.col("ms", "predicted_ms", "bias_percent").median(),
            pl.col("bias_percent").abs().mean().alias("error_percent"),
        )
        .sort("steps", "requests", "tokens", descending=[True, False, False])
    )
    return [TokenError(**row) for row in rows.select(TokenError._fields).iter_rows(named=True)]


def band(x: Float[np.ndarray, " steps"], y: Float[np.ndarray, " steps"]) -> Band:
    """Tenths and medians of y at each x or, where there are many x, in groups of about equally many neighbours.

    Without the groups that are too small to have tenths.
    """
    values, part = np.unique(x, return_inverse=True)
    if len(values) > min(_MOST_BINS, len(x) // _FEW_NEIGHBOURS):
        groups = int(np.clip(len(x) // _NEIGHBOURS, 1, _MOST_BINS))
        edges = np.unique(np.quantile(x, np.linspace(0.0, 1.0, groups + 1)[1:-1]))
        part = np.searchsorted(edges, x, side="right")
    order = np.argsort(part, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(part[order])) + 1)
    parts = [each for each in parts if len(each) >= _FEW_NEIGHBOURS]
    of_y = np.asarray([np.quantile(y[each], (0.1, 0.5, 0.9)) for each in parts]).reshape(-1, 3)
    return Band(np.asarray([np.median(x[each]) for each in parts], np.float64), *of_y.T)


def sample(size: int, most: int) -> Int[np.ndarray, " drawn"]:
    """Which of so many steps are drawn: all, or some at random, the same each time."""
    if size <= most:
        return np.arange(size)
    return np.sort(np.random.default_rng(0).choice(size, most, replace=False))


def _cost_curve(fit: FittedCost, steps: StepFeatures, size: float) -> Curve:
    tokens, cell, count = np.unique(np.asarray(steps.tokens), return_inverse=True, return_counts=True)
    grid: Any = _grid(float(tokens[0]), float(tokens[-1]))

    def usual(feature: Any) -> Any:
        return np.interp(grid, tokens, np.bincount(cell, feature) / count)

    # Between two numbers of tokens that were served, the other features are in between as well.
    features = StepFeatures(
        tokens=grid,
        requests=usual(steps.requests),
        drafting=usual(steps.drafting),
        context=usual(steps.context),
        prefill=usual(steps.prefill),
        uneven=usual(steps.uneven),
    )
    return Curve(size, grid, *with_error(fit, lambda model, step: model(step), features))


def _grid(least: float, most: float) -> Float[np.ndarray, " points"]:
    """Whole numbers from one to the other, thinned where they are many."""
    if most - least < _MOST_PLACES:
        return least + np.arange(most - least + 1.0)
    return np.unique(np.geomspace(least, most, _MOST_PLACES).round())


def _unions(model: AbstractCostModel) -> list[AbstractExpertUnion]:
    def is_union(node: Any) -> bool:
        return isinstance(node, AbstractExpertUnion)

    return [node for node in jax.tree.leaves(model, is_leaf=is_union) if is_union(node)]


def _on_device(steps: StepFeatures) -> StepFeatures:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), steps)
