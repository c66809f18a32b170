"""How an adaptive arm does beside fixed ones, from slices of all of them in rounds, and how far to trust it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median, variance
from typing import NamedTuple

Z_95 = 1.96
"""Standard errors to either side that hold 95% of a normal distribution."""


class Slice(NamedTuple):
    """What an arm served in a round.

    Attributes:
        tokens: output tokens.
        seconds: that they took.
        waited: the share of its time that it was kept from the CPU by others.
    """

    tokens: int
    seconds: float
    waited: float = 0.0


Rounds = Sequence[Mapping[str, Slice]]
"""Of one load, the slices by arm of every round. An arm that is missing in one is in none after it."""

Strata = Sequence[Rounds]
"""Of all loads that are rated together. Each weighs as if it were served for the same time."""


class Estimate(NamedTuple):
    """A figure and how far to trust it.

    Attributes:
        value: of the figure.
        error: its standard error; None where there are too few rounds to tell.
        freedom: degrees of freedom that the error was found with.
    """

    value: float
    error: float | None = None
    freedom: float = math.inf

    @property
    def interval(self) -> tuple[float, float] | None:
        """The truth is in it in 95 of 100 cases."""
        if self.error is None:
            return None
        # Student's t, to first order in 1 / freedom: 2.16 for 12 degrees, instead of 2.18.
        reach = self.error * (Z_95 + (Z_95**3 + Z_95) / (4 * self.freedom))
        return self.value - reach, self.value + reach


def undisturbed(rounds: Rounds, most: float) -> Rounds:
    """The rounds in which no slice waited for the CPU for more than this share of its time."""
    return [each for each in rounds if all(slice_.waited <= most for slice_ in each.values())]


def total_rate(rounds: Rounds, arm: str) -> float:
    """All tokens of an arm by all its seconds, in tokens per second."""
    slices = [each[arm] for each in rounds if arm in each]
    return sum(each.tokens for each in slices) / sum(each.seconds for each in slices)


def full_arms(rounds: Rounds) -> tuple[str, ...]:
    """The arms that were served to the end."""
    return tuple(rounds[-1])


def rate(strata: Strata, arm: str) -> float:
    """Tokens per second over all loads, each served for the same time."""
    return mean(_rate(rounds, arm) for rounds in strata)


def _rate(rounds: Rounds, arm: str) -> float:
    """Of an arm that was left out after some rounds, what it would be had it gone on as it did beside the others."""
    shared = [each for each in rounds if arm in each]
    if len(shared) == len(rounds):
        return total_rate(rounds, arm)
    weather = [math.log(total_rate(rounds, other) / total_rate(shared, other)) for other in full_arms(rounds)]
    return total_rate(shared, arm) * math.exp(mean(weather))


def best(strata: Strata, fixed: Iterable[str]) -> str:
    """Which of the fixed arms that were served to the end has the highest rate."""
    there = [arm for arm in fixed if all(arm in full_arms(rounds) for rounds in strata)]
    return max(there, key=lambda arm: rate(strata, arm))


def ratio(strata: Strata, arm: str, other: str) -> Estimate:
    """An arm's rate by another's.

    The error is that of rounds drawn anew. What the arms of a round share, the machine's speed and the text, is in both
    rates and cancels: it is taken from each round's difference between the two, not from the spread of either.
    """
    value = rate(strata, arm) / rate(strata, other)
    if any(len(rounds) < 2 for rounds in strata):
        return Estimate(value)
    parts: list[float] = []
    for rounds in strata:
        one, two = (_influences(rounds, name, _weight(strata, rounds, name)) for name in (arm, other))
        parts.append(variance(a - b for a, b in zip(one, two, strict=True)) / len(rounds))
    return Estimate(value, value * math.sqrt(sum(parts)), _freedom(parts, [len(rounds) - 1 for rounds in strata]))


def _freedom(parts: Sequence[float], freedoms: Sequence[float]) -> float:
    """Welch's degrees of freedom of a sum of variances, each found with its own."""
    squared = sum(part**2 / freedom for part, freedom in zip(parts, freedoms, strict=True))
    return sum(parts) ** 2 / squared if squared > 0 else math.inf


def _weight(strata: Strata, rounds: Rounds, arm: str) -> float:
    return total_rate(rounds, arm) / sum(total_rate(each, arm) for each in strata)


def _influences(rounds: Rounds, arm: str, weight: float = 1.0) -> list[float]:
    """By how much each round is above the arm's rate: to first order, the logarithm of the rate is their mean."""
    tokens, seconds = mean(each[arm].tokens for each in rounds), mean(each[arm].seconds for each in rounds)
    return [weight * (each[arm].tokens / tokens - each[arm].seconds / seconds) for each in rounds]


def ratio_to_best(strata: Strata, arm: str, fixed: Iterable[str]) -> Estimate:
    """An arm's rate by that of the best fixed one, which is flattered by the noise it was picked from."""
    return ratio(strata, arm, best(strata, fixed))


def unbiased_ratio(strata: Strata, arm: str, fixed: Iterable[str]) -> Estimate | None:
    """The same with the best picked by every other round and rated in the rest, and the other way round.

    The mean of the two; None if a load has one round only.
    """
    if any(len(rounds) < 2 for rounds in strata):
        return None
    full = [name for name in fixed if all(name in full_arms(rounds) for rounds in strata)]
    one, other = ([rounds[start::2] for rounds in strata] for start in (0, 1))
    ratios = [ratio(rated_in, arm, best(picked_in, full)) for picked_in, rated_in in ((one, other), (other, one))]
    value = mean(each.value for each in ratios)
    if any(each.error is None for each in ratios):
        return Estimate(value)
    errors = [(each.error or 0.0) / 2 for each in ratios]
    parts = [error**2 for error in errors]
    return Estimate(value, math.hypot(*errors), _freedom(parts, [each.freedom for each in ratios]))


def beaten(rounds: Rounds, fixed: Iterable[str], *, by: float, errors: float) -> set[str]:
    """The fixed arms that are further behind the best one than `by`, a share, and `errors` standard errors on top."""
    fixed = [arm for arm in fixed if arm in full_arms(rounds)]
    leader = best([rounds], fixed)
    found: set[str] = set()
    for arm in fixed:
        value, error, _ = ratio([rounds], arm, leader)
        if error is not None and value + errors * error < 1 - by:
            found.add(arm)
    return found


def spread(strata: Strata) -> float | None:
    """How far a slice is off what its arm and its round have in common: the standard deviation, as a share.

    The median over the arms and loads; None where there are too few rounds to tell.
    """
    found: list[float] = []
    for rounds in strata:
        arms = full_arms(rounds)
        if len(rounds) < 2 or len(arms) < 2:
            return None
        by_arm = [_influences(rounds, arm) for arm in arms]
        common = [mean(of_round) for of_round in zip(*by_arm, strict=True)]
        # The common part has a share of each arm's own.
        freedom = (len(rounds) - 1) * (1 - 1 / len(arms))
        for values in by_arm:
            squares = sum((value - shared) ** 2 for value, shared in zip(values, common, strict=True))
            found.append(math.sqrt(squares / freedom))
    return median(found)
