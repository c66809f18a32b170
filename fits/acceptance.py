"""Fits an acceptance model to what became of drafts, and says how well any acceptance model predicts it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Bool, Float, Int

from akjax.acceptance import AbstractAcceptanceModel, RunningRates, Verified
from akjax.arrays import Array
from akjax.features import StepFeatures

# A chance is never believed nearer to 0 or 1 than this: one miss would cost without bound.
_LEAST_CHANCE = 1e-4
# Of a search for running rates.
_ITERATIONS, _TOLERANCE = 100, 1e-7


class DraftSequence(NamedTuple):
    """What became of drafts, a step after the other; each step has one row for each request that had some, and padding.

    Attributes:
        request: of each row, its number from 0; the number of requests marks padding.
        drafted: drafts verified.
        accepted: of them.
        fresh: whether it is the request's first observation.
        requests: how many there are.
    """

    request: Int[np.ndarray, "steps rows"]
    drafted: Int[np.ndarray, "steps rows"]
    accepted: Int[np.ndarray, "steps rows"]
    fresh: Bool[np.ndarray, "steps rows"]
    requests: int

    def first(self, steps: int) -> "DraftSequence":
        """Its first steps."""
        request, drafted, accepted, fresh = (column[:steps] for column in self[:4])
        return DraftSequence(request, drafted, accepted, fresh, self.requests)

    @property
    def draft_limit(self) -> int:
        """The most drafts of any row."""
        return int(np.max(self.drafted))


class Prediction(NamedTuple):
    """How well a model foretold a sequence, each draft before it was seen.

    Attributes:
        loss: of each step, the sum over its tested drafts of -log of the chance given to what happened.
        trials: of each step, how many drafts were tested: those accepted, and the first rejected of a request.
        expected: sum of the chances, over all tested drafts, by tenths of the chance: how many were to be accepted.
        accepted: how many were.
        counted: how many there were.
    """

    loss: Float[np.ndarray, " steps"]
    trials: Int[np.ndarray, " steps"]
    expected: Float[np.ndarray, " 10"]
    accepted: Float[np.ndarray, " 10"]
    counted: Float[np.ndarray, " 10"]

    @property
    def log_loss(self) -> float:
        """Mean over the tested drafts, in nats."""
        return float(np.sum(self.loss) / np.sum(self.trials))


def predicted(
    model: AbstractAcceptanceModel, sequence: DraftSequence, draft_limit: int | None = None, *, skip: int = 0
) -> Prediction:
    """How well a model foretells a sequence, learning as it goes.

    Args:
        model: its hyperparameters; it starts from its prior.
        sequence: of all text as one: modes do not count.
        draft_limit: K of the model, the most drafts in the sequence if None.
        skip: so many first steps teach the model and are not judged.
    """
    limit = draft_limit or sequence.draft_limit
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        loss, trials, chance, accepted, tested = (
            np.asarray(each)[skip:] for each in _foretold(model, _on_device(sequence), sequence.requests, limit)
        )
    tenth = np.minimum((chance * 10).astype(int), 9)[tested]

    def by_tenth(weights: Any) -> Float[np.ndarray, " 10"]:
        return np.bincount(tenth, weights, minlength=10).astype(np.float64)

    return Prediction(loss, trials, by_tenth(chance[tested]), by_tenth(accepted[tested]), by_tenth(np.ones(len(tenth))))


class RatesFit(NamedTuple):
    """Running rates that foretell a sequence best.

    Attributes:
        model: with the fitted rates.
        log_loss: mean over the tested drafts of the sequence that was fitted, in nats.
        converged: whether the gradient vanished.
    """

    model: RunningRates
    log_loss: float
    converged: bool


def fit_running_rates(
    sequence: DraftSequence,
    start: RunningRates | None = None,
    *,
    report: Callable[[int, float], object] = lambda iteration, loss: None,
) -> RatesFit:
    """The rates alpha, global_alpha, global_drift and prior that foretell the next outcome best.

    By L-BFGS over their logits, with the gradient through the whole recursion. The loss is not convex, so this is the
    minimum near `start`.

    Args:
        sequence: to foretell.
        start: where the search begins; the defaults if None.
        report: told each iteration and its loss.
    """
    start = RunningRates() if start is None else start
    limit = sequence.draft_limit
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        data = _on_device(sequence)
        values = np.asarray([start.alpha, start.global_alpha, start.global_drift, start.prior], np.float64)
        logits = jax.scipy.special.logit(jnp.asarray(np.clip(values, 1e-4, 1 - 1e-4)))

        def loss(x: Float[Array, " 4"]) -> Float[Array, ""]:
            losses, trials, *_ = _foretell(RunningRates(*jax.nn.sigmoid(x)), data, sequence.requests, limit)
            return jnp.sum(losses) / jnp.sum(trials)

        solver = optax.lbfgs()
        value_and_gradient = jax.jit(optax.value_and_grad_from_state(loss))

        @jax.jit
        def update(x: Any, state: Any, value: Any, gradient: Any) -> Any:
            updates, state = solver.update(gradient, state, x, value=value, grad=gradient, value_fn=loss)
            return optax.apply_updates(x, updates), state

        state, largest, value = solver.init(logits), np.inf, np.inf
        for iteration in range(_ITERATIONS):
            value, gradient = value_and_gradient(logits, state=state)
            largest = float(jnp.max(jnp.abs(gradient)))
            report(iteration, float(value))
            if largest <= _TOLERANCE:
                break
            logits, state = update(logits, state, value, gradient)
        rates = [np.asarray(rate) for rate in jax.nn.sigmoid(logits)]
    return RatesFit(RunningRates(*rates), float(value), largest <= _TOLERANCE)


def _on_device(sequence: DraftSequence) -> Any:
    return (
        jnp.asarray(sequence.request, jnp.int32),
        jnp.asarray(sequence.drafted, jnp.int32),
        jnp.asarray(sequence.accepted, jnp.int32),
        jnp.asarray(sequence.fresh, bool),
    )


def _foretell(model: AbstractAcceptanceModel, data: Any, requests: int, limit: int) -> tuple[Array, ...]:
    """Each step's loss and trials; each draft's chance, whether it was accepted, and whether it was tested at all."""
    pool = model.init_pool(limit)
    # One row more than there are requests: padding learns there.
    table = jax.tree.map(lambda leaf: jnp.zeros((requests + 1, *leaf.shape), leaf.dtype), model.init_request(pool))
    step = StepFeatures(tokens=jnp.ones(()), requests=jnp.ones(()))
    position = np.arange(limit, dtype=np.int32)[None, :]

    def one(carry: Any, row: Any) -> Any:
        pool, table = carry
        request, drafted, accepted, fresh = row
        real = request < requests
        known = jax.tree.map(lambda leaf: leaf[request], table)
        begun = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (len(request), *leaf.shape)), model.init_request(pool))
        use = jax.tree.map(lambda a, b: jnp.where(fresh.reshape(-1, *[1] * (a.ndim - 1)), a, b), begun, known)
        pools = jax.tree.map(lambda leaf: leaf[None], pool)
        forecast = model.forecast(pools, use, jnp.zeros_like(request), jnp.asarray(limit, jnp.int32))
        alive = jnp.concatenate([jnp.ones((len(request), 1)), forecast.survival], axis=1)
        chance = jnp.clip(alive[:, 1:] / jnp.maximum(alive[:, :-1], 1e-300), _LEAST_CHANCE, 1.0 - _LEAST_CHANCE)
        was_accepted = position < accepted[:, None]
        tested = (position < drafted[:, None]) & (position <= accepted[:, None]) & real[:, None]
        losses = -jnp.where(tested, jnp.where(was_accepted, jnp.log(chance), jnp.log1p(-chance)), 0.0)
        verified = Verified(
            drafted=jnp.maximum(drafted, 1), accepted=accepted, counts=real, fresh=fresh, apart=jnp.zeros_like(real)
        )
        pool, known = model.observe_step(pool, known, verified, step)
        table = jax.tree.map(lambda leaf, new: leaf.at[request].set(new), table, known)
        return (pool, table), (jnp.sum(losses), jnp.sum(tested), chance, was_accepted, tested)

    _, told = jax.lax.scan(one, (pool, table), data)
    return told


@eqx.filter_jit
def _foretold(model: AbstractAcceptanceModel, data: Any, requests: int, limit: int) -> tuple[Array, ...]:
    return _foretell(model, data, requests, limit)
