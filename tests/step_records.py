"""Records of steps for tests that care for some of their fields."""

from typing import Any

from akjax.step_log import StepRecord


def step_record(**changes: Any) -> StepRecord:
    """A step of two requests without drafts, but for these fields."""
    whole: dict[str, Any] = dict(
        time=1.7e9,
        gap_ms=10.0,
        untaught="",
        tokens=2,
        requests=2,
        prefill=0,
        context=100,
        drafts=0,
        drafting=0,
        uneven=False,
        k=0,
        forced=False,
        predicted_ms=None,
        request=[],
        drafted=[],
        accepted=[],
        cut=[],
        mode=[],
    )
    return StepRecord(**(whole | changes))
