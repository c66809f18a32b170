"""Whether a fit's standard errors are what they say: known parameters, noise and gross outliers, many times."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Float

from akjax import AbstractCostModel, StepFeatures
from akjax.fit_file import start_of
from akjax.fits import fit_cost
from akjax.fits.fit_file import fit_file_of
from akjax.forms import FORMS, Engine

ENGINE = Engine(
    base=9.0, per_expert=0.11, per_token=0.02, lengths=(0, 1, 2, 4, 8), experts=128, top_k=8, sizes=(1, 2, 4, 8, 16, 32)
)
# Of each form.
SEEDS, ROWS = 200, 1500
NOISE, OUTLIERS = 0.05, 0.02


def drawn_steps(rng: np.random.Generator) -> StepFeatures:
    """Steps as a server has them: any batch, any draft length, contexts of its own, prompts in every tenth."""
    requests = rng.choice([1, 2, 3, 5, 8, 13, 21, 34], ROWS).astype(np.float64)
    drafts = rng.choice(ENGINE.lengths, ROWS).astype(np.float64)
    return StepFeatures(
        tokens=requests * (drafts + 1.0),
        requests=requests,
        drafting=rng.choice(ENGINE.lengths, ROWS).astype(np.float64),
        context=requests * rng.uniform(100.0, 60_000.0, ROWS),
        prefill=np.where(rng.random(ROWS) < 0.1, rng.integers(16, 512, ROWS), 0).astype(np.float64),
        uneven=np.zeros(ROWS),
    )


def true_values(model: AbstractCostModel) -> Float[np.ndarray, " p"]:
    """The form's start, but away from where its factors and powers begin."""
    values = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(model)]).astype(np.float64)
    rng = np.random.default_rng(1)
    shift = [1.0 if parameter.is_time else rng.uniform(0.9, 1.1) for parameter in model.parameters()]
    return values * np.asarray(shift)


@pytest.mark.parametrize("name", FORMS)
def test_parameters_that_are_called_determined_lie_within_three_standard_errors(name: str) -> None:
    start = FORMS[name](ENGINE)
    truth = jax.tree.unflatten(jax.tree.structure(start), _leaves_like(jax.tree.leaves(start), true_values(start)))
    rng = np.random.default_rng(7)
    times = jax.jit(lambda steps: truth(steps))
    expected = true_values(start)
    within, told = np.zeros(len(expected)), np.zeros(len(expected))
    for _ in range(SEEDS):
        steps = drawn_steps(rng)
        ms = np.asarray(times(steps)) * (1.0 + NOISE * rng.standard_normal(ROWS))
        ms = np.where(rng.random(ROWS) < OUTLIERS, ms * rng.uniform(2.0, 10.0, ROWS), ms)
        fit = fit_cost(start, steps, ms)
        off = np.abs(fit.values - expected) <= 3.0 * fit.standard_errors
        within, told = within + (off & fit.determined), told + fit.determined
    served = start_of(fit_file_of(fit, name, ENGINE, steps, ms), ENGINE).model
    np.testing.assert_allclose(served(steps), times(steps), rtol=0.05)
    names = np.asarray([parameter.name for parameter in start.parameters()])
    # Of each parameter by itself, wherever it was called determined.
    assert np.sum(told == SEEDS) >= 2, dict(zip(names, told, strict=True))
    assert np.all(within >= 0.95 * told), dict(zip(names, within / np.maximum(told, 1.0), strict=True))


def _leaves_like(leaves: list[np.ndarray], values: Float[np.ndarray, " p"]) -> list[jax.Array]:
    ends = np.cumsum([np.size(leaf) for leaf in leaves])[:-1]
    return [
        jnp.asarray(part.reshape(np.shape(leaf))) for part, leaf in zip(np.split(values, ends), leaves, strict=True)
    ]
