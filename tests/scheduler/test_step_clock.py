"""Which gaps between outputs are the time of a step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akjax.scheduler.step_clock import StepClock


def test_the_first_output_has_no_gap() -> None:
    assert StepClock().gap_ms(0.0) is None


def test_a_gap_is_from_one_output_to_the_next() -> None:
    clock = StepClock()
    clock.gap_ms(0.0)
    assert clock.gap_ms(0.05) == pytest.approx(50.0)
    assert clock.gap_ms(0.05) == 0.0
    assert clock.gap_ms(60.05) == pytest.approx(60_000.0)


def test_waiting_is_no_step_time() -> None:
    clock = StepClock()
    clock.gap_ms(0.0)
    clock.gap_ms(0.05)
    clock.idle()
    assert clock.gap_ms(60.0) is None
    assert clock.gap_ms(60.05) == pytest.approx(50.0)


def test_idle_before_any_output_changes_nothing() -> None:
    clock = StepClock()
    clock.idle()
    assert clock.gap_ms(1.0) is None
    assert clock.gap_ms(1.05) == pytest.approx(50.0)


def test_a_step_without_tokens_has_no_time_and_starts_none() -> None:
    clock = StepClock()
    clock.gap_ms(0.0)
    assert clock.gap_ms(0.001, ran=False) is None
    assert clock.gap_ms(0.002, ran=False) is None
    assert clock.gap_ms(0.05) is None
    assert clock.gap_ms(0.1) == pytest.approx(50.0)


@given(st.lists(st.sampled_from(["idle", "empty", "step"])))
def test_a_gap_is_known_only_between_two_steps_in_a_row(events: list[str]) -> None:
    clock = StepClock()
    for number, (before, event) in enumerate(zip(["idle", *events], events, strict=False)):
        if event == "idle":
            clock.idle()
        else:
            known = clock.gap_ms(float(number), ran=event == "step") is not None
            assert known == (before == event == "step")


@given(st.lists(st.floats(0.0, 1e3), min_size=1))
def test_gaps_add_up_to_the_whole_time(gaps: list[float]) -> None:
    clock = StepClock()
    now = 5.0
    assert clock.gap_ms(now) is None
    total = 0.0
    for gap in gaps:
        now += gap
        measured = clock.gap_ms(now)
        assert measured is not None
        total += measured
    assert total == pytest.approx((now - 5.0) * 1e3, abs=1e-6)
