"""Runs of the world: many seeds, policies and scenarios of one form in one compiled loop."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from akjax.arrays import Array
from akjax.simulate.policies import AbstractSimPolicy
from akjax.simulate.scenario import Scenario
from akjax.simulate.world import StepRecord, World, execute, init_world, schedule, step_uniforms, view


class Totals(eqx.Module):
    """What a run adds up to.

    Attributes:
        request_ms: the sum over steps of ms times requests present.
        busy_steps: steps with requests.
        drafted: drafts verified.
        accepted: of them.
        length_counts: how many steps with requests chose each draft length, 0 to K.
        switches: how often the choice was not the one before.
        draft_length: the last choice; -1 before the first.
    """

    request_ms: Float[Array, "*lanes"]
    busy_steps: Int[Array, "*lanes"]
    drafted: Int[Array, "*lanes"]
    accepted: Int[Array, "*lanes"]
    length_counts: Int[Array, "*lanes levels"]
    switches: Int[Array, "*lanes"]
    draft_length: Int[Array, "*lanes"]


class Trace(eqx.Module):
    """Each step of a run, along the last axis.

    Attributes:
        real: whether the run still went on; what is not real means nothing.
        draft_length: chosen in the step for the next one.
        step: what happened.
    """

    real: Bool[Array, "..."]
    draft_length: Int[Array, "..."]
    step: StepRecord


class Result(eqx.Module):
    """What runs came to; lanes are scenarios, policies (both if stacked) and seeds.

    Attributes:
        tokens: generated.
        ms: that the run took.
        steps: of it, idle ones included.
        finished: whether the work was done; if not, the run is valid as far as it got.
        totals: what its steps add up to.
        learned: what the policy says that it learned.
        trace: each step, if asked for.
    """

    tokens: Float[np.ndarray, "*lanes"]
    ms: Float[np.ndarray, "*lanes"]
    steps: Int[np.ndarray, "*lanes"]
    finished: Bool[np.ndarray, "*lanes"]
    totals: Totals
    learned: Any
    trace: Trace | None

    @property
    def tokens_per_ms(self) -> Float[np.ndarray, "*lanes"]:
        """The score of a closed loop."""
        return self.tokens / self.ms

    @property
    def tokens_per_request_ms(self) -> Float[np.ndarray, "*lanes"]:
        """The score of an open loop: the inverse of the time that a request waits for a token."""
        return self.tokens / np.asarray(self.totals.request_ms)

    @property
    def mean_length(self) -> Float[np.ndarray, "*lanes"]:
        """The mean choice over the steps with requests."""
        counts = np.asarray(self.totals.length_counts)
        return counts @ np.arange(counts.shape[-1]) / counts.sum(-1)


class Lane(eqx.Module):
    """One run in progress."""

    world: World
    policy: Any
    totals: Totals


def simulate(
    scenario: Scenario,
    policy: AbstractSimPolicy,
    seeds: Int[np.ndarray, " seeds"],
    *,
    max_steps: int,
    stacked_policies: bool = False,
    stacked_scenarios: bool = False,
    traced: bool = False,
    threads: int = 1,
) -> Result:
    """Runs the policy in the scenario once for each seed.

    Compiles once for each form of scenario and policy and number of seeds, and if traced for each `max_steps`; other
    numbers are data.

    Args:
        scenario: what is true.
        policy: what chooses.
        seeds: of the runs. A seed sends the same requests to every policy.
        max_steps: after which a run is given up.
        stacked_policies: whether the policy's leaves have a leading axis, a policy each.
        stacked_scenarios: whether the scenario's have one, a scenario each.
        traced: whether to keep each step. Then all `max_steps` are run, else as many as the longest run takes.
        threads: in which the seeds are shared out; a compiled run uses one core. Best if it divides the seeds.

    Returns:
        The runs, of shape [scenarios] [policies] seeds, the bracketed axes where stacked.
    """
    cpu = jax.local_devices(backend="cpu")[0]
    with jax.enable_x64(True), jax.default_device(cpu):
        state = _initial(scenario, policy, stacked_policies)

    def run(part: Int[np.ndarray, " part"], max_steps: int = max_steps) -> Result:
        traced_steps = max_steps if traced else None
        with jax.enable_x64(True), jax.default_device(cpu):
            limit = np.asarray(max_steps, np.int32)
            lanes, trace = _run(scenario, policy, state, part, limit, traced_steps, stacked_policies, stacked_scenarios)
            return jax.tree.map(np.asarray, _result(scenario, policy, lanes, trace, stacked_scenarios))

    parts = np.array_split(seeds.astype(np.int64), max(1, min(threads, len(seeds))))
    if len(parts) == 1:
        return run(parts[0])
    if not traced:
        # Compiles, lest each thread does.
        run(parts[0], max_steps=0)
    with ThreadPoolExecutor(len(parts)) as pool:
        results = list(pool.map(run, parts))
    axis = stacked_policies + stacked_scenarios
    return jax.tree.map(lambda *leaves: np.concatenate(leaves, axis), *results)


@partial(jax.jit, static_argnums=(5, 6, 7))
def _run(
    scenario: Scenario,
    policy: AbstractSimPolicy,
    state: Any,
    seeds: Int[Array, " seeds"],
    max_steps: Int[Array, ""],
    traced_steps: int | None,
    stacked_policies: bool,
    stacked_scenarios: bool,
) -> tuple[Lane, Trace | None]:
    def nested(function: Any, last_is_stacked: bool) -> Any:
        """`function` of a scenario, a policy or its state, and a seed or lane, over all lanes."""
        function = jax.vmap(function, (None, None, 0))
        last = 0 if last_is_stacked else None
        if stacked_policies:
            # A state may be empty, and then does not say how many there are.
            count = len(jax.tree.leaves(policy)[0])
            function = jax.vmap(function, (None, 0, last), axis_size=count)
        if stacked_scenarios:
            function = jax.vmap(function, (0, None, last))
        return function

    lanes = nested(_init_lane, False)(scenario, state, seeds)
    step = nested(_step_lane, True)
    if traced_steps is not None:

        def scanned(lanes: Lane, _: None) -> tuple[Lane, Trace]:
            return step(scenario, policy, lanes)

        lanes, trace = jax.lax.scan(scanned, lanes, None, length=traced_steps)
        return lanes, jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, -1), trace)

    def goes_on(carry: tuple[Int[Array, ""], Lane]) -> Bool[Array, ""]:
        count, lanes = carry
        work = scenario.work_tokens
        if stacked_scenarios:
            work = work.reshape(work.shape + (1,) * (lanes.world.tokens.ndim - 1))
        return (count < max_steps) & jnp.any(lanes.world.tokens < work)

    def body(carry: tuple[Int[Array, ""], Lane]) -> tuple[Int[Array, ""], Lane]:
        count, lanes = carry
        return count + 1, step(scenario, policy, lanes)[0]

    _, lanes = jax.lax.while_loop(goes_on, body, (jnp.zeros((), jnp.int32), lanes))
    return lanes, None


def _initial(scenario: Scenario, policy: AbstractSimPolicy, stacked_policies: bool) -> Any:
    """The policy's first state, or those of stacked policies; not compiled, since learners look at their priors."""
    if not stacked_policies:
        return policy.init(scenario)
    leaves, form = jax.tree.flatten(policy)
    states = [policy.init(scenario) for policy in (form.unflatten(each) for each in zip(*leaves, strict=True))]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


def _init_lane(scenario: Scenario, state: Any, seed: Int[Array, ""]) -> Lane:
    zero = jnp.zeros((), jnp.int32)
    totals = Totals(
        request_ms=jnp.zeros(()),
        busy_steps=zero,
        drafted=zero,
        accepted=zero,
        length_counts=jnp.zeros(scenario.draft_limit + 1, jnp.int32),
        switches=zero,
        draft_length=zero - 1,
    )
    # A carry must keep its dtypes, and NumPy's leaves and weak types would not.
    state = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.asarray(leaf).dtype), state)
    return Lane(init_world(scenario, seed), state, totals)


def _step_lane(scenario: Scenario, policy: AbstractSimPolicy, lane: Lane) -> tuple[Lane, Trace]:
    goes_on = lane.world.tokens < scenario.work_tokens
    uniform = step_uniforms(scenario, lane.world)
    world, plan = schedule(scenario, lane.world, uniform)
    state, draft_length, per_request = policy.decide(scenario, lane.policy, view(scenario, world, plan))
    world, record = execute(scenario, world, plan, draft_length, per_request, uniform)
    after = Lane(world, state, _added(lane.totals, record, draft_length))
    after = jax.tree.map(lambda new, old: jnp.where(goes_on, new, old), after, lane)
    return after, Trace(goes_on, draft_length, record)


def _added(totals: Totals, record: StepRecord, draft_length: Int[Array, ""]) -> Totals:
    busy = record.requests > 0
    levels = jnp.arange(totals.length_counts.shape[0], dtype=jnp.int32)
    changed = busy & (totals.draft_length >= 0) & (draft_length != totals.draft_length)
    return Totals(
        request_ms=totals.request_ms + record.ms * record.present.astype(jnp.float64),
        busy_steps=totals.busy_steps + busy.astype(jnp.int32),
        drafted=totals.drafted + record.drafted,
        accepted=totals.accepted + record.accepted,
        length_counts=totals.length_counts + (busy & (levels == draft_length)).astype(jnp.int32),
        switches=totals.switches + changed.astype(jnp.int32),
        draft_length=jnp.where(busy, draft_length, totals.draft_length),
    )


def _result(
    scenario: Scenario, policy: AbstractSimPolicy, lanes: Lane, trace: Trace | None, stacked_scenarios: bool
) -> Result:
    tokens = np.asarray(lanes.world.tokens)
    work = np.asarray(scenario.work_tokens)
    if stacked_scenarios:
        work = work.reshape(work.shape + (1,) * (tokens.ndim - 1))
    return Result(
        tokens=tokens,
        ms=np.asarray(lanes.world.clock),
        steps=np.asarray(lanes.world.step),
        finished=tokens >= work,
        totals=lanes.totals,
        learned=policy.learned(lanes.policy),
        trace=trace,
    )
