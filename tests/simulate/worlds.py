"""Small worlds for the tests."""

from typing import Any

import numpy as np

from akjax import Constant, PerToken, reference_cost
from akjax.simulate import ClosedLoop, Lengths, Scenario, StepTimes, Text

RATES = np.array([[0.8, 0.7, 0.65, 0.6], [0.9, 0.85, 0.8, 0.8], [0.98, 0.97, 0.96, 0.95]])
COST = Constant(20.0) + PerToken(0.9)
EXPERTS = reference_cost(27.0, 0.635, 0.542, experts=64, top_k=4)
SWITCHING = np.array([[0.0, 0.02, 0.01], [0.05, 0.0, 0.0], [0.05, 0.0, 0.0]])


def steady(slots: int, work_tokens: float = 1e9, **changes: Any) -> Scenario:
    """Requests without prompts that never end: nothing but verification."""
    traffic = ClosedLoop([[slots]], Lengths(0.0), Lengths(1e8))
    return Scenario(
        **{
            "text": Text(RATES),
            "times": StepTimes(COST),
            "traffic": traffic,
            "work_tokens": work_tokens,
            "slots": slots,
        }
        | changes
    )


def busy(slots: int, work_tokens: float = 1e9, **changes: Any) -> Scenario:
    """Short requests with prompts, text that turns, noise and spikes."""
    return steady(
        slots,
        work_tokens,
        **{
            "text": Text(RATES, switching=SWITCHING, request_spread=0.5, context_slope=-0.1),
            "times": StepTimes(EXPERTS, noise=0.05, spike_chance=0.02, spike_factor=5.0),
            "traffic": ClosedLoop([[slots]], Lengths(50.0, 0.5), Lengths(12.0, 0.7)),
        }
        | changes,
    )
