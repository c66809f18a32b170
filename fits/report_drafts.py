"""What became of drafts in a log, which k was planned, and what another k would bring: the numbers of figures."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import polars as pl
from jaxtyping import Bool, Float, Int

from akjax.features import StepFeatures

from .report_cost import FittedCost, alike, batches_shown, with_error

MODES = ("usual text", "code", "tool calls")
"""By the number that a log has for each."""

# Draft positions and draft lengths that are shown at most, and slices of the time.
_MOST_POSITIONS, _MOST_LEVELS, _SLICES = 32, 16, 120
# A pause that is longer is shown as one of this length: no picture of steps needs a night without any.
LONGEST_PAUSE_S = 5.0


class Acceptance(NamedTuple):
    """How often drafts were accepted, by their position.

    Attributes:
        text: its kind.
        accepted: drafts at each position, from the first.
        tested: drafts at each: those accepted, and the first rejected of each request and step.
    """

    text: str
    accepted: Int[np.ndarray, " positions"]
    tested: Int[np.ndarray, " positions"]

    @property
    def rates(self) -> Float[np.ndarray, " positions"]:
        """The share accepted of those tested; NaN where none was."""
        return np.where(self.tested > 0, self.accepted / np.maximum(self.tested, 1), np.nan)

    def interval(self) -> tuple[Float[np.ndarray, " positions"], Float[np.ndarray, " positions"]]:
        """Where each rate is likely to be (95%, Wilson, J. American Statistical Association 22, 1927)."""
        z, n = 1.96, np.maximum(self.tested, 1)
        rates = self.accepted / n
        centre = (rates + z**2 / (2 * n)) / (1 + z**2 / n)
        reach = z / (1 + z**2 / n) * np.sqrt(rates * (1 - rates) / n + z**2 / (4 * n**2))
        return np.maximum(centre - reach, 0.0), np.minimum(centre + reach, 1.0)


class Lengths(NamedTuple):
    """Which k was planned when.

    Attributes:
        levels: the k there were, ascending; of more than can be shown, the most frequent.
        steps: that planned each.
        forced: of those, by the control file.
        edges: of the slices of time, elapsed seconds.
        shares: of the steps of each slice, those at each level; NaN for a slice without steps.
        others: steps at levels that are not shown.
    """

    levels: Int[np.ndarray, " levels"]
    steps: Int[np.ndarray, " levels"]
    forced: Int[np.ndarray, " levels"]
    edges: Float[np.ndarray, " slices_and_1"]
    shares: Float[np.ndarray, "slices levels"]
    others: int


class Goodput(NamedTuple):
    """Expected tokens per millisecond against k, for one batch size.

    Attributes:
        requests: of the batch.
        k: drafts verified for each request.
        tokens_per_ms: of the whole batch.
        relative_error: standard error of its logarithm, from the fit's covariance and the number of drafts tested.
        allowed: whether the schedule has that k.
        served: whether there is a step like that in the log.
    """

    requests: float
    k: Int[np.ndarray, " lengths"]
    tokens_per_ms: Float[np.ndarray, " lengths"]
    relative_error: Float[np.ndarray, " lengths"]
    allowed: Bool[np.ndarray, " lengths"]
    served: Bool[np.ndarray, " lengths"]

    @property
    def best(self) -> int:
        """The index of the allowed k with the most."""
        return int(np.argmax(np.where(self.allowed, self.tokens_per_ms, -np.inf)))


def elapsed_seconds(steps: pl.DataFrame) -> Float[np.ndarray, " steps"]:
    """When each step of a log ended, since its first; runs follow each other at once, and pauses are cut short."""
    with np.errstate(over="ignore"):  # a log may say any time
        passed = np.diff(steps["time"].to_numpy(), prepend=steps["time"].head(1).to_numpy())
    same_run = np.diff(steps["log"].to_numpy(), prepend=steps["log"].head(1).to_numpy()) == 0
    # A clock that is set back has no time pass.
    return np.cumsum(np.where(same_run, np.clip(passed, 0.0, LONGEST_PAUSE_S), 0.0))


def acceptance_of(steps: pl.DataFrame) -> tuple[Acceptance, ...]:
    """How often drafts of each kind of text were accepted, and after them those of all text; none without drafts."""
    lists = ("mode", "drafted", "accepted")
    drafts = steps.filter(pl.col("request").list.len() > 0).select(*lists).explode(*lists)
    counts = drafts.group_by(*lists).len()
    if not len(counts):
        return ()
    mode, drafted, accepted, rows = (counts[name].to_numpy().astype(np.int64) for name in (*lists, "len"))
    position = np.arange(min(int(drafted.max()), _MOST_POSITIONS))[:, None]
    was_accepted = rows * (position < accepted)
    was_tested = rows * ((position < drafted) & (position <= accepted))
    kinds = [
        Acceptance(text, was_accepted[:, mode == number].sum(1), was_tested[:, mode == number].sum(1))
        for number, text in enumerate(MODES)
        if (mode == number).any()
    ]
    return (*kinds, Acceptance("all text", was_accepted.sum(1), was_tested.sum(1)))


def lengths_of(steps: pl.DataFrame) -> Lengths | None:
    """Which k was planned when; None if no step says."""
    known = (steps["untaught"] != "unknown").to_numpy()
    if not known.any():
        return None
    k, seconds, forced = steps["k"].to_numpy()[known], elapsed_seconds(steps)[known], steps["forced"].to_numpy()[known]
    levels, count = np.unique(k, return_counts=True)
    levels = np.sort(levels[np.argsort(-count, kind="stable")[:_MOST_LEVELS]])
    edges = np.linspace(0.0, max(float(seconds[-1]), 1e-3), min(_SLICES, len(k)) + 1)
    at_level = [np.histogram(seconds[k == level], edges)[0] for level in levels]
    steps_of_slice = np.histogram(seconds, edges)[0]
    shares = np.stack(at_level, axis=1) / np.where(steps_of_slice > 0, steps_of_slice, np.nan)[:, None]
    taken = [int(np.sum(k == level)) for level in levels]
    return Lengths(
        levels=levels,
        steps=np.asarray(taken),
        forced=np.asarray([int(np.sum(forced & (k == level))) for level in levels]),
        edges=edges,
        shares=shares,
        others=len(k) - sum(taken),
    )


def goodput_of(
    fit: FittedCost, steps: StepFeatures, acceptance: Acceptance, lengths: tuple[int, ...]
) -> tuple[Goodput, ...]:
    """Goodput by the fit's cost and the measured acceptance, for the batch sizes that are shown.

    A step without prompts, with as many drafts made as verified, the same for each request, and the context that the
    batch size had on average. From the schedule's least k up to where drafts were tested; none if that is nowhere.

    Args:
        fit: of the cost.
        steps: that were measured.
        acceptance: of all text.
        lengths: that the schedule has, ascending.
    """
    deepest = min(int(np.count_nonzero(acceptance.tested)), lengths[-1])
    if deepest < lengths[0]:
        return ()
    k = np.arange(lengths[0], deepest + 1)
    rates, tested = acceptance.rates[:deepest], acceptance.tested[:deepest]
    with jax.enable_x64(True):

        def expected_tokens(rates: Float[jax.Array, " positions"]) -> Float[jax.Array, " lengths"]:
            return 1.0 + jnp.concatenate([jnp.zeros(1), jnp.cumsum(jnp.cumprod(rates))])[k]

        expected = np.asarray(expected_tokens(jnp.asarray(rates)))
        slopes = np.asarray(jax.jacfwd(expected_tokens)(jnp.asarray(rates)))
    # A rate that came out as 0 or 1 is not certain to be: half a draft more of each kind says how uncertain it is.
    smoothed = (acceptance.accepted[:deepest] + 0.5) / (tested + 1.0)
    relative_variance = slopes**2 @ (smoothed * (1.0 - smoothed) / (tested + 1.0)) / expected**2

    requests, tokens, context = (np.asarray(each) for each in (steps.requests, steps.tokens, steps.context))
    decoding, even = alike(steps), np.asarray(steps.uneven) == 0
    curves = []
    for size in batches_shown(requests[decoding]):
        here = decoding & (requests == size)
        features: dict[str, Any] = {
            "tokens": size * (1.0 + k),
            "requests": np.full(len(k), size),
            "drafting": k.astype(np.float64),
            "context": np.full(len(k), np.mean(context[here])),
        }
        ms, error = with_error(fit, lambda model, step: model(step), StepFeatures(**features))
        curves.append(
            Goodput(
                requests=float(size),
                k=k,
                tokens_per_ms=size * expected / ms,
                relative_error=np.sqrt(relative_variance + (error / ms) ** 2),
                allowed=np.isin(k, lengths),
                served=np.isin(size * (1.0 + k), tokens[here & even]),
            )
        )
    return tuple(curves)
