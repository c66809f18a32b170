"""The benchmark's arithmetic."""

import math
from collections.abc import Sequence
from random import Random
from statistics import mean

import pytest
from ratings import (
    Estimate,
    Slice,
    beaten,
    best,
    rate,
    ratio,
    ratio_to_best,
    spread,
    unbiased_ratio,
    undisturbed,
)

FIXED = ("a", "b")
MANY = tuple("abcdefg")


def in_seconds(**arms: Sequence[float]) -> list[dict[str, Slice]]:
    """Rounds of 12 tokens, with the seconds of each."""
    rounds = max(map(len, arms.values()))
    return [
        {arm: Slice(12, seconds[number]) for arm, seconds in arms.items() if number < len(seconds)}
        for number in range(rounds)
    ]


def drawn(rng: Random, rates: dict[str, float], rounds: int, noise: float = 0.05) -> list[dict[str, Slice]]:
    """Slices of about 100 tokens; the speed of a round is shared by its arms."""
    found: list[dict[str, Slice]] = []
    for _ in range(rounds):
        weather = math.exp(rng.gauss(0, 0.15))
        found.append(
            {
                arm: Slice(tokens, tokens / (rate * weather * math.exp(rng.gauss(-(noise**2) / 2, noise))))
                for arm, rate in rates.items()
                for tokens in [100 + rng.randrange(10)]
            }
        )
    return found


def test_a_rate_is_all_tokens_by_all_seconds() -> None:
    assert rate([in_seconds(a=[1.0, 3.0])], "a") == 6.0
    # Of two loads, what both would give in the same time.
    assert rate([in_seconds(a=[1.0, 3.0]), in_seconds(a=[6.0])], "a") == 4.0


def test_a_ratio_is_to_the_highest_rate() -> None:
    rounds = in_seconds(a=[1.0, 9.0], b=[2.0, 2.0], x=[4.0, 4.0])
    assert best([rounds], FIXED) == "b"
    assert ratio_to_best([rounds], "x", FIXED) == ratio([rounds], "x", "b")
    assert ratio([rounds], "x", "b").value == 0.5


def test_the_error_of_a_ratio_is_that_of_the_rounds_differences() -> None:
    # As shares of their means the seconds are 0.75, 1.25 and 1, 1: the differences are off by 0.25 either way.
    value, error, _ = ratio([in_seconds(a=[3.0, 5.0], x=[8.0, 8.0])], "x", "a")
    assert value == 0.5
    assert error == pytest.approx(0.5 * math.sqrt(2 * 0.25**2 / 2))
    # What both share tells nothing.
    assert ratio([in_seconds(a=[3.0, 5.0], x=[6.0, 10.0])], "x", "a")[:2] == (0.5, 0.0)
    assert ratio([in_seconds(a=[3.0], x=[6.0])], "x", "a") == Estimate(0.5)


def test_each_load_adds_its_error_by_its_part_of_the_rate() -> None:
    noisy, exact = in_seconds(a=[3.0, 5.0], x=[4.0, 4.0]), in_seconds(a=[1.0, 1.0], x=[1.0, 1.0])
    # The loads' rates are 3 and 12.
    value, error, _ = ratio([noisy, exact], "x", "a")
    assert value == 1.0
    assert error == pytest.approx(0.25 * 3 / 15)


def test_an_arm_left_out_early_is_rated_beside_the_others() -> None:
    # The machine was twice as slow in the second half, which b has not seen.
    rounds = in_seconds(a=[1.0, 1.0, 2.0, 2.0], b=[2.0, 2.0], x=[1.0, 1.0, 2.0, 2.0])
    assert rate([rounds], "b") == pytest.approx(rate([rounds], "a") / 2)
    assert best([rounds], FIXED) == "a"
    unbiased = unbiased_ratio([rounds], "x", FIXED)
    assert unbiased is not None
    assert unbiased.value == 1.0


def test_the_unbiased_ratio_rates_an_arm_where_it_was_not_picked() -> None:
    rounds = in_seconds(a=[1.0, 8.0], b=[4.0, 2.0], x=[4.0, 2.0])
    # In the first round a is picked, and has 8 seconds in the second; there b is picked, and has 4 in the first.
    assert unbiased_ratio([rounds], "x", FIXED) == Estimate((8.0 / 2.0 + 4.0 / 4.0) / 2)
    assert unbiased_ratio([rounds[:1]], "x", FIXED) is None


def test_noise_flatters_the_best_of_many_and_not_the_unbiased_ratio() -> None:
    rng = Random(0)
    runs = [[drawn(rng, dict.fromkeys([*MANY, "x"], 50.0), 12)] for _ in range(300)]
    plain = mean(ratio_to_best(run, "x", MANY).value for run in runs)
    unbiased = mean(found.value for run in runs if (found := unbiased_ratio(run, "x", MANY)))
    assert plain < 0.985
    assert unbiased == pytest.approx(1.0, abs=0.003)


def test_an_interval_is_wider_where_few_rounds_told_the_error() -> None:
    assert Estimate(1.0, 0.1).interval == pytest.approx((1 - 0.196, 1 + 0.196))
    few = Estimate(1.0, 0.1, 12.0).interval
    assert few is not None
    assert few[1] == pytest.approx(1.218, abs=0.003)  # Student's t
    assert Estimate(1.0).interval is None


def covers(estimate: Estimate | None, truth: float) -> bool:
    """Whether the truth is in its interval."""
    assert estimate is not None
    assert estimate.interval is not None
    low, high = estimate.interval
    return low < truth < high


@pytest.mark.parametrize(("loads", "rounds"), [(1, 16), (1, 60), (6, 4)])
def test_the_truth_is_in_the_interval_as_often_as_it_should_be(loads: int, rounds: int) -> None:
    rng = Random(0)
    runs = [
        [drawn(rng, {"a": 50.0 * load, "x": 48.0 * load}, rounds) for load in range(1, loads + 1)] for _ in range(600)
    ]
    assert mean(covers(ratio(run, "x", "a"), 0.96) for run in runs) == pytest.approx(0.95, abs=0.025)


def test_so_it_is_in_that_of_the_unbiased_ratio() -> None:
    rng = Random(0)
    runs = [[drawn(rng, {"a": 50.0, "b": 40.0, "x": 48.0}, 30)] for _ in range(400)]
    assert mean(covers(unbiased_ratio(run, "x", FIXED), 0.96) for run in runs) == pytest.approx(0.95, abs=0.025)


def test_only_what_is_surely_behind_is_beaten() -> None:
    rounds = in_seconds(a=[1.0, 1.0], b=[1.2, 1.2], c=[1.0, 2.0], d=[1.04, 1.04])
    # d is behind by less than 5%; c by more, but one round is unlike the other.
    assert beaten(rounds, "abcd", by=0.05, errors=3.0) == {"b"}
    assert beaten(rounds[:1], "abcd", by=0.05, errors=3.0) == set()


def test_the_best_is_not_taken_for_beaten() -> None:
    rng = Random(0)
    lost = 0
    for _ in range(50):
        rounds = drawn(rng, {**dict.fromkeys(MANY, 48.0), "a": 50.0}, 30, noise=0.1)
        lost += any("a" in beaten(rounds[:stop], MANY, by=0.05, errors=3.0) for stop in range(6, 31))
    assert lost <= 1


def test_disturbed_rounds_are_left_out() -> None:
    quiet, loud = ({"a": Slice(1, 1.0), "b": Slice(1, 1.0, waited)} for waited in (0.1, 0.2))
    assert undisturbed([quiet, loud, quiet], 0.1) == [quiet, quiet]


def test_spread_is_what_is_no_arms_and_no_rounds_own() -> None:
    assert spread([in_seconds(a=[3.0, 5.0], b=[6.0, 10.0])]) == 0.0
    assert spread([in_seconds(a=[3.0], b=[6.0])]) is None
    rounds = drawn(Random(0), dict.fromkeys(MANY, 50.0), 200, noise=0.05)
    assert spread([rounds]) == pytest.approx(0.05, rel=0.15)
