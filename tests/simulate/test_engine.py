"""What policies see and when; and that runs are what they say, whatever runs beside them."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Int
from simulate.worlds import EXPERTS, RATES, SWITCHING, busy, steady

from akjax import (
    CompiledController,
    Controller,
    DraftOutcomes,
    StepMeasures,
    default_controller,
    reference_controller,
    reference_cost,
)
from akjax.simulate import (
    AbstractSimPolicy,
    ClosedLoop,
    Controlled,
    FixedLength,
    Lengths,
    Result,
    Scenario,
    StepTimes,
    Text,
    View,
    all_tokens,
    poisson_traffic,
    simulate,
    stacked,
)

SEEDS = np.arange(3)


class Probe(AbstractSimPolicy[Any]):
    """Writes down, step by step, what there is to see; its choice goes up and down with the steps."""

    steps: int = eqx.field(static=True)

    def init(self, scenario: Scenario) -> Any:
        each = jnp.zeros((self.steps, scenario.slots), jnp.int32)
        log = {name: each for name in ("row", "mode", "begins", "seen_row", "seen_mode", "drafted", "accepted")}
        log |= {name: jnp.zeros(self.steps) for name in ("ms", "teaches", "seen_drafting")}
        return jnp.zeros((), jnp.int32), log

    def decide(self, scenario: Scenario, state: Any, view: View) -> tuple[Any, Int[Array, ""], None]:
        step, log = state
        seen = view.outcome.observations
        now = {
            "row": view.row,
            "mode": view.mode,
            "begins": view.begins[view.row].astype(jnp.int32),
            "seen_row": seen.row,
            "seen_mode": seen.mode,
            "drafted": seen.drafted,
            "accepted": seen.accepted,
            "ms": view.outcome.ms,
            "teaches": view.outcome.teaches.astype(jnp.float64),
            "seen_drafting": view.outcome.step.drafting,
        }
        return (step + 1, {name: log[name].at[step].set(now[name]) for name in log}), step % 5, None

    def learned(self, state: Any) -> Any:
        return state[1]


def test_an_outcome_is_seen_two_steps_later_and_a_choice_verified_one_step_later() -> None:
    steps = 40
    result = simulate(steady(3), Probe(steps), SEEDS, max_steps=steps, traced=True)
    assert result.trace is not None
    log, record = result.learned, result.trace.step
    np.testing.assert_array_equal(log["ms"][:, 2:], np.asarray(record.ms)[:, :-2])
    assert np.all(log["ms"][:, :2] == 0.0)
    assert np.all(log["teaches"] == (np.arange(steps) >= 2))
    np.testing.assert_array_equal(log["drafted"][:, 2:].sum(-1), np.asarray(record.drafted)[:, :-2])
    np.testing.assert_array_equal(log["accepted"][:, 2:].sum(-1), np.asarray(record.accepted)[:, :-2])
    np.testing.assert_array_equal(log["seen_drafting"][0, 2:], np.arange(steps - 2) % 5)
    np.testing.assert_array_equal(np.asarray(record.drafted)[0, 1:], 3 * (np.arange(steps - 1) % 5))


def test_late_observations_do_not_hit_the_slots_next_request() -> None:
    # Each request is of one kind for good, so that an observation says whose it is.
    text = Text(RATES, starts=(0.4, 0.3, 0.3))
    traffic = ClosedLoop([[3]], Lengths(0.0), Lengths(2.0, 0.7))
    steps = 400
    log = simulate(steady(3, text=text, traffic=traffic), Probe(steps), SEEDS, max_steps=steps).learned
    observed = log["seen_row"] < 6
    is_own = observed & (log["seen_row"] == log["row"])
    is_late = observed & ~is_own
    assert np.all(log["seen_mode"][is_own] == log["mode"][is_own])
    assert is_late.sum() > 100
    assert np.any(log["seen_mode"][is_late] != log["mode"][is_late])
    begins = log["begins"] == 1
    assert begins.sum() > 300
    assert not np.any(is_own & begins)


def test_an_open_loop_serves_every_request_and_idles_between() -> None:
    traffic = poisson_traffic(2.0, 60, Lengths(80.0, 0.4), Lengths(6.0, 0.5), seed=1)
    scenario = busy(4, all_tokens(traffic), traffic=traffic)
    steps = 2000
    result = simulate(scenario, Probe(steps), SEEDS, max_steps=steps, traced=True)
    assert result.trace is not None
    assert result.finished.all()
    assert np.all(result.tokens == np.sum(traffic.output))
    assert np.all(result.ms > np.max(traffic.arrivals))
    for lane in range(len(SEEDS)):
        real = np.asarray(result.trace.real)[lane]
        record = jax.tree.map(lambda x, lane=lane, real=real: np.asarray(x)[lane][real], result.trace.step)
        idle = record.requests == 0
        assert idle.sum() > 5
        assert np.all(record.ms[idle] > 0.0)
        assert not record.tokens[idle].any()
        teaches = result.learned["teaches"][lane][: real.sum()]
        np.testing.assert_array_equal(teaches[2:], ~idle[:-2])
        # No idle step but one that ends at an arrival.
        ends = np.cumsum(record.ms)[idle]
        assert np.all(np.min(np.abs(ends[:, None] - np.asarray(traffic.arrivals)[None, :]), axis=1) < 1e-6)
        np.testing.assert_allclose(np.sum(record.ms * record.present), np.asarray(result.totals.request_ms)[lane])


class Recorded(AbstractSimPolicy[Any]):
    """A controlled policy that writes down what the controller is told and what it says."""

    policy: Controlled
    steps: int = eqx.field(static=True)

    def init(self, scenario: Scenario) -> Any:
        state = self.policy.init(scenario)
        view = _shapes_of_view(scenario)
        entry = jax.eval_shape(lambda state, view: self._entry(scenario, state, view)[1], state, view)
        return (
            jnp.zeros((), jnp.int32),
            state,
            jax.tree.map(lambda x: jnp.zeros((self.steps, *x.shape), x.dtype), entry),
        )

    def decide(self, scenario: Scenario, state: Any, view: View) -> Any:
        step, inner, log = state
        inner, entry = self._entry(scenario, inner, view)
        log = jax.tree.map(lambda kept, new: kept.at[step].set(new), log, entry)
        return (step + 1, inner, log), entry["k"], entry.get("each")

    def learned(self, state: Any) -> Any:
        return state[2]

    def _entry(self, scenario: Scenario, state: Any, view: View) -> Any:
        rows = eqx.tree_at(lambda r: r.made, state[1], state[1].made & ~view.begins[:, None])
        entry: Any = {
            "begins": view.begins,
            "outcome": self.policy.outcome(view),
            "batch": self.policy.batch(rows, view),
        }
        state, entry["k"], each = self.policy.decide(scenario, state, view)
        return state, entry if each is None else entry | {"each": each}


def _shapes_of_view(scenario: Scenario) -> Any:
    from akjax.simulate import world

    def make(seed: Any) -> View:
        start = world.init_world(scenario, seed)
        return world.view(scenario, *world.schedule(scenario, start, world.step_uniforms(scenario, start)))

    return jax.eval_shape(make, np.int64(0))


LEVELS: dict[str, Any] = {"draft_limit": 4, "levels": (1, 2, 4)}


@pytest.mark.parametrize(
    "controller",
    [
        reference_controller(**LEVELS),
        reference_controller(**LEVELS, code_mode="1"),
        reference_controller(**LEVELS, per_request=True),
        default_controller(draft_limit=4, levels=(0, 1, 2, 4)),
    ],
    ids=["reference", "code mode 1", "per request", "default"],
)
def test_the_controller_decides_as_when_it_serves(controller: Controller) -> None:
    steps = 250
    counts_unobserved = controller.policy.counts_unobserved
    policy = Controlled(controller, EXPERTS, counts_unobserved=counts_unobserved, prefill_teaches=counts_unobserved)
    text = Text(RATES, switching=SWITCHING, request_spread=0.5, starts=(0.5, 0.3, 0.2))
    # The default learns that tokens are dear, and so has reason to change; the reference's gate would shut that out.
    per_token = 5.0 if counts_unobserved else 0.542
    cost = reference_cost(27.0, 0.635, per_token, experts=64, top_k=4)
    times = StepTimes(cost, noise=0.05, spike_chance=0.02, spike_factor=5.0)
    scenario = busy(3, text=text, times=times)
    log = simulate(scenario, Recorded(policy, steps), SEEDS[:1], max_steps=steps).learned
    log = jax.tree.map(lambda x: x[0], log)

    serving = CompiledController(controller, EXPERTS, 3)
    ids = [f"row {row}" for row in range(6)]
    began = [0] * 6
    chosen = set()
    for t in range(steps):
        for row in np.flatnonzero(log["begins"][t]):
            serving.forget(ids[row])
            began[row] += 1
            ids[row] = f"row {row}, its request {began[row]}"
        outcome = jax.tree.map(lambda x, t=t: x[t], log["outcome"])
        seen = outcome.observations
        real = seen.row < 6
        outcomes = DraftOutcomes(
            [ids[row] for row in seen.row[real]],
            *(column[real].tolist() for column in (seen.drafted, seen.accepted, seen.mode)),
        )
        serving.observe(
            step=StepMeasures(*(int(x) for x in jax.tree.leaves(outcome.step))),
            ms=float(outcome.ms),
            teaches=bool(outcome.teaches),
            outcomes=outcomes,
        )
        batch = jax.tree.map(lambda x, t=t: x[t], log["batch"])
        rows = batch.row[batch.row < 6]
        assert counts_unobserved or all(serving.knows(ids[row]) for row in rows)
        modes = [int(mode) for mode in batch.mode[batch.row < 6]]
        lengths = serving.decide([ids[row] for row in rows], modes, int(batch.context))
        assert lengths.batch == log["k"][t], t
        if lengths.each is not None:
            np.testing.assert_array_equal(log["each"][t][batch.row < 6], lengths.each)
            assert np.all(log["each"][t][batch.row == 6] == lengths.batch)
        chosen.add(lengths.batch)
    assert len(chosen) > 1
    assert serving.settle().cost.taught > 50


def test_the_batch_may_have_requests_that_were_never_observed() -> None:
    controller = reference_controller(**LEVELS)
    steps = 60
    counts = []
    for counts_unobserved in (False, True):
        policy = Controlled(controller, EXPERTS, counts_unobserved=counts_unobserved)
        log = simulate(busy(3), Recorded(policy, steps), SEEDS[:1], max_steps=steps).learned
        counts.append((log["batch"].row[0] < 6).sum(-1))
    assert counts[0][:3].tolist() == [0, 0, 0]
    assert counts[1][0] == 3
    assert counts[1].mean() > counts[0].mean()


def test_steps_with_prompts_teach_if_they_may() -> None:
    controller = reference_controller(**LEVELS)
    taught = []
    for prefill_teaches in (False, True):
        policy = Controlled(controller, EXPERTS, prefill_teaches=prefill_teaches)
        scenario = busy(3, times=StepTimes(EXPERTS))
        taught.append(simulate(scenario, policy, SEEDS, max_steps=100).learned.cost.taught)
    assert np.all(taught[1] == 98)
    assert np.all(taught[0] < 90)


CONTROLLED = Controlled(reference_controller(**LEVELS), EXPERTS)


def equal(one: Result, other: Result) -> None:
    """Up to rounding: a run of other lanes is compiled anew."""

    def compare(a: np.ndarray, b: np.ndarray) -> None:
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-11 if a.dtype == np.float64 else 0.0)

    jax.tree.map(compare, one, other)


@pytest.mark.parametrize("policy", [FixedLength(2), CONTROLLED], ids=lambda p: type(p).__name__)
def test_a_seed_says_everything_and_steps_after_the_end_change_nothing(policy: AbstractSimPolicy) -> None:
    scenario = busy(3, 300.0)
    result = simulate(scenario, policy, SEEDS, max_steps=400)
    assert result.finished.all()
    assert len(set(result.ms)) == 3
    equal(result, simulate(scenario, policy, SEEDS, max_steps=400))
    equal(result, simulate(scenario, policy, SEEDS, max_steps=400, threads=3))
    traced = simulate(scenario, policy, SEEDS, max_steps=400, traced=True)
    assert traced.trace is not None
    assert np.all(np.asarray(traced.trace.real).sum(-1) == result.steps)
    equal(result, dataclasses.replace(traced, trace=None))
    alone = [simulate(scenario, policy, SEEDS[i : i + 1], max_steps=int(result.steps[i])) for i in range(3)]
    equal(result, jax.tree.map(lambda *leaves: np.concatenate(leaves), *alone))


def test_a_run_given_up_is_valid_as_far_as_it_got() -> None:
    result = simulate(busy(3, 300.0), FixedLength(2), SEEDS, max_steps=10)
    assert not result.finished.any()
    assert np.all(result.steps == 10)
    assert np.all((result.tokens > 0) & (result.tokens < 300))


def test_stacked_policies_and_scenarios_are_those_run_alone() -> None:
    scenarios = [busy(2, 200.0), busy(2, 300.0, times=StepTimes(EXPERTS, noise=0.3))]
    policies = [FixedLength(1), FixedLength(4)]
    both: Any = jax.tree.map(lambda *leaves: np.stack(leaves), *scenarios)
    result: Result = simulate(
        both, stacked(policies), SEEDS, max_steps=300, stacked_policies=True, stacked_scenarios=True, threads=2
    )
    assert result.tokens.shape == (2, 2, 3)
    for i, scenario in enumerate(scenarios):
        for j, policy in enumerate(policies):
            alone = simulate(scenario, policy, SEEDS, max_steps=300)
            jax.tree.map(np.testing.assert_allclose, jax.tree.map(lambda x, i=i, j=j: x[i, j], result), alone)


def test_totals_count_lengths_and_switches() -> None:
    steps = 40
    result = simulate(steady(2), Probe(steps), SEEDS[:1], max_steps=steps)
    assert np.asarray(result.totals.length_counts)[0].tolist() == [8] * 5
    assert np.asarray(result.totals.switches)[0] == steps - 1
    np.testing.assert_allclose(result.mean_length, 2.0)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="3 rows"):
        Text(RATES[:2])
    with pytest.raises(ValueError, match="at least 1 slot"):
        ClosedLoop([[0, 3]], Lengths(1.0), Lengths(1.0))
