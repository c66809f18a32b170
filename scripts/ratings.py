"""How an adaptive arm does beside fixed ones, from rates of all of them in repeats, and how far to trust it."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

Rates = Mapping[str, Sequence[float]]
"""Of every arm, its rate in each repeat; as many for each, and in the same order."""


def best(rates: Rates, fixed: Iterable[str]) -> str:
    """Which of the fixed arms has the highest median."""
    return max(fixed, key=lambda arm: median(rates[arm]))


def ratio(rates: Rates, arm: str, fixed: Iterable[str]) -> float:
    """The arm's median by that of the best fixed one, which is flattered by the noise it was picked from."""
    return median(rates[arm]) / median(rates[best(rates, fixed)])


def unbiased_ratio(rates: Rates, arm: str, fixed: Iterable[str]) -> float | None:
    """The same with the best picked by every other repeat and rated in the rest, and the other way round.

    The mean of the two; None for one repeat.
    """
    if len(rates[arm]) < 2:
        return None
    fixed = tuple(fixed)
    one, other = ({name: values[start::2] for name, values in rates.items()} for start in (0, 1))
    ratios = [
        median(rated_in[arm]) / median(rated_in[best(picked_in, fixed)])
        for picked_in, rated_in in ((one, other), (other, one))
    ]
    return sum(ratios) / 2


def spread(rates: Rates) -> float:
    """The median over the arms of the median deviation of a repeat from its arm's median, as a share of that."""
    return median(median(abs(value - median(values)) for value in values) / median(values) for values in rates.values())
