"""Fits a cost model to measured steps, all at once, and says how sure it is."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Bool, Float, Int

from akjax.arrays import Array
from akjax.cost import AbstractCostModel
from akjax.features import StepFeatures

from .certainty import covariance_of, determined
from .compiling import quick_jit
from .loss import (
    FREEDOM,
    SCALE_OF_NORMAL,
    LossName,
    check_loss,
    log_residuals,
    relative_residuals,
    robust_log_scale,
    robust_loss,
    slopes_of,
    square_scale,
    weighted_mean,
    weighted_sum,
)
from .search import Coordinates, Local, coordinates_of, descended, minimised, scattered

# Rows that the first searches go by, drawn at random, and how far each of them is taken.
_SCOUT_ROWS, _SCOUT_ITERATIONS, _SCOUT_TOLERANCE = 2048, 50, 1e-3
# Rows that the curvature is taken from, drawn at random: so many say it to half a percent.
_SAMPLE_ROWS = 65536
# Rows that are looked at together where there are many: what is worked out between them and the gradient stays in the
# processor's cache, which takes half the time.
_BLOCK_ROWS = 2048
# A residual of so many of the noise's standard deviations is an outlier: of a thousand normal ones, none is.
_OUTLIER = 5.0


class CostFit(NamedTuple):
    """A fitted cost model.

    Attributes:
        model: with the fitted parameters.
        covariance: of the parameters in their units, in the order of `model.parameters()`: 0 for one on a bound or
            unseen. Holds for noise of any distribution (White, Econometrica 50, 1982).
        determined: of each parameter, whether the steps say what it is; see `akjax.fits.certainty.determined`.
        at_bound: of each parameter, whether it ended on one of its bounds, or at 0 where it has to be positive.
        unseen: of each parameter, whether none of the steps has to do with it: it is as it was at the start.
        noise: relative standard deviation of a step's time about the model: by the robust loss, that of normal noise on
            which t would take the same scale.
        relative_error: root mean square of (predicted - measured) / measured over the steps.
        outliers: the steps that are more than five standard deviations off, by their index; none for "squares".
        iterations: that it took.
        converged: whether the gradient vanished; if not, more iterations may fit better.
        loss: that was minimised.
    """

    model: AbstractCostModel
    covariance: Float[np.ndarray, "p p"]
    determined: Bool[np.ndarray, " p"]
    at_bound: Bool[np.ndarray, " p"]
    unseen: Bool[np.ndarray, " p"]
    noise: float
    relative_error: float
    outliers: np.ndarray
    iterations: int
    converged: bool
    loss: LossName

    @property
    def values(self) -> Float[np.ndarray, " p"]:
        """The parameters, in the order of `model.parameters()`."""
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(self.model)])

    @property
    def standard_errors(self) -> Float[np.ndarray, " p"]:
        """Of the parameters, in their units; 0 for one on a bound or unseen."""
        return np.sqrt(np.diag(self.covariance))


def fit_cost(
    start: AbstractCostModel,
    steps: StepFeatures,
    ms: Float[Array, " steps"],
    *,
    weights: Float[Array, "..."] | None = None,
    loss: LossName = "robust",
    priors: bool = True,
    searches: int = 8,
    max_iterations: int = 3000,
    tolerance: float = 1e-5,
) -> CostFit:
    """The parameters of `start`'s form that fit measured steps best, within the form's bounds.

    Several searches on a few of the steps, the first from `start` brought to the machine's speed, the others scattered
    about it by the form's priors, find the place, by L-BFGS with exact gradients in float64. From the best of them
    Newton's method goes on, with a sample of the steps first: their curvature then leads to the minimum of all in a few
    looks, and says how sure the fit is.

    The losses: "robust" is the likelihood of Student's t with 4 degrees of freedom for the logarithms of the times, its
    scale fitted too, so that single steps that took long for reasons of their own hardly count. "squares" is the mean
    square of (predicted - measured) / measured, where each counts in full.

    Parameters without a unit, such as factors and powers, have a prior about `start` in the robust loss, as wide as the
    form says. Next to some hundred steps it says nothing; of what only a product is seen it says which is which.

    Args:
        start: the form, and where the search begins.
        steps: the features of the measured steps, along one axis.
        ms: that they took.
        weights: how often each step counts, 1 if None; 0 for one that does not. Fits of other choices among the same
            steps take the same compiled code.
        loss: to minimise.
        priors: whether the robust loss has them.
        searches: to begin with.
        max_iterations: of Newton's method, each time, after which to give up.
        tolerance: of the gradient's largest element, in coordinates in which the loss curves by 1, before the last
            step. That leaves about a hundredth of it on many steps, next to nothing on few.

    Raises:
        ValueError: no steps, features of other shapes than `ms` or not finite, a time that is not positive and finite,
            weights that are negative or all 0, a form with a parameter that is bounded on one side only, or a loss that
            is none, or fewer than one search.
    """
    check_loss(loss)
    if searches < 1:
        raise ValueError(f"searches must be at least 1, given {searches}")
    measured = np.asarray(ms, np.float64)
    counts = np.ones_like(measured) if weights is None else np.asarray(weights, np.float64)
    _check_steps(steps, measured, counts)
    values: Any = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(start)]).astype(np.float64)
    coordinates = coordinates_of(start.parameters(), values)
    # optax mixes int32 with int64, which a process with strict promotion would refuse.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        features = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), steps)
        model = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), start)
        total = np.asarray(np.sum(counts))

        def objective(rows: np.ndarray | slice) -> _Objective:
            some = jax.tree.map(lambda leaf: leaf[rows] if leaf.ndim else leaf, features)
            weights, robust = counts[rows], loss == "robust"
            return _Objective(model, some, measured[rows], weights, total, coordinates, robust, priors)

        begin, scouted = _scout(objective(_some_rows(counts, _SCOUT_ROWS)), searches)
        sample = objective(_some_rows(counts, _SAMPLE_ROWS))
        polished = _polish(objective(slice(None)), sample, begin, max_iterations, tolerance)
        natural, fitted, iterations, slope, slopes, summary = jax.tree.map(np.asarray, polished)
    noise, relative_error, outliers = summary
    hessian, squares, units = slopes
    at_bound = coordinates.at_bound(natural)
    unseen = (np.diag(squares) == 0)[: len(natural)] & ~at_bound
    covariance = covariance_of(hessian, squares, units, at_bound | unseen)
    return CostFit(
        model=fitted,
        covariance=covariance,
        determined=determined(start.parameters(), natural, covariance, at_bound | unseen),
        at_bound=at_bound,
        unseen=unseen,
        noise=float(noise),
        relative_error=float(relative_error),
        outliers=np.flatnonzero(outliers),
        iterations=int(scouted) + int(iterations),
        converged=bool(slope <= tolerance),
        loss=loss,
    )


def _check_steps(steps: StepFeatures, measured: Float[np.ndarray, "..."], weights: Float[np.ndarray, "..."]) -> None:
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(steps)]
    fits = np.shape(steps.tokens) == measured.shape and all(shape in (measured.shape, ()) for shape in shapes)
    if measured.ndim != 1 or not measured.size or not fits:
        raise ValueError(f"features and ms must have one equal axis, given shapes {shapes} and {measured.shape}")
    if not all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(steps)):
        raise ValueError("every feature must be finite")
    if not np.all(np.isfinite(measured) & (measured > 0)):
        raise ValueError("every ms must be positive and finite")
    if weights.shape != measured.shape or not np.all(np.isfinite(weights) & (weights >= 0)) or not np.any(weights > 0):
        raise ValueError(f"weights must be one for each step, none negative and not all 0, given {weights}")


def _some_rows(weights: Float[np.ndarray, " steps"], most: int) -> np.ndarray:
    """As many whatever the weights, so that all is compiled once."""
    if len(weights) <= most:
        return np.arange(len(weights))
    counting = np.flatnonzero(weights > 0)  # many times as quick as of numbers
    # One of each of as many equal stretches.
    places = (np.arange(most) + np.random.default_rng(0).random(most)) * (len(counting) / most)
    return counting[places.astype(np.int64)]


class _Objective(eqx.Module):
    """The loss of a form on some steps, in free coordinates; the robust loss has the scale's logarithm after them.

    Attributes:
        model: where the search begins, and the centre of the priors.
        features: of the steps.
        ms: that they took.
        weights: of them.
        total: weight of all steps that these were drawn from; the priors count once for all of those.
        coordinates: for the model's parameters.
        robust: whether the loss is Student's t; else relative least squares.
        priors: whether parameters without a unit have theirs.
    """

    model: AbstractCostModel
    features: StepFeatures
    ms: Any
    weights: Any
    total: Any
    coordinates: Coordinates
    robust: bool = eqx.field(static=True)
    priors: bool = eqx.field(static=True)

    @property
    def start(self) -> Float[Array, " p"]:
        return ravel_pytree(self.model)[0]

    def fitted(self, x: Float[Array, " q"]) -> AbstractCostModel:
        values, unravel = ravel_pytree(self.model)
        return unravel(self.coordinates.natural(x[: len(values)]))

    def predicted(self, x: Float[Array, " q"]) -> Float[Array, " steps"]:
        return self.fitted(x)(self.features)

    def residuals(self, x: Float[Array, " q"]) -> Float[Array, " steps"]:
        return (log_residuals if self.robust else relative_residuals)(self.predicted(x), self.ms)

    def strains(self, x: Float[Array, " q"]) -> Float[Array, " p"]:
        """How far each parameter that has a prior is from its start, in that prior's standard deviations."""
        parameters, start = self.model.parameters(), self.start
        positive = np.asarray([parameter.spread is not None for parameter in parameters])
        spreads = np.asarray([np.sqrt(p.variance) if p.spread is None else p.spread for p in parameters])
        held = np.asarray([self.robust and self.priors and not parameter.is_time for parameter in parameters])
        natural = self.coordinates.natural(x[: len(start)])
        # One that need not be positive may start at 0.
        ratio = jnp.where(positive, jnp.maximum(natural, 1e-300) / jnp.where(positive, start, 1.0), 1.0)
        return jnp.asarray(np.where(held, 1.0 / spreads, 0.0)) * jnp.where(positive, jnp.log(ratio), natural - start)

    def each(self, residuals: Float[Array, "*steps"], log_scale: Float[Array, ""]) -> Float[Array, "*steps"]:
        """Each step's own loss."""
        return robust_loss(residuals, log_scale) if self.robust else residuals**2

    def summed(self, x: Float[Array, " q"]) -> Float[Array, ""]:
        """The sum of the steps' losses."""
        return weighted_sum(self.each(self.residuals(x), x[-1]), self.weights)

    def prior(self, x: Float[Array, " q"]) -> Float[Array, ""]:
        """What the priors add to the steps' mean loss."""
        return 0.5 * jnp.sum(self.strains(x) ** 2) / self.total

    def __call__(self, x: Float[Array, " q"]) -> Float[Array, ""]:
        return self.summed(x) / jnp.sum(self.weights) + self.prior(x)

    def value_and_gradient(self, x: Float[Array, " q"]) -> tuple[Float[Array, ""], Float[Array, " q"]]:
        """The loss and its gradient, block by block."""
        rows = len(self.ms)
        size = min(_BLOCK_ROWS, rows)

        def add(number: Int[Array, ""], sums: Any) -> Any:
            # The last block is as long as the others, with some rows again, which do not count.
            first = jnp.minimum(number * size, rows - size)
            data = (self.features, self.ms, self.weights)
            features, ms, weights = jax.tree.map(
                lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, size) if leaf.ndim else leaf, data
            )
            weights = jnp.where(first + np.arange(size) >= number * size, weights, 0.0)
            block = _Objective(
                self.model, features, ms, weights, self.total, self.coordinates, self.robust, self.priors
            )
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(block.summed)(x))

        sums = jax.lax.fori_loop(0, -(-rows // size), add, (jnp.zeros(()), jnp.zeros_like(x)))
        means = jax.tree.map(lambda each: each / jnp.sum(self.weights), sums)
        return jax.tree.map(jnp.add, means, jax.value_and_grad(self.prior)(x))

    def begin(self, natural: Float[Array, " p"]) -> Float[Array, " q"]:
        """The coordinates of parameters, and of the scale that suits them."""
        free = self.coordinates.free(natural)
        if not self.robust:
            return free
        return jnp.append(free, robust_log_scale(self.residuals(jnp.append(free, 0.0)), self.weights))

    def local(self, x: Float[Array, " q"]) -> Local:
        """The loss about a place, its curvature one column after the other: all at once would take as many times the
        memory.
        """

        def along(direction: Float[Array, " q"]) -> tuple[Array, Array, Array]:
            (value, gradient), (_, column) = jax.jvp(jax.value_and_grad(self), (x,), (direction,))
            return value, gradient, column

        values, gradients, columns = jax.lax.map(along, jnp.eye(len(x)))
        return Local(values[0], gradients[0], columns)

    def information(self, x: Float[Array, " q"], slopes: Float[Array, "steps p"]) -> Float[Array, "q q"]:
        """The curvature that the loss is expected to have: next to that of a minimum, and positive everywhere.

        `slopes` are those of the residuals by the model's parameters.
        """
        squares = slopes.T @ (self.weights[:, None] * slopes) / jnp.sum(self.weights)
        if not self.robust:
            return 2.0 * squares
        squares = (FREEDOM + 1.0) / (FREEDOM + 3.0) / square_scale(x[-1]) * squares
        squares = squares + self.prior_curvature(x)[: len(self.start), : len(self.start)] / self.total
        return jax.scipy.linalg.block_diag(squares, jnp.full((1, 1), 2.0 * FREEDOM / (FREEDOM + 3.0)))

    def squares(self, x: Float[Array, " q"]) -> Float[Array, "q q"]:
        """The outer products of each step's slopes with themselves, about summed over all steps, and what to expect of
        the priors'.
        """
        residuals, slopes = self.residuals(x), slopes_of(self.residuals, x)
        by_residual, by_scale = jax.vmap(jax.grad(self.each, (0, 1)), (0, None))(residuals, x[-1])
        is_scale = np.arange(len(x)) == len(self.start)
        scores = by_residual[:, None] * slopes + jnp.outer(by_scale, is_scale)
        of_these = scores.T @ (self.weights[:, None] ** 2 * scores)
        return self.total / jnp.sum(self.weights) * of_these + self.prior_curvature(x)

    def prior_curvature(self, x: Float[Array, " q"]) -> Float[Array, "q q"]:
        """About that of the summed loss's priors, and what their slopes' squares are expected to be."""
        slopes = slopes_of(self.strains, x)
        return slopes.T @ slopes


@quick_jit
def _scout(objective: _Objective, searches: int) -> tuple[Float[Array, " q"], Any]:
    """Where the best of some searches ended, and the most iterations that one took."""
    model, coordinates, weights = objective.model, objective.coordinates, objective.weights
    values = objective.start
    parameters = model.parameters()
    # Another machine is another speed: what is in ms is brought to that of the steps.
    ratio = objective.ms / model(objective.features)
    counts = jnp.where((ratio > 0) & jnp.isfinite(ratio), weights, 0.0)
    speed = jnp.exp(weighted_mean(jnp.log(jnp.where(counts > 0, ratio, 1.0)), counts))
    is_time = np.asarray([parameter.is_time for parameter in parameters])
    values = values * jnp.where(is_time & jnp.isfinite(speed), speed, 1.0)

    def search(natural: Float[Array, " p"]) -> tuple[Float[Array, ""], Float[Array, " q"], Any, Bool[Array, " p"]]:
        x = objective.begin(natural)
        slopes = slopes_of(objective.residuals, x)[:, : len(values)]
        found = minimised(objective, x, objective.information(x, slopes), _SCOUT_ITERATIONS, _SCOUT_TOLERANCE)
        unseen = jnp.all(slopes == 0, axis=0)
        return jnp.where(jnp.isfinite(found.value), found.value, jnp.inf), found.at, found.iterations, unseen

    losses, ends, iterations, unseens = jax.vmap(search)(scattered(parameters, values, searches))
    best, unseen = (each[jnp.argmin(losses)] for each in (ends, unseens))
    # A parameter that ended next to a bound has no slope there: the next search begins with it a little inside.
    inside = coordinates.free(coordinates.natural(best[: len(values)]))
    # One that no step has to do with is where the search was scattered to: it goes back to the start.
    inside = jnp.where(unseen, coordinates.free(values), inside)
    return best.at[: len(values)].set(inside), jnp.max(iterations)


@eqx.filter_jit
def _polish(
    whole: _Objective, sample: _Objective, begin: Float[Array, " q"], max_iterations: int, tolerance: float
) -> tuple[Any, ...]:
    """The minimum from there: of a sample of the steps first, whose curvature then leads to that of all.

    Returns:
        Its parameters; the model with them; the iterations and the slope that was left; what `covariance_of` needs; and
        the noise, the relative error and which steps are outliers.
    """
    near, curved = descended(sample.local, begin, max_iterations, tolerance)
    found, _ = descended(
        lambda x: Local(*whole.value_and_gradient(x), curved.curvature), near.at, max_iterations, tolerance
    )

    x, coordinates, weights = found.at, whole.coordinates, whole.weights
    free = x[: len(whole.start)]
    units = jax.grad(lambda free: jnp.sum(coordinates.natural(free)))(free)
    relative = relative_residuals(whole.predicted(x), whole.ms)
    relative_error = jnp.sqrt(weighted_mean(relative**2, weights))
    if whole.robust:
        noise = jnp.sqrt(square_scale(x[-1])) / SCALE_OF_NORMAL
        outliers = (weights > 0) & (
            (relative < jnp.expm1(-_OUTLIER * noise)) | (relative > jnp.expm1(_OUTLIER * noise))
        )
    else:
        noise, outliers = relative_error, jnp.zeros_like(weights, bool)
    certainty = (curved.curvature * whole.total, sample.squares(x), units)
    return (
        coordinates.natural(free),
        whole.fitted(x),
        near.iterations + found.iterations,
        found.slope,
        certainty,
        (noise, relative_error, outliers),
    )
