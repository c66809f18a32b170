"""A learner that starts from any prior: a filter in logarithms, and a gate on surprise instead of size."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Bool, Float

from akjax.arrays import Array
from akjax.cost.model import AbstractCostModel
from akjax.ekf import Belief, prior_belief
from akjax.features import StepFeatures
from akjax.learner.model import (
    AbstractCostLearner,
    CostForecast,
    CostState,
    Covariance,
    belief_is_sound,
    both,
    counted,
    linear_forecast,
    predicted_log_ms,
    with_prediction,
)
from akjax.parameter import Parameter

# Keeps logarithms finite. Far below any step's time: at a floor the filter would have no slope to learn along.
TINY_MS = 1e-6
# How quickly the noise follows what the residuals show, and its limits: relative standard deviations of a step's time.
NOISE_RATE = 0.02
LEAST_NOISE, MOST_NOISE = 0.005, 0.2
# The same of the speed's drift, as variances: from next to none to a machine that is another within ten steps.
DRIFT_RATE = 0.02
LEAST_DRIFT, MOST_DRIFT = 1e-6, 1e-2
# What is left of a run of surprises after a step that was none. A single spike is soon forgotten, and yet a run grows
# where every other step surprises, as when only one of two draft lengths in turn has become dearer.
RUN_DECAY = 0.8


class GateMemory(eqx.Module):
    """What the gate remembers.

    Attributes:
        noise: variance of the logarithm of a step's time about its true prediction.
        drift: variance that the logarithm of the machine's speed gains at each step that teaches.
        innovation: of the last step that taught, in its expected standard deviations; 0 before the first.
        run: how many surprises to one side there were lately.
        surprise: 1 or -1, the side of the last of them; 0 before the first.
    """

    noise: Float[Array, ""]
    drift: Float[Array, ""]
    innovation: Float[Array, ""]
    run: Float[Array, ""]
    surprise: Float[Array, ""]


class InnovationGate(AbstractCostLearner):
    """An extended Kalman filter over the logarithms of a cost model's parameters, on the logarithm of the time.

    In logarithms an unknown machine is an unknown common factor of all parameters in ms, which the filter holds as
    one wide direction of its prior; a parameter's effect is its share of the step's time, between 0 and 1; none can
    turn negative; and two that the data cannot tell apart keep the proportion that the prior gave them. Parameters
    that need not be positive (`spread` None) are learned as they are.

    A machine's speed wanders, by its heat and by what else it does, and it does so for all steps alike. So that factor
    has a drift: what the last steps say of the speed is believed at once, and what one draft length costs against
    another is read off steps that lie near each other in time. How quickly it wanders is learned: the innovations of a
    filter that assumes the right drift follow each other without any likeness, those of one that assumes too little
    lie to the same side, and those of one that assumes too much to alternate sides.

    A step is let in if its innovation is within `gate` of the standard deviations that the filter expects. A run of
    surprises to one side is no chance: the speed has changed, so it counts as unknown again and the step is let in.
    The proportions of the parameters stay: what looked like a change of the machine may have been its noise, or a
    batch of a size that was not seen before, and they took long to learn.

    The noise of a step is learned from the innovations too (both as Mehra, IEEE Trans. Automatic Control 15, 1970): it
    holds what the form cannot say, and so keeps a form that does not fit from growing too sure of itself.

    The coordinates of the covariance are these logarithms, in the order of `model.parameters()`.

    Attributes:
        scale_spread: standard deviation of the logarithm of the machine's speed, about the prior model's.
        restart_spread: the same about a model that was fitted on steps of the machine.
        scale_drift: variance that it gains at each step that teaches, as is assumed first.
        noise: the relative noise of a step's time that is assumed first.
        gate: expected standard deviations beyond which an innovation is a surprise.
        run: surprises to one side after which the speed counts as unknown again.
    """

    scale_spread: float = eqx.field(static=True, default=1.0)
    restart_spread: float = eqx.field(static=True, default=0.1)
    scale_drift: float = eqx.field(static=True, default=3e-4)
    noise: float = eqx.field(static=True, default=0.05)
    gate: float = eqx.field(static=True, default=4.0)
    run: float = eqx.field(static=True, default=4.0)

    @property
    def learns(self) -> bool:
        """Yes."""
        return True

    @property
    def expects_exact_times(self) -> bool:
        """Yes."""
        return True

    def admits(self, step: Any) -> Any:
        """Whether it verifies drafts just if it makes some, or takes in prompts.

        A step that changes over from verifying no drafts to some, or back, pays for drafts that it does not verify,
        or the other way round, so it stands for neither.
        """
        return (step.prefill > 0) | ((step.drafting > 0) == (step.tokens > step.requests))

    def init(self, cost: AbstractCostModel, covariance: Covariance | None = None) -> CostState:
        """The model, its prior in logarithms, and no surprise yet.

        With a fit's covariance it is as sure as that, but for the speed: that of today may be another.

        Raises:
            ValueError: a parameter that has to be positive is not, or the model does not name its parameters.
        """
        checked = prior_belief(cost)
        parameters = cost.parameters()
        leaves = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(cost)])
        for parameter, value in zip(parameters, leaves, strict=True):
            if parameter.spread is not None and not value > 0:
                raise ValueError(f"{parameter.name} must start above 0 to be learned in logarithms, given {value:g}")
        first = self._first_covariance(parameters)
        if covariance is not None:
            units = 1.0 / np.where(_positive(parameters), leaves, 1.0)
            first = both(first, covariance * np.outer(units, units)) + self.restart_spread**2 * _shared(parameters)
        return CostState(
            belief=Belief(checked.model, jnp.asarray(first)),
            error=jnp.zeros(()),
            taught=jnp.zeros((), jnp.int32),
            predicted_ms=jnp.zeros(()),
            memory=GateMemory(
                noise=jnp.asarray(self.noise**2),
                drift=jnp.asarray(self.scale_drift),
                innovation=jnp.zeros(()),
                run=jnp.zeros(()),
                surprise=jnp.zeros(()),
            ),
        )

    def learn(self, state: CostState, step: StepFeatures, ms: Float[Array, ""], teaches: Bool[Array, ""]) -> CostState:
        """One step of the filter, if the step is let in; the run of surprises grows if it is not."""
        model, memory = state.belief.model, state.memory
        parameters = model.parameters()
        teaches = teaches & jnp.isfinite(ms) & self.admits(step)
        mean, from_mean = _coordinates(model)
        log_ms, slopes = jax.value_and_grad(lambda x: predicted_log_ms(from_mean(x), step, TINY_MS))(mean)
        predicted = jnp.exp(log_ms)
        innovation = jnp.log(jnp.maximum(ms, TINY_MS)) - log_ms

        drift = np.diag([p.log_drift for p in parameters]) + memory.drift * _shared(parameters)
        prior = state.belief.covariance + drift
        expected = slopes @ prior @ slopes + memory.noise
        surprises = innovation**2 > self.gate**2 * expected

        same_side = memory.surprise * innovation >= 0
        run = jnp.where(surprises, jnp.where(same_side, memory.run, 0.0) + 1.0, RUN_DECAY * memory.run)
        side = jnp.where(surprises, jnp.sign(innovation), memory.surprise)
        reopens = surprises & (run >= self.run)

        prior = prior + jnp.where(reopens, self.scale_spread**2, 0.0) * _shared(parameters)
        shared = prior @ slopes
        variance = slopes @ shared + memory.noise
        gain = shared / variance
        lower, upper = _limits(parameters)
        mean = jnp.clip(mean + gain * innovation, lower, upper)
        # Joseph's form multiplied out, which takes no product of matrices: rounding of the gain enters squared.
        told = jnp.outer(gain, shared)
        covariance = prior - told - told.T + variance * jnp.outer(gain, gain)

        accepted = teaches & (~surprises | reopens)
        # E[innovation**2] = variance, if the noise is right.
        noise = jnp.clip(memory.noise + NOISE_RATE * (innovation**2 - variance), LEAST_NOISE**2, MOST_NOISE**2)
        # E[innovation * last one] = 0, if the drift is right.
        standard = innovation / jnp.sqrt(expected)
        wandering = memory.drift * jnp.exp(DRIFT_RATE * jnp.clip(standard * memory.innovation, -1.0, 1.0))
        state = counted(state, accepted, Belief(from_mean(mean), covariance), jnp.abs(ms - predicted) / predicted)
        memory = GateMemory(
            noise=jnp.where(teaches & ~surprises, noise, memory.noise),
            drift=jnp.where(teaches & ~surprises, jnp.clip(wandering, LEAST_DRIFT, MOST_DRIFT), memory.drift),
            innovation=jnp.where(teaches & ~surprises, standard, memory.innovation),
            run=jnp.where(teaches, jnp.where(reopens, 0.0, run), memory.run),
            surprise=jnp.where(teaches, side, memory.surprise),
        )
        return with_prediction(eqx.tree_at(lambda s: s.memory, state, memory), step, predicted)

    def is_sound(self, state: CostState) -> Bool[Array, ""]:
        """By the belief, whose parameters have logarithms where they are learned in them; no variance is negative."""
        model, memory = state.belief.model, state.memory
        values, _ = ravel_pytree(model)
        have_logarithms = jnp.all((values > 0.0) | ~_positive(model.parameters()))
        counted = jnp.minimum(jnp.minimum(memory.noise, memory.drift), memory.run)
        return belief_is_sound(state) & have_logarithms & (counted >= 0.0)

    def forecast(self, state: CostState, steps: StepFeatures) -> CostForecast:
        """Predictions, and their covariance to first order."""
        mean, from_mean = _coordinates(state.belief.model)

        return linear_forecast(
            lambda x, step: predicted_log_ms(from_mean(x), step, TINY_MS), steps, mean, state.belief.covariance
        )

    def _first_covariance(self, parameters: tuple[Parameter, ...]) -> Float[np.ndarray, "p p"]:
        return _own_variance(parameters) + self.scale_spread**2 * _shared(parameters)


def _positive(parameters: tuple[Parameter, ...]) -> Bool[np.ndarray, " p"]:
    return np.asarray([parameter.spread is not None for parameter in parameters])


def _times(parameters: tuple[Parameter, ...]) -> Float[np.ndarray, " p"]:
    """The direction of the machine's speed: all logarithms of times together."""
    return np.asarray([float(p.is_time and p.spread is not None) for p in parameters])


def _shared(parameters: tuple[Parameter, ...]) -> Float[np.ndarray, "p p"]:
    return np.outer(_times(parameters), _times(parameters))


def _own_variance(parameters: tuple[Parameter, ...]) -> Float[np.ndarray, "p p"]:
    return np.diag([p.variance if p.spread is None else p.spread**2 for p in parameters])


def _limits(parameters: tuple[Parameter, ...]) -> tuple[Float[np.ndarray, " p"], Float[np.ndarray, " p"]]:
    """The bounds in the filter's coordinates; a bound that is not positive is none to a logarithm."""

    def coordinate(parameter: Parameter, bound: float, unbounded: float) -> float:
        if parameter.spread is None:
            return bound
        return float(np.log(bound)) if bound > 0 else unbounded

    # Logarithms stay where exp is finite: a form so far off its data should be wrong, and not NaN.
    lower = [coordinate(p, p.lower, -50.0) for p in parameters]
    upper = [coordinate(p, p.upper, 50.0) for p in parameters]
    return np.asarray(lower), np.minimum(np.asarray(upper), np.where(_positive(parameters), 50.0, np.inf))


def _coordinates(
    model: AbstractCostModel,
) -> tuple[Float[Array, " p"], Callable[[Float[Array, " p"]], AbstractCostModel]]:
    """The model's parameters in the filter's coordinates, and the model at any such coordinates."""
    values, unravel = ravel_pytree(model)
    positive = _positive(model.parameters())
    # `where` would take the logarithm of what need not be positive; a safe argument keeps its gradient finite.
    mean = jnp.where(positive, jnp.log(jnp.where(positive, values, 1.0)), values)

    def at(x: Float[Array, " p"]) -> AbstractCostModel:
        return unravel(jnp.where(positive, jnp.exp(jnp.where(positive, x, 0.0)), x))

    return mean, at
