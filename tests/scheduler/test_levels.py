"""The draft lengths that may be chosen, from vLLM's own reading of the schedule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from akjax.scheduler.levels import levels_of_schedule, out_of_reach

Schedule = list[tuple[int, int, int]]


def levels(schedule: Schedule, draft_limit: int = 8, max_requests: int = 16) -> tuple[int, ...]:
    lookup = build_dynamic_sd_schedule_lookup(schedule, max_requests, draft_limit)
    return levels_of_schedule(lookup, schedule, draft_limit)


@pytest.mark.parametrize("schedule", [None, []])
def test_without_a_schedule_only_the_limit(schedule: Schedule | None) -> None:
    assert levels_of_schedule(None, schedule, 5) == (5,)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ([(1, 4, 8), (5, 8, 4), (9, 16, 2)], (2, 4, 8)),
        ([(1, 4, 2), (5, 8, 8), (9, 16, 2)], (2, 8)),
        ([(1, 4, 3), (9, 12, 1)], (1, 3)),
        ([(9, 16, 2), (1, 8, 4)], (2, 4)),
        ([(1, 4, 4), (5, 16, 0)], (0, 4)),
        ([(1, 4, 4), (5, 8, 0), (9, 16, 0)], (0, 4)),
        ([(1, 16, 8)], (8,)),
    ],
    ids=["falling", "twice", "with a gap", "out of order", "with a zero", "with zeros", "one"],
)
def test_levels_are_the_distinct_lengths(schedule: Schedule, expected: tuple[int, ...]) -> None:
    assert levels(schedule) == expected


def test_a_length_for_batches_that_never_run_is_no_level() -> None:
    assert levels([(1, 4, 6), (5, 8, 3)], max_requests=4) == (6,)
    assert levels([(1, 4, 6), (5, 8, 0)], max_requests=4) == (6,)


def test_the_unused_place_of_the_lookup_is_no_level() -> None:
    assert levels_of_schedule([0, 6, 6], [(1, 2, 6)], 6) == (6,)


@pytest.mark.parametrize(
    "schedule",
    [[(1, 4, 9), (5, 16, 2)], [(1, 4, 2), (5, 16, 9)], [(1, 16, 2), (17, 32, 9)]],
    ids=["first", "last", "of batches that never run"],
)
def test_a_length_above_the_limit_is_refused(schedule: Schedule) -> None:
    with pytest.raises(
        ValueError, match=r"num_speculative_tokens_per_batch_size: 9 drafts.*num_speculative_tokens is 8"
    ):
        levels(schedule)


@pytest.mark.parametrize(
    ("schedule", "max_requests"),
    [([(1, 16, 0)], 16), ([(1, 4, 0), (5, 8, 4)], 4)],
    ids=["all zero", "zero for every batch that runs"],
)
def test_a_schedule_without_drafts_is_refused(schedule: Schedule, max_requests: int) -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens_per_batch_size"):
        levels(schedule, max_requests=max_requests)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 6)), min_size=1, max_size=5),
    st.integers(1, 20),
)
def test_levels_are_what_some_batch_size_would_get(ranges: list[tuple[int, int, int]], max_requests: int) -> None:
    schedule: Schedule = []
    end = 0
    for gap, width, length in ranges:
        start = end + 1 + (gap if schedule else 0)
        end = start + width - 1
        schedule.append((start, end, length))
    got = {[k for start, _, k in schedule if start <= size][-1] for size in range(1, max_requests + 1)}
    if got != {0}:
        assert levels(schedule, 6, max_requests) == tuple(sorted(got))
    else:
        with pytest.raises(ValueError, match="num_speculative_tokens_per_batch_size"):
            levels(schedule, 6, max_requests)


def test_lengths_for_batches_that_cannot_be_are_out_of_reach() -> None:
    schedule = [(1, 8, 6), (9, 16, 4), (17, 32, 0), (33, 64, 2)]
    assert out_of_reach((6,), schedule) == (0, 2, 4)
    assert out_of_reach((4, 6), schedule) == (0, 2)
    assert out_of_reach((0, 2, 4, 6), schedule) == ()
    assert out_of_reach((6,), None) == ()
