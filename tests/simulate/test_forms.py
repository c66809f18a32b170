"""Every cost form, as what a world is and as what a policy learns there."""

import dataclasses

import numpy as np
import pytest
from simulate.worlds import busy

from akjax import default_controller
from akjax.forms import FORMS, Engine
from akjax.simulate import Controlled, StepTimes, simulate

ENGINE = Engine(20.0, 0.5, 0.9, lengths=(0, 1, 2, 4), experts=64, top_k=4, sizes=(4, 8, 16))
# A machine of another speed.
START = ENGINE._replace(base=30.0, per_expert=0.75, per_token=1.35)


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_simulated_and_learned(name: str) -> None:
    scenario = busy(3, work_tokens=2000.0)
    scenario = dataclasses.replace(scenario, times=StepTimes(FORMS[name](ENGINE), noise=0.03))
    controller = default_controller(draft_limit=4, levels=ENGINE.lengths)
    policy = Controlled(controller, FORMS[name](START), counts_unobserved=True, prefill_teaches=True)
    result = simulate(scenario, policy, np.arange(2), max_steps=1500)
    assert np.all(result.finished)
    assert np.all(result.learned.cost.taught > 0.8 * result.steps)
    # The noise alone is 2.4% of the mean absolute error.
    assert np.all(result.learned.cost.error < 0.05)
