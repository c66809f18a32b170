"""How well acceptance models foretell, against a plain loop, and the fit of running rates."""

import numpy as np
import pytest

from akjax.acceptance import LogitFilter, RunningRates
from akjax.fits.acceptance import DraftSequence, fit_running_rates, predicted


def drawn(rates: list[float], steps: int, requests: int, seed: int = 0, drafted: int | None = None) -> DraftSequence:
    """Every request in every step, all with the same rates; the second half of the steps has them halved."""
    rng = np.random.default_rng(seed)
    limit = len(rates)
    drafts = np.full((steps, requests), drafted or limit)
    accepted = np.zeros((steps, requests), int)
    for step in range(steps):
        chance = np.asarray(rates) * (1.0 if step < steps // 2 else 0.5)
        alive = np.cumprod(rng.random((requests, limit)) < chance, axis=1)
        accepted[step] = np.minimum(alive.sum(axis=1), drafts[step])
    fresh = np.zeros((steps, requests), bool)
    fresh[0] = True
    return DraftSequence(np.tile(np.arange(requests), (steps, 1)), drafts, accepted, fresh, requests)


def plain_log_loss(sequence: DraftSequence, alpha: float, global_alpha: float, drift: float, prior: float) -> float:
    """The recursion as its contract has it, one request and one position at a time."""
    limit = sequence.draft_limit
    pool, own = [prior] * limit, {}
    loss, trials = 0.0, 0
    for requests, drafts, accepts, fresh in zip(*sequence[:4], strict=True):
        for request, drafted, accepted, first in zip(requests, drafts, accepts, fresh, strict=True):
            # All requests of a step are foretold by the pool as it was before the step.
            rates = pool if first else own[request]
            for position in range(min(drafted, accepted + 1)):
                chance = rates[position] if position < accepted else 1.0 - rates[position]
                loss, trials = loss - np.log(chance), trials + 1
        for request, drafted, accepted, first in zip(requests, drafts, accepts, fresh, strict=True):
            mine = list(pool) if first else list(own[request])
            for position in range(min(drafted, accepted + 1)):
                target = 1.0 if position < accepted else 0.0
                mine[position] += alpha * (target - mine[position])
                pool[position] += global_alpha * (target - pool[position])
            if accepted == drafted:
                lead = mine[drafted - 1] - pool[drafted - 1]
                for position in range(drafted, limit):
                    expected = min(max(pool[position] + lead, 0.0), 1.0)
                    mine[position] += alpha * (expected - mine[position])
                    pool[position] += drift * (pool[drafted - 1] - pool[position])
            own[request] = mine
    return loss / trials


@pytest.mark.parametrize("drafted", [None, 2])
def test_the_loss_of_running_rates_is_that_of_a_plain_loop(drafted: int | None) -> None:
    sequence = drawn([0.9, 0.8, 0.6, 0.7], 60, 3, drafted=drafted)
    assert predicted(RunningRates(), sequence, draft_limit=4).log_loss == pytest.approx(
        plain_log_loss(sequence._replace(), 0.25, 0.05, 0.01, 0.8), rel=1e-9
    )


def test_padding_counts_for_nothing() -> None:
    sequence = drawn([0.9, 0.8, 0.6], 40, 2)

    def padded(values: np.ndarray, with_what: int) -> np.ndarray:
        return np.concatenate([values, np.full((len(values), 3), with_what, values.dtype)], axis=1)

    wide = DraftSequence(
        padded(sequence.request, 2),
        padded(sequence.drafted, 3),
        padded(sequence.accepted, 1),
        padded(sequence.fresh, 0),
        2,
    )
    for model in (RunningRates(), LogitFilter()):
        narrow_one, wide_one = predicted(model, sequence), predicted(model, wide)
        np.testing.assert_allclose(wide_one.loss, narrow_one.loss, rtol=1e-12)
        np.testing.assert_array_equal(wide_one.trials, narrow_one.trials)


def test_skipped_steps_teach_and_are_not_judged() -> None:
    sequence = drawn([0.9, 0.8, 0.6], 100, 2)
    whole, later = (predicted(LogitFilter(), sequence, skip=skip) for skip in (0, 60))
    np.testing.assert_allclose(later.loss, whole.loss[60:], rtol=1e-12)
    assert np.sum(later.counted) == np.sum(whole.trials[60:])


def test_the_table_of_calibration_counts_every_tested_draft() -> None:
    sequence = drawn([0.9, 0.8, 0.6], 200, 4)
    told = predicted(LogitFilter(), sequence)
    assert np.sum(told.counted) == np.sum(told.trials)
    assert np.sum(told.accepted) == np.sum(sequence.accepted)
    assert np.all(told.expected <= told.counted)


def test_fitted_rates_foretell_better_than_the_defaults_and_lie_in_a_minimum() -> None:
    sequence = drawn([0.9, 0.8, 0.6, 0.7], 400, 4)
    fit = fit_running_rates(sequence)
    assert fit.converged
    assert fit.log_loss < predicted(RunningRates(), sequence).log_loss - 0.01
    rates = [float(rate) for rate in (fit.model.alpha, fit.model.global_alpha, fit.model.global_drift, fit.model.prior)]
    assert plain_log_loss(sequence, *rates) == pytest.approx(fit.log_loss, rel=1e-9)
    for at in range(4):
        for by in (0.9, 1.1):
            moved = [rate * (by if number == at else 1.0) for number, rate in enumerate(rates)]
            assert plain_log_loss(sequence, *np.minimum(moved, 1.0 - 1e-9).tolist()) >= fit.log_loss - 1e-9
