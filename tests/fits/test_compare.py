"""Comparing forms: the true one wins, on what it was not fitted on."""

import jax
import numpy as np
import pytest

from akjax import StepFeatures
from akjax.fits.compare import cells_of, compared
from akjax.forms import FORMS, Engine

ENGINE = Engine(base=9.0, per_expert=0.11, per_token=0.02, experts=128, top_k=8)


def drawn(form: str, rows: int = 600) -> tuple[StepFeatures, np.ndarray]:
    rng = np.random.default_rng(0)
    requests = rng.choice([1, 2, 4, 8, 16], rows).astype(np.float64)
    tokens = requests * (1.0 + rng.choice([0, 1, 3, 7], rows))
    steps = StepFeatures(tokens=tokens, requests=requests)
    ms = np.asarray(jax.jit(lambda steps: FORMS[form](ENGINE)(steps))(steps)) * np.exp(0.02 * rng.standard_normal(rows))
    return steps, ms


def test_a_cell_is_a_batch_size_and_a_draft_length() -> None:
    steps = StepFeatures(tokens=np.array([4.0, 8.0, 4.0, 4.0]), requests=np.array([2.0, 2.0, 2.0, 1.0]))
    cell = cells_of(steps)
    assert cell[0] == cell[2]
    assert len({*cell.tolist()}) == 3


def test_the_true_form_wins_and_a_line_is_last() -> None:
    steps, ms = drawn("power")
    told: list[str] = []
    forms = {name: FORMS[name](ENGINE) for name in ("line", "reference", "power")}
    best, *_, worst = compared(forms, steps, ms, report=told.append)
    assert told == ["line", "reference", "power"]
    assert (best.form, worst.form) == ("power", "line")
    assert best.held_out_percent < 2.5 < worst.held_out_percent
    assert best.held_out_interval[0] < best.held_out_percent < best.held_out_interval[1]
    assert best.log_likelihood > worst.log_likelihood
    assert best.larger_percent is not None
    assert worst.larger_percent is not None
    assert best.larger_percent < worst.larger_percent
    assert (best.parameters, worst.parameters) == (4, 2)
    # The noise alone is 2%, so half of it times the root of 2/pi on either side.
    assert best.fitted_percent == pytest.approx(1.6, abs=0.3)


def test_steps_of_one_kind_cannot_be_compared() -> None:
    steps = StepFeatures(tokens=np.full(9, 4.0), requests=np.full(9, 2.0))
    with pytest.raises(ValueError, match="nothing can be held out"):
        compared({"line": FORMS["line"](ENGINE)}, steps, np.full(9, 10.0))
