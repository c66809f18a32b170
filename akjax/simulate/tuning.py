"""The list by batch size that a careful operator would make before serving."""

from collections.abc import Sequence

import equinox as eqx
import numpy as np
from jaxtyping import Float, Int

from akjax.simulate.policies import FixedLength, LengthByBatch
from akjax.simulate.run import simulate
from akjax.simulate.scenario import Scenario
from akjax.simulate.traffic import AbstractTraffic, ClosedLoop, Lengths, OpenLoop


def tune_by_batch(
    scenario: Scenario,
    levels: Sequence[int],
    sizes: Sequence[int],
    seeds: Int[np.ndarray, " seeds"],
    *,
    max_steps: int,
    threads: int = 1,
) -> LengthByBatch:
    """The fixed draft length of the most tokens per ms at each of a few steady batch sizes, measured.

    A size between two measured ones gets the length of the lower, as in vLLM's lists of ranges; sizes below the
    first get the first's.

    Args:
        scenario: whose text, times, drafter and windows hold. Its traffic gives the lengths of requests alone.
        levels: draft lengths to try.
        sizes: batch sizes to measure, ascending, at most `scenario.slots`.
        seeds: of the runs.
        max_steps: of each run.
        threads: in which the seeds are shared out.
    """
    score = steady_scores(scenario, levels, sizes, seeds, max_steps=max_steps, threads=threads)
    best = np.asarray(levels)[np.argmax(score, axis=1)]
    index = np.searchsorted(np.asarray(sizes), np.arange(scenario.slots + 1), side="right") - 1
    return LengthByBatch(best[np.maximum(index, 0)])


def steady_scores(
    scenario: Scenario,
    levels: Sequence[int],
    sizes: Sequence[int],
    seeds: Int[np.ndarray, " seeds"],
    *,
    max_steps: int,
    threads: int = 1,
) -> Float[np.ndarray, "sizes levels"]:
    """Tokens per ms of each fixed draft length at each steady batch size, over all seeds together."""
    policies = FixedLength(np.asarray(levels))
    steady = _steady(scenario.traffic)

    def at(size: int) -> Float[np.ndarray, " levels"]:
        traffic = eqx.tree_at(lambda t: t.open, steady, np.full((1, 1), size, np.int32))
        result = simulate(
            eqx.tree_at(lambda s: s.traffic, scenario, traffic),
            policies,
            seeds,
            max_steps=max_steps,
            stacked_policies=True,
            threads=threads,
        )
        return result.tokens.sum(-1) / result.ms.sum(-1)

    return np.stack([at(size) for size in sizes])


def _steady(traffic: AbstractTraffic) -> ClosedLoop:
    """A closed loop that sends requests of such lengths."""
    if isinstance(traffic, ClosedLoop):
        return traffic
    if not isinstance(traffic, OpenLoop):
        raise ValueError(f"knows the lengths of ClosedLoop and OpenLoop, given {type(traffic).__name__}")
    lengths = [np.log(np.maximum(x, 1)) for x in (traffic.prompt, traffic.output)]
    prompt, output = (Lengths(np.exp(np.mean(x)), np.std(x)) for x in lengths)
    return ClosedLoop([[1]], prompt, output)
