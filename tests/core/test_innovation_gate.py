"""The learner in logarithms: against an oracle, from any start, and what it does with surprises."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Float

from akjax import Constant, CostTable, FixedCost, InnovationGate, RatioGate, StepFeatures, dense_cost, reference_cost
from akjax.arrays import Array
from akjax.cost.model import AbstractCostModel
from akjax.learner import AbstractCostLearner, CostState

learn = jax.jit(InnovationGate.learn)
YES = np.bool_(True)


def step_of(tokens: float, requests: float = 1.0, drafting: float | None = None, prefill: float = 0.0) -> StepFeatures:
    drafting = tokens - requests if drafting is None else drafting
    values = (tokens, requests, drafting, 0.0, prefill, 0.0)
    return StepFeatures(*(np.float64(value) for value in values))


def taught(gate: InnovationGate, state: CostState, steps: list[tuple[float, float]]) -> CostState:
    for tokens, ms in steps:
        state = learn(gate, state, step_of(tokens), np.float64(ms), YES)
    return state


def predicted(state: CostState, tokens: float) -> float:
    return float(state.belief.model(step_of(tokens)))


def test_one_step_of_a_constant_worked_out_by_hand() -> None:
    # The prior of log(base) is N(log 10, 1 + 0.25), a step is measured with variance 0.0025, and it took 20 ms.
    gate = InnovationGate(scale_drift=0.0)
    state = taught(gate, gate.init(Constant(10.0)), [(1.0, 20.0)])
    gain = 1.25 / 1.2525
    np.testing.assert_allclose(float(state.belief.model(step_of(1.0))), 10.0 * 2.0**gain, rtol=1e-12)
    np.testing.assert_allclose(np.asarray(state.belief.covariance), [[0.0025 * gain]], rtol=1e-12)
    # The noise moves by a fiftieth of the surprise beyond what was expected.
    expected = 0.0025 + 0.02 * (np.log(2.0) ** 2 - 1.2525)
    np.testing.assert_allclose(float(state.memory.noise), max(expected, 0.005**2), rtol=1e-12)
    assert float(state.error) == pytest.approx(0.05 * 1.0)


def test_any_run_of_a_dense_cost_follows_the_oracle() -> None:
    rng = np.random.default_rng(3)
    gate = InnovationGate()
    state = gate.init(dense_cost(20.0, 0.5))
    x, P, noise, drift, last = np.log([20.0, 0.5]), np.diag([0.25, 0.25]) + 1.0, 0.05**2, 3e-4, 0.0
    for _ in range(200):
        tokens = float(rng.integers(2, 40))
        ms = (8.0 + 0.9 * tokens) * np.exp(rng.normal(0, 0.03))
        state = taught(gate, state, [(tokens, ms)])
        parts = np.exp(x) * [1.0, tokens]
        slopes = parts / parts.sum()
        P = P + drift
        innovation, variance = np.log(ms / parts.sum()), slopes @ P @ slopes + noise
        assert innovation**2 < gate.gate**2 * variance
        gain = P @ slopes / variance
        x = x + gain * innovation
        P = P - np.outer(gain, slopes @ P)
        noise = np.clip(noise + 0.02 * (innovation**2 - variance), 0.005**2, 0.2**2)
        standard = innovation / np.sqrt(variance)
        drift, last = np.clip(drift * np.exp(0.02 * np.clip(standard * last, -1.0, 1.0)), 1e-6, 1e-2), standard
        np.testing.assert_allclose([np.ravel(leaf)[0] for leaf in jax.tree.leaves(state.belief.model)], np.exp(x), 1e-9)
        np.testing.assert_allclose(np.asarray(state.belief.covariance), P, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("scale", [0.1, 0.3, 3.0, 10.0])
def test_a_prior_from_other_hardware_is_right_within_ten_steps(scale: float) -> None:
    gate = InnovationGate()
    truth = reference_cost(27.0, 0.635, 0.542, experts=288, top_k=8)
    start = reference_cost(27.0 * scale, 0.635 * scale, 0.542 * scale, experts=288, top_k=8)
    state = taught(gate, gate.init(start), [(t, float(truth(step_of(t)))) for t in [4.0, 8.0] * 5])
    for tokens in (4.0, 8.0):
        assert predicted(state, tokens) == pytest.approx(float(truth(step_of(tokens))), rel=0.03)


def test_a_single_spike_changes_no_parameter() -> None:
    gate = InnovationGate()
    state = taught(gate, gate.init(dense_cost(20.0, 0.5)), [(4.0, 22.0)] * 20)
    after = taught(gate, state, [(4.0, 250.0)])
    np.testing.assert_array_equal(jax.tree.leaves(after.belief.model), jax.tree.leaves(state.belief.model))
    assert int(after.taught) == int(state.taught) == 20


def test_after_a_run_of_surprises_the_speed_is_unknown_again_and_the_proportions_stay() -> None:
    gate = InnovationGate()
    # Learned far from the start's proportions: at 4 and 40 tokens these steps are 12 + 2.5 ms a token.
    state = taught(gate, gate.init(dense_cost(20.0, 0.5)), [(4.0, 22.0), (40.0, 112.0)] * 200)
    state = taught(gate, state, [(4.0, 110.0)] * 3)
    assert predicted(state, 4.0) == pytest.approx(22.0, rel=1e-3)
    x = np.log([float(leaf) for leaf in jax.tree.leaves(state.belief.model)])
    P, noise = np.asarray(state.belief.covariance), float(state.memory.noise)
    drift = float(state.memory.drift)
    assert int(state.taught) == 400
    state = taught(gate, state, [(4.0, 110.0)])
    assert int(state.taught) == 401

    parts = np.exp(x) * [1.0, 4.0]
    slopes = parts / parts.sum()
    P = P + drift + 1.0
    gain = P @ slopes / (slopes @ P @ slopes + noise)
    expected = np.exp(x + gain * np.log(110.0 / parts.sum()))
    np.testing.assert_allclose(jax.tree.leaves(state.belief.model), expected, rtol=1e-9)
    np.testing.assert_allclose(np.asarray(state.belief.covariance), P - np.outer(gain, slopes @ P), rtol=1e-7)
    # So a step of 40 tokens, not seen since, is known to take five times as long too.
    assert predicted(state, 40.0) == pytest.approx(5 * 112.0, rel=0.02)


@pytest.mark.parametrize(("wanders", "low", "high"), [(0.0, 1e-6, 1e-4), (0.003, 1e-6, 2e-4), (0.03, 3e-4, 3e-3)])
def test_how_quickly_the_machine_wanders_is_learned(wanders: float, low: float, high: float) -> None:
    rng = np.random.default_rng(5)
    speeds = np.exp(np.cumsum(wanders * rng.standard_normal(4000)))
    ms = speeds * 20.0 * np.exp(0.05 * rng.standard_normal(4000))
    gate = InnovationGate()
    state, drifts = gate.init(Constant(20.0)), []
    for step in ms:
        state = taught(gate, state, [(1.0, float(step))])
        drifts.append(float(state.memory.drift))
    # The true one is wanders**2: 0, 9e-6 and 9e-4.
    assert low <= np.median(drifts[2000:]) <= high


def test_a_machine_that_is_twice_as_slow_for_a_while_leaves_the_proportions_as_they_were() -> None:
    gate = InnovationGate()
    alike = [(4.0, 22.0), (40.0, 112.0)] * 200
    state = taught(gate, gate.init(dense_cost(20.0, 0.5)), alike)
    # Slow at one size, and fast again at the same: nothing is said of the other size.
    state = taught(gate, state, [(4.0, 44.0)] * 60 + [(4.0, 22.0)] * 60)
    assert predicted(state, 4.0) == pytest.approx(22.0, rel=1e-3)
    assert predicted(state, 40.0) == pytest.approx(112.0, rel=1e-3)


def test_surprises_in_every_other_step_are_a_run_too() -> None:
    gate = InnovationGate()
    state = taught(gate, gate.init(dense_cost(20.0, 0.5)), [(4.0, 22.0)] * 30)
    count = 0
    while predicted(state, 4.0) < 30.0 and count < 40:
        state = taught(gate, state, [(4.0, 22.0), (4.0, 44.0)])
        count += 1
    # The run after n pairs is 5 * (1 - 0.8**n), which reaches 4 with the eighth.
    assert count == 8


def test_steps_between_no_drafts_and_some_teach_nothing() -> None:
    gate = InnovationGate()
    state = gate.init(dense_cost(20.0, 0.5))
    for tokens, drafting in ((4.0, 0.0), (1.0, 3.0)):
        after = learn(gate, state, step_of(tokens, 1.0, drafting), np.float64(25.0), YES)
        assert int(after.taught) == 0
    # With prompts in it a step is no such change.
    after = learn(gate, state, step_of(1.0, 1.0, 3.0, prefill=100.0), np.float64(25.0), YES)
    assert int(after.taught) == 1


def test_what_is_no_step_time_teaches_nothing() -> None:
    gate = InnovationGate()
    state = gate.init(dense_cost(20.0, 0.5))
    after = learn(gate, state, step_of(4.0), np.float64(1e6), np.bool_(False))
    np.testing.assert_allclose(float(after.predicted_ms), 22.0, rtol=1e-12)
    unlearned = eqx.tree_at(lambda s: s.predicted_ms, after, state.predicted_ms)
    for new, old in zip(jax.tree.leaves(unlearned), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize("learner", [InnovationGate(), RatioGate(), FixedCost()], ids=["gate", "ratio", "fixed"])
def test_a_step_without_tokens_leaves_the_prediction_of_the_last_one(learner: AbstractCostLearner) -> None:
    state = learner.init(dense_cost(20.0, 0.5))
    state = learner.learn(state, step_of(4.0), np.float64(23.0), YES)
    np.testing.assert_allclose(float(state.predicted_ms), 22.0, rtol=1e-12)
    state = learner.learn(state, step_of(0.0, 0.0), np.float64(0.0), np.bool_(False))
    np.testing.assert_allclose(float(state.predicted_ms), 22.0, rtol=1e-12)


def test_parameters_that_cannot_be_told_apart_stay_about_the_truth() -> None:
    gate = InnovationGate()
    truth = reference_cost(27.0, 0.635, 0.542, experts=288, top_k=8)

    def learned(key: Array) -> Float[Array, " p"]:
        of_tokens, of_noise = jax.random.split(key)
        tokens = jax.random.randint(of_tokens, (2000,), 2, 9).astype(np.float64)
        noise = 0.03 * jax.random.normal(of_noise, (2000,), np.float64)

        def one(state: CostState, drawn: tuple[Array, Array]) -> tuple[CostState, None]:
            step = StepFeatures(drawn[0], np.ones(()), drawn[0] - 1.0)
            return gate.learn(state, step, truth(step) * jnp.exp(drawn[1]), YES), None

        state, _ = jax.lax.scan(one, gate.init(truth), (tokens, noise))
        return jnp.stack(jax.tree.leaves(state.belief.model))

    base, per_expert, _, per_token = np.asarray(jax.jit(jax.vmap(learned))(jax.random.split(jax.random.key(0), 40))).T
    # Each run is off its own way, as 3% of noise hides what 2 to 8 tokens tell; together they are not.
    assert np.median(base) == pytest.approx(27.0, rel=0.02)
    assert np.median(per_expert) == pytest.approx(0.635, rel=0.15)
    assert np.median(per_token) == pytest.approx(0.542, rel=0.25)
    assert np.quantile(np.abs(np.log(per_expert / 0.635)), 0.9) < np.log(1.5)


def test_forecasts_are_as_unsure_as_a_sample_of_the_belief() -> None:
    gate = InnovationGate()
    state = taught(gate, gate.init(dense_cost(20.0, 0.5)), [(t, 20.0 + 0.5 * t) for t in [2.0, 4.0, 6.0] * 20])
    tokens = np.array([1.0, 5.0, 30.0])
    steps = StepFeatures(tokens, np.ones(3))
    forecast = jax.jit(InnovationGate.forecast)(gate, state, steps)
    mean = np.log([float(leaf) for leaf in jax.tree.leaves(state.belief.model)])
    sample = np.random.default_rng(1).multivariate_normal(mean, np.asarray(state.belief.covariance), 40_000)
    logs = np.log(np.exp(sample[:, :1]) + np.exp(sample[:, 1:]) * tokens)
    np.testing.assert_allclose(np.asarray(forecast.log_ms), np.log(20.0 + 0.5 * tokens), atol=5e-3)
    np.testing.assert_allclose(np.asarray(forecast.covariance), np.cov(logs.T), rtol=0.15, atol=2e-6)


@pytest.mark.parametrize("start", [Constant(0.0), dense_cost(10.0, -1.0)])
def test_a_start_that_has_no_logarithm_is_refused(start: AbstractCostModel) -> None:
    with pytest.raises(ValueError, match="must start above 0"):
        InnovationGate().init(start)


def test_learners_say_what_they_need() -> None:
    assert InnovationGate().learns
    assert InnovationGate().expects_exact_times
    assert RatioGate().learns
    assert not RatioGate().expects_exact_times
    assert not FixedCost().learns
    state = FixedCost().init(CostTable(np.array([10.0]), (1.0,)))
    after = FixedCost().learn(state, step_of(1.0), np.float64(5.0), YES)
    assert float(after.predicted_ms) == 10.0
    assert eqx.tree_equal(eqx.tree_at(lambda s: s.predicted_ms, after, state.predicted_ms), state)


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_parameters_that_exact_steps_cannot_tell_apart_keep_the_proportion_of_the_start(scale: float) -> None:
    # At 2 to 4 tokens nearly every token brings new experts, so per_expert and per_token do the same to a step.
    truth = reference_cost(27.0, 0.635, 0.542, experts=288, top_k=8)
    gate, rng = InnovationGate(), np.random.default_rng(7)
    state = gate.init(reference_cost(27.0 * scale, 0.635 * scale, 0.542 * scale, experts=288, top_k=8))
    ms = {tokens: float(truth(step_of(tokens))) for tokens in (2.0, 3.0, 4.0)}
    state = taught(gate, state, [(t, ms[t]) for t in rng.integers(2, 5, 2000).astype(np.float64).tolist()])
    _, per_expert, _, per_token = (float(leaf) for leaf in jax.tree.leaves(state.belief.model))
    assert 1 / 1.25 < per_expert / 0.635 < 1.25
    assert 1 / 1.25 < per_token / 0.542 < 1.25


@pytest.mark.parametrize("scale", [0.1, 0.2, 0.5, 2.0, 5.0, 10.0])
def test_ten_clean_steps_of_one_kind_are_enough_on_any_hardware(scale: float) -> None:
    gate = InnovationGate()
    state = taught(gate, gate.init(dense_cost(20.0 * scale, 0.5 * scale)), [(4.0, 22.0)] * 10)
    assert predicted(state, 4.0) == pytest.approx(22.0, rel=0.05)


def test_a_forecasts_covariance_is_that_of_its_slopes_by_finite_differences() -> None:
    gate = InnovationGate()
    state = gate.init(reference_cost(27.0, 0.635, 0.542, experts=64, top_k=4))
    state = taught(gate, state, [(t, 25.0 + 1.5 * t) for t in [2.0, 4.0, 9.0] * 5])
    steps = StepFeatures(np.array([2.0, 5.0, 30.0]), np.ones(3))
    forecast = jax.jit(InnovationGate.forecast)(gate, state, steps)
    x = np.log([float(leaf) for leaf in jax.tree.leaves(state.belief.model)])

    def log_ms(x: np.ndarray) -> np.ndarray:
        base, per_expert, diversity, per_token = np.exp(x)
        tokens = np.asarray(steps.tokens)
        experts = 64 * (1 - (1 - 4 / 64) ** (diversity * tokens))
        return np.log(base + per_expert * experts + per_token * tokens)

    h = 1e-5
    slopes = np.stack([(log_ms(x + h * e) - log_ms(x - h * e)) / (2 * h) for e in np.eye(4)], axis=1)
    np.testing.assert_allclose(np.asarray(forecast.log_ms), log_ms(x), rtol=1e-12)
    np.testing.assert_allclose(
        np.asarray(forecast.covariance), slopes @ np.asarray(state.belief.covariance) @ slopes.T, rtol=1e-6
    )


def test_the_parameter_without_a_logarithm_is_named() -> None:
    with pytest.raises(ValueError, match=r"per_token must start above 0 .* given -1"):
        InnovationGate().init(dense_cost(10.0, -1.0))


def test_a_surprise_to_the_other_side_starts_the_run_anew() -> None:
    gate = InnovationGate()
    state = taught(gate, gate.init(dense_cost(20.0, 0.5)), [(4.0, 22.0)] * 30)
    # Three up, then one down, then three up: no four to one side.
    for ms, run in ((88.0, 1.0), (88.0, 2.0), (88.0, 3.0), (5.5, 1.0), (88.0, 1.0), (88.0, 2.0), (88.0, 3.0)):
        state = taught(gate, state, [(4.0, ms)])
        assert float(state.memory.run) == run
        assert float(state.memory.surprise) == np.sign(ms - 22.0)
    assert int(state.taught) == 30
    # A step that is none leaves four fifths of it.
    state = taught(gate, state, [(4.0, 22.0)])
    assert float(state.memory.run) == pytest.approx(2.4)
    assert int(state.taught) == 31
