"""Finding the minimum: the coordinates that a search goes by, and the search."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Bool, Float, Int

from akjax.arrays import Array
from akjax.parameter import Parameter

# How far inside a parameter's bounds a search begins, as a share of their distance.
_INSIDE = 1e-3
# A parameter with two bounds is on one if it is this near to it, as a share of their distance.
_AT_BOUND = 1e-3
# Where one that has to be positive begins to bend, as a share of its start or its prior's standard deviation, and the
# share of that below which it counts as 0.
_SMALL, _AT_ZERO = 0.02, 0.1
# What is added to a curvature's diagonal, as a share of its mean: a direction that the steps say next to nothing about
# is not worth a step of thousands.
_RIDGE = 1e-4
# Of the fall that a line's slope promises, how much is enough; and of the slope itself, what may be left.
_FALLS, _FLATTENS = 1e-4, 0.9
# The damping of Newton's method to begin with, as a share of the curvature, what a step that was taken and one that was
# not make of it, the least, and the damping at which no step is left that would help.
_DAMPING, _TAKEN, _REFUSED, _LEAST_DAMPING, _MOST_DAMPING = 1e-3, 0.1, 10.0, 1e-10, 1e10
# The share of a loss that is rounding, and that of the first curvature below which there is none.
_ROUNDING, _FLAT = 1e-13, 1e-10

Loss = Callable[[Float[Array, " p"]], Float[Array, ""]]


class Coordinates(NamedTuple):
    """Free coordinates for parameters that have bounds.

    One with two bounds goes through a logistic function. One that has to be positive goes through `small * softplus`,
    which is next to a straight line but near 0. The others stay as they are.

    Attributes:
        bounded: whether both bounds are finite.
        low: lower bound, 0 without.
        width: distance of the bounds, 1 without.
        positive: whether it has to be positive and has no bounds.
        small: where positive ones begin to bend.
    """

    bounded: Bool[np.ndarray, " p"]
    low: Float[np.ndarray, " p"]
    width: Float[np.ndarray, " p"]
    positive: Bool[np.ndarray, " p"]
    small: Float[np.ndarray, " p"]

    def natural(self, free: Float[Array, " p"]) -> Float[Array, " p"]:
        """The parameters at these coordinates."""
        within = self.low + self.width * jax.nn.sigmoid(jnp.where(self.bounded, free, 0.0))
        above = self.small * jax.nn.softplus(jnp.where(self.positive, free, 0.0) / self.small)
        return jnp.where(self.bounded, within, jnp.where(self.positive, above, free))

    def free(self, natural: Float[Array, " p"]) -> Float[Array, " p"]:
        """The coordinates of parameters; one on its bound or beyond, where there are none, is moved inside."""
        share = jnp.where(self.bounded, jnp.clip((natural - self.low) / self.width, _INSIDE, 1 - _INSIDE), 0.5)
        times = jnp.maximum(jnp.where(self.positive, natural / self.small, 1.0), _INSIDE)
        above = self.small * (times + jnp.log(-jnp.expm1(-times)))
        return jnp.where(self.bounded, jax.scipy.special.logit(share), jnp.where(self.positive, above, natural))

    def at_bound(self, natural: Float[np.ndarray, " p"]) -> Bool[np.ndarray, " p"]:
        """Whether a parameter is on one of its bounds, or next to 0 where it has to be positive."""
        share = (natural - self.low) / self.width
        outer = (share < _AT_BOUND) | (share > 1.0 - _AT_BOUND)
        return np.where(self.bounded, outer, self.positive & (natural < _AT_ZERO * self.small))


def coordinates_of(parameters: tuple[Parameter, ...], values: Float[Array, " p"]) -> Coordinates:
    """The coordinates for a form's parameters, `values` of which say what is small.

    Raises:
        ValueError: one is bounded on one side only.
    """
    for parameter in parameters:
        if np.isfinite(parameter.lower) != np.isfinite(parameter.upper):
            raise ValueError(f"{parameter.name} is bounded on one side only, which no fit keeps to; bound the other")
    lower = np.asarray([parameter.lower for parameter in parameters])
    upper = np.asarray([parameter.upper for parameter in parameters])
    bounded = np.isfinite(lower) & np.isfinite(upper)
    spreads = np.sqrt([parameter.variance for parameter in parameters])
    return Coordinates(
        bounded,
        low=np.where(bounded, lower, 0.0),
        width=np.where(bounded, upper - lower, 1.0),
        positive=~bounded & np.asarray([parameter.spread is not None for parameter in parameters]),
        small=_SMALL * np.maximum(np.abs(values), spreads),
    )


def scattered(
    parameters: tuple[Parameter, ...], values: Float[Array, " p"], searches: int
) -> Float[Array, "searches p"]:
    """Where searches begin: at `values`, and at random places that the form's priors allow.

    One that has to be positive is scattered by its logarithm, `spread` wide, one in ms by twice as much, since the
    machine's speed is unknown too. One with two bounds is in every other search anywhere between them, since `values`
    may be on one.
    """
    rng = np.random.default_rng(0)
    draws = np.concatenate([np.zeros((1, len(parameters))), rng.standard_normal((searches - 1, len(parameters)))])
    spreads = np.asarray([(p.spread or 0.0) * (2.0 if p.is_time else 1.0) for p in parameters])
    steps = np.asarray([0.0 if p.spread is not None else np.sqrt(p.variance) for p in parameters])
    about = values[None, :] * jnp.exp(jnp.asarray(draws * spreads)) + draws * steps
    lower, upper = (np.asarray([getattr(p, bound) for p in parameters]) for bound in ("lower", "upper"))
    bounded = np.isfinite(lower) & np.isfinite(upper)
    lower, upper = np.where(bounded, lower, 0.0), np.where(bounded, upper, 0.0)
    between = lower + (upper - lower) * rng.random((searches, len(parameters)))
    anywhere = bounded[None, :] & (np.arange(searches) % 2 == 1)[:, None]
    return jnp.where(anywhere, between, about)


class Found(NamedTuple):
    """Where a search ended.

    Attributes:
        at: the coordinates.
        value: of the loss where it was last looked at.
        iterations: that it took.
        slope: the gradient's largest element there, in coordinates in which the loss curves by 1 in every direction.
    """

    at: Float[Array, " p"]
    value: Float[Array, ""]
    iterations: Int[Array, ""]
    slope: Float[Array, ""]


class Local(NamedTuple):
    """A loss about one place: its value, its gradient, and about its curvature."""

    value: Float[Array, ""]
    gradient: Float[Array, " p"]
    curvature: Float[Array, "p p"]


class _Line(NamedTuple):
    """A search along a line.

    Attributes:
        at: where the line begins, whitened.
        value: of the loss there.
        gradient: there.
        along: the line's direction.
        state: of L-BFGS there.
        low: the share of `along` that is known to be too little.
        high: that which is known to be too much.
        share: to look at next.
        iterations: looks taken.
    """

    at: Float[Array, " p"]
    value: Float[Array, ""]
    gradient: Float[Array, " p"]
    along: Float[Array, " p"]
    state: Any
    low: Float[Array, ""]
    high: Float[Array, ""]
    share: Float[Array, ""]
    iterations: Int[Array, ""]


def minimised(
    loss: Loss, start: Float[Array, " p"], curvature: Float[Array, "p p"], max_iterations: int, tolerance: float
) -> Found:
    """The minimum of a loss, by L-BFGS with exact gradients (Nocedal & Wright, Numerical Optimization, 2006, ch. 7),
    each line halved until the loss falls and flattens enough (Lewis & Overton, Math. Programming 141, 2013).

    Finds its way from afar; from nearby `descended` takes far fewer looks at the steps. An iteration is one look, be it
    at a new line or further along the last: optax's own search of the line writes the loss down three times, which
    takes twice as long to compile, and of searches side by side all wait for the one with the longest line.

    Args:
        loss: to minimise.
        start: where to begin.
        curvature: about that of the loss. The search goes by coordinates in which it is 1 in
            every direction, without which parameters that mean nearly the same take thousands of iterations.
        max_iterations: after which to give up.
        tolerance: of the gradient's largest element.
    """
    whiten = _whitening(curvature)
    solver = optax.scale_by_lbfgs()
    whole = (jnp.asarray(0.0), jnp.asarray(jnp.inf), jnp.asarray(1.0))  # of a line, from its beginning
    look = jax.value_and_grad(lambda z: loss(start + whiten @ z))

    def go_on(line: _Line) -> Bool[Array, ""]:
        return (jnp.max(jnp.abs(line.gradient)) > tolerance) & (line.iterations < max_iterations)

    def iterate(line: _Line) -> _Line:
        at = line.at + line.share * line.along
        value, gradient = look(at)
        slope = line.gradient @ line.along
        falls = value <= line.value + _FALLS * line.share * slope  # not if it is no number
        flattens = gradient @ line.along >= _FLATTENS * slope
        uphill, state = solver.update(gradient, line.state, at)
        begun = _Line(at, value, gradient, -jnp.asarray(uphill), state, *whole, line.iterations + 1)
        low = jnp.where(falls, line.share, line.low)
        high = jnp.where(falls, line.high, line.share)
        share = jnp.where(jnp.isfinite(high), 0.5 * (low + high), 2.0 * low)
        further = line._replace(low=low, high=high, share=share, iterations=line.iterations + 1)
        return jax.tree.map(lambda new, old: jnp.where(falls & flattens, new, old), begun, further)

    # A line of no length from above everything: the first look ends it.
    nowhere = jnp.zeros_like(start)
    steep = jnp.full_like(start, jnp.finfo(start.dtype).max)
    begin = _Line(nowhere, jnp.asarray(jnp.inf), steep, nowhere, solver.init(nowhere), *whole, jnp.asarray(0))
    found = jax.lax.while_loop(go_on, iterate, begin)
    return Found(start + whiten @ found.at, found.value, found.iterations, jnp.max(jnp.abs(found.gradient)))


def descended(
    local: Callable[[Float[Array, " p"]], Local],
    start: Float[Array, " p"],
    max_iterations: Any,
    tolerance: Any,
) -> tuple[Found, Local]:
    """The minimum of a loss from nearby, and the loss there, by Newton's method, damped where a step is no use
    (Nocedal & Wright, ch. 10).

    Args:
        local: the loss about a place. The nearer its curvature, the fewer iterations.
        start: where to begin.
        max_iterations: after which to give up, the refused ones included.
        tolerance: of the gradient's largest element, in coordinates in which the loss curves by 1. Once it is as small
            the step from there is the last and is not looked at: the nearer the curvature, the less is left after it.
    """

    def go_on(carry: Any) -> Any:
        _, damping, iterations, slope, *_ = carry
        return (slope > tolerance) & (iterations <= max_iterations) & (damping < _MOST_DAMPING)

    def iterate(carry: Any) -> Any:
        tried, damping, iterations, _, at, here, least = carry
        # Here alone, since whatever is written twice is compiled twice.
        there = local(tried)
        finite = jnp.all(jnp.isfinite(there.gradient)) & jnp.all(jnp.isfinite(there.curvature))
        taken = finite & (there.value <= here.value + _ROUNDING * jnp.abs(here.value))
        at, here = jax.tree.map(lambda new, old: jnp.where(taken, new, old), (tried, there), (at, here))
        damping = jnp.maximum(damping * jnp.where(taken, _TAKEN, _REFUSED), _LEAST_DAMPING)
        # Where a parameter nears its bound the loss gets flat: flatter than this is flat.
        least = jnp.where(iterations == 0, _FLAT * jnp.abs(jnp.diag(here.curvature)), least)
        units, sizes, axes = _axes(here.curvature, least)
        along = axes.T @ (units * here.gradient)
        # Where the loss curves downwards the way is down, and as far as if it curved upwards.
        step = units * (axes @ (along / (sizes + damping)))
        slope = jnp.max(jnp.abs(along) / jnp.sqrt(sizes + _RIDGE * len(sizes)))
        return at - step, damping, iterations + 1, slope, at, here, least

    nowhere = Local(jnp.asarray(jnp.finfo(jnp.float64).max), jnp.zeros_like(start), jnp.eye(len(start)))
    begin = (start, jnp.asarray(_DAMPING), jnp.asarray(0), jnp.asarray(jnp.inf), start, nowhere, jnp.zeros_like(start))
    _, _, looks, slope, at, here, least = jax.lax.while_loop(go_on, iterate, begin)
    units, sizes, axes = _axes(here.curvature, least)
    last = units * (axes @ (axes.T @ (units * here.gradient) / (sizes + _RIDGE * len(sizes))))
    return Found(jnp.where(slope <= tolerance, at - last, at), here.value, looks - 1, slope), here


def _whitening(curvature: Float[Array, "p p"]) -> Float[Array, "p p"]:
    """What takes coordinates in which the loss curves by about 1 in every direction to those of the curvature."""
    units, sizes, axes = _axes(curvature)
    return axes * jnp.outer(units, 1.0 / jnp.sqrt(sizes + _RIDGE * len(sizes)))


def _axes(curvature: Float[Array, "p p"], least: Float[Array, " p"] | float = 0.0) -> tuple[Array, Array, Array]:
    """Units of the coordinates in which the curvature's diagonal is 1; and of the curvature in those, the sizes along
    its axes, whatever their signs, and the axes, a column each.

    A diagonal below `least` counts as that. Where it is nothing the unit is 0, so that no step goes there.
    """
    diagonal = jnp.maximum(jnp.abs(jnp.diag(curvature)), least)
    units = jnp.where(diagonal > 1e-200, 1.0 / jnp.sqrt(jnp.maximum(diagonal, 1e-200)), 0.0)
    sizes, axes = jnp.linalg.eigh(curvature * jnp.outer(units, units))
    return units, jnp.abs(sizes), axes
