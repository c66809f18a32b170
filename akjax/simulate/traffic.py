"""Which requests come, and how many may run at once."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, PRNGKeyArray

from akjax.arrays import Array
from akjax.simulate.leaves import as_count, as_real, as_single

# Two generations of rows are enough for a slot only if no request is over in its first step.
LEAST_OUTPUT = 2


class Lengths(eqx.Module):
    """Log-normal lengths in tokens.

    Attributes:
        median: tokens.
        spread: standard deviation of the logarithm; 0 for requests of one length.
    """

    median: Float[Array, "*lanes"] = eqx.field(converter=as_single)
    spread: Float[Array, "*lanes"] = eqx.field(converter=as_single, default=0.0)

    def draw(self, key: PRNGKeyArray, count: int) -> Int[Array, " count"]:
        """`count` lengths."""
        normal = jax.random.normal(key, (count,), jnp.float32)
        return jnp.round(self.median * jnp.exp(self.spread * normal)).astype(jnp.int32)


class AbstractTraffic(eqx.Module):
    """Where requests come from. They are numbered in the order in which they start."""

    @abc.abstractmethod
    def lengths(self, key: PRNGKeyArray) -> tuple[Int[Array, " r"], Int[Array, " r"]]:
        """Prompt and output tokens of request i, at i modulo r. An output has at least `LEAST_OUTPUT`."""

    @abc.abstractmethod
    def open_slots(self, slots: int, progress: Float[Array, ""], uniform: Float[Array, ""]) -> Int[Array, ""]:
        """How many of the slots, the first ones, run in a step. What runs in the others sits the step out."""

    @abc.abstractmethod
    def arrived(self, started: Int[Array, ""], clock: Float[Array, ""]) -> Int[Array, ""]:
        """How many requests wait at `clock` when `started` have started."""

    @abc.abstractmethod
    def queued(self, started: Int[Array, ""], clock: Float[Array, ""]) -> Int[Array, ""]:
        """How many of those that wait count as present."""

    @abc.abstractmethod
    def next_arrival(self, started: Int[Array, ""]) -> Float[Array, ""]:
        """When the next request to start arrives, in ms."""


class ClosedLoop(AbstractTraffic):
    """A client for each open slot, who sends the next request when the last is answered.

    Attributes:
        open: how many slots run: phases of equal progress along the first axis, and in each a few numbers of which
            every step takes one at random. `[[8]]` is steady, `[[8], [32]]` rises half-way, `[[8, 9]]` hovers.
        prompt: lengths.
        output: lengths.
        distinct: how many requests are drawn, to be sent over and over.
    """

    open: Int[Array, "*lanes phases choices"] = eqx.field(converter=as_count)
    prompt: Lengths
    output: Lengths
    distinct: int = eqx.field(static=True, default=512)

    def __check_init__(self) -> None:
        """Refuses a step without requests, which would never end."""
        if np.min(self.open) < 1:
            raise ValueError(f"open must be at least 1 slot, given {self.open}")

    def lengths(self, key: PRNGKeyArray) -> tuple[Int[Array, " r"], Int[Array, " r"]]:
        """Drawn once for the run, so that every policy serves the same requests."""
        prompt, output = jax.random.split(key)
        return (
            jnp.maximum(self.prompt.draw(prompt, self.distinct), 0),
            jnp.maximum(self.output.draw(output, self.distinct), LEAST_OUTPUT),
        )

    def open_slots(self, slots: int, progress: Float[Array, ""], uniform: Float[Array, ""]) -> Int[Array, ""]:
        """One of the phase's numbers."""
        phases, choices = self.open.shape
        phase = jnp.minimum((progress * phases).astype(jnp.int32), phases - 1)
        choice = (uniform * choices).astype(jnp.int32)
        return jnp.minimum(jnp.asarray(self.open)[phase, jnp.minimum(choice, choices - 1)], slots)

    def arrived(self, started: Int[Array, ""], clock: Float[Array, ""]) -> Int[Array, ""]:
        """As many as there could be slots for."""
        return jnp.asarray(1 << 30, jnp.int32)

    def queued(self, started: Int[Array, ""], clock: Float[Array, ""]) -> Int[Array, ""]:
        """None: clients wait for answers and not for slots."""
        return jnp.zeros((), jnp.int32)

    def next_arrival(self, started: Int[Array, ""]) -> Float[Array, ""]:
        """At once."""
        return jnp.zeros(())


class OpenLoop(AbstractTraffic):
    """Requests that arrive at given times, whatever the server does; served in that order.

    Attributes:
        arrivals: ms, ascending.
        prompt: tokens.
        output: tokens, at least `LEAST_OUTPUT`.
    """

    arrivals: Float[Array, "*lanes r"] = eqx.field(converter=as_real)
    prompt: Int[Array, "*lanes r"] = eqx.field(converter=as_count)
    output: Int[Array, "*lanes r"] = eqx.field(converter=as_count)

    def __check_init__(self) -> None:
        """Refuses outputs too short and arrivals out of order."""
        if np.min(self.output) < LEAST_OUTPUT:
            raise ValueError(f"outputs must have at least {LEAST_OUTPUT} tokens, given {self.output}")
        if np.any(np.diff(self.arrivals) < 0):
            raise ValueError(f"arrivals must ascend, given {self.arrivals}")

    def lengths(self, key: PRNGKeyArray) -> tuple[Int[Array, " r"], Int[Array, " r"]]:
        """As given."""
        return jnp.asarray(self.prompt), jnp.asarray(self.output)

    def open_slots(self, slots: int, progress: Float[Array, ""], uniform: Float[Array, ""]) -> Int[Array, ""]:
        """All of them."""
        return jnp.asarray(slots, jnp.int32)

    def arrived(self, started: Int[Array, ""], clock: Float[Array, ""]) -> Int[Array, ""]:
        """Those that arrived until now and have not started."""
        return jnp.sum(self.arrivals <= clock, dtype=jnp.int32) - started

    def queued(self, started: Int[Array, ""], clock: Float[Array, ""]) -> Int[Array, ""]:
        """All that wait."""
        return self.arrived(started, clock)

    def next_arrival(self, started: Int[Array, ""]) -> Float[Array, ""]:
        """Of the first that has not started."""
        return jnp.asarray(self.arrivals)[jnp.minimum(started, self.arrivals.shape[0] - 1)]


def poisson_traffic(per_second: float, count: int, prompt: Lengths, output: Lengths, seed: int = 0) -> OpenLoop:
    """`count` requests that arrive independently of each other, `per_second` in the mean."""
    rng = np.random.default_rng(seed)

    def draw(lengths: Lengths, least: int) -> Int[np.ndarray, " r"]:
        drawn = np.asarray(lengths.median) * np.exp(np.asarray(lengths.spread) * rng.standard_normal(count))
        return np.maximum(np.rint(drawn), least).astype(np.int32)

    arrivals = np.cumsum(rng.exponential(1000.0 / per_second, count))
    return OpenLoop(arrivals, draw(prompt, 0), draw(output, LEAST_OUTPUT))
