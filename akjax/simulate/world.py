"""An engine with two steps in flight: what it schedules, what then happens, and when anyone hears of it."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, PRNGKeyArray

from akjax.arrays import Array
from akjax.controller import Observations, Outcome
from akjax.features import StepFeatures
from akjax.simulate.draws import uniforms
from akjax.simulate.scenario import Scenario
from akjax.simulate.text import accepted_drafts


class Slots(eqx.Module):
    """The requests that run, one a slot.

    Attributes:
        busy: whether the slot has a request.
        generation: 0 or 1, other than the slot's last request's. A request's row is slot + generation * N, so what
            is heard late of one request does not meet the next.
        prompt_left: tokens of the prompt not yet taken in.
        output_left: tokens still to generate.
        context: tokens so far.
        kind: of the text now.
        kind_read: of the text as far as the scheduler has read it: before the last step's output.
        effect: the request's own, on the logit of acceptance.
        stale: added to the logit since a step without drafts.
        drafts: that its next step will verify.
    """

    busy: Bool[Array, " n"]
    generation: Int[Array, " n"]
    prompt_left: Int[Array, " n"]
    output_left: Int[Array, " n"]
    context: Int[Array, " n"]
    kind: Int[Array, " n"]
    kind_read: Int[Array, " n"]
    effect: Float[Array, " n"]
    stale: Float[Array, " n"]
    drafts: Int[Array, " n"]


class Requests(eqx.Module):
    """All that will be sent in the run; request i is at i modulo r.

    Attributes:
        sizes: prompt tokens, output tokens and kind at the start of each.
        effect: of each on the logit of acceptance.
    """

    sizes: Int[Array, "r 3"]
    effect: Float[Array, " r"]


class World(eqx.Module):
    """The engine between two steps.

    Attributes:
        key: of the run's random numbers.
        step: steps so far, idle ones included.
        clock: ms since the start.
        tokens: generated so far.
        started: requests so far.
        slots: the requests that run.
        requests: all that will be sent.
        in_flight: the last two steps' outcomes, the older one first.
    """

    key: PRNGKeyArray
    step: Int[Array, ""]
    clock: Float[Array, ""]
    tokens: Float[Array, ""]
    started: Int[Array, ""]
    slots: Slots
    requests: Requests
    in_flight: tuple[Outcome, Outcome]


class Truth(eqx.Module):
    """What only an oracle sees of the requests that decode in the next step.

    Attributes:
        rates: P(draft i accepted | draft i-1 accepted) of each slot, as of now, and as if it had had drafts all along.
        context: KV tokens that the next step will read at least.
    """

    rates: Float[Array, "n K"]
    context: Float[Array, ""]


class View(eqx.Module):
    """What there is to see when a step has been scheduled.

    Attributes:
        outcome: of the step before the last one; the last one still runs.
        row: of each slot's request.
        begins: rows of the requests that start in this step.
        decoding: whether the slot's request verifies in this step.
        decodes_next: whether it can in the next: it decodes, or its prompt ends in this step.
        mode: of its text, as far as it has been read.
        requests: in this step.
        context: KV tokens that this step reads.
        truth: for an oracle.
    """

    outcome: Outcome
    row: Int[Array, " n"]
    begins: Bool[Array, " rows"]
    decoding: Bool[Array, " n"]
    decodes_next: Bool[Array, " n"]
    mode: Int[Array, " n"]
    requests: Int[Array, ""]
    context: Float[Array, ""]
    truth: Truth


class Schedule(eqx.Module):
    """Who is in a step.

    Attributes:
        scheduled: slots whose request is in the step.
        starts: slots whose request is new.
        decoding: slots that verify.
        prompt: prompt tokens of each slot that the step takes in.
        ends_prompt: slots whose prompt ends in the step, which yields their first token.
        waiting: requests that are present and have no slot.
    """

    scheduled: Bool[Array, " n"]
    starts: Bool[Array, " n"]
    decoding: Bool[Array, " n"]
    prompt: Int[Array, " n"]
    ends_prompt: Bool[Array, " n"]
    waiting: Int[Array, ""]


class StepRecord(eqx.Module):
    """What a step did.

    Attributes:
        ms: that it took; an idle step lasts until the next request.
        tokens: generated.
        requests: in the step; 0 if it was idle.
        present: requests that ran or waited.
        drafted: drafts verified, of all requests.
        accepted: of them.
    """

    ms: Float[Array, ""]
    tokens: Int[Array, ""]
    requests: Int[Array, ""]
    present: Int[Array, ""]
    drafted: Int[Array, ""]
    accepted: Int[Array, ""]


def init_world(scenario: Scenario, seed: Int[Array, ""]) -> World:
    """The world before its first step. One seed sends the same requests whatever the policy."""
    key, key_lengths, key_effects, key_kinds = jax.random.split(jax.random.key(seed), 4)
    prompt, output = scenario.traffic.lengths(key_lengths)
    effect = scenario.text.request_spread * jax.random.normal(key_effects, prompt.shape, jnp.float32)
    kind_uniform = jax.random.uniform(key_kinds, prompt.shape, jnp.float32)
    kind = jnp.sum(jnp.cumsum(scenario.text.starts)[None, :-1] <= kind_uniform[:, None], axis=1, dtype=jnp.int32)

    count = jnp.zeros(scenario.slots, jnp.int32)
    real = jnp.zeros(scenario.slots, jnp.float32)
    nothing = Outcome(
        step=_features(*(jnp.zeros((), jnp.int32),) * 6),
        ms=jnp.zeros(()),
        teaches=jnp.zeros((), bool),
        observations=Observations(
            row=jnp.full_like(count, 2 * scenario.slots), drafted=count, accepted=count, mode=count
        ),
    )
    return World(
        key=key,
        step=jnp.zeros((), jnp.int32),
        clock=jnp.zeros(()),
        tokens=jnp.zeros(()),
        started=jnp.zeros((), jnp.int32),
        slots=Slots(
            busy=jnp.zeros(scenario.slots, bool),
            generation=count,
            prompt_left=count,
            output_left=count,
            context=count,
            kind=count,
            kind_read=count,
            effect=real,
            stale=real,
            drafts=count,
        ),
        requests=Requests(sizes=jnp.stack([prompt, output, kind], axis=1), effect=effect),
        in_flight=(nothing, nothing),
    )


def step_uniforms(scenario: Scenario, world: World) -> Float[Array, " u"]:
    """The step's random numbers: a few of its own, then those of its slots."""
    of_each = 3 if scenario.drafter.uneven_drafts else 2
    return uniforms(world.key, world.step, 3 + of_each * scenario.slots)


def schedule(scenario: Scenario, world: World, uniform: Float[Array, " u"]) -> tuple[World, Schedule]:
    """Lets requests start where slots are free, and shares the step's prompt tokens among them by slot."""
    slots, traffic = world.slots, scenario.traffic
    progress = world.tokens / scenario.work_tokens
    is_open = jnp.arange(scenario.slots, dtype=jnp.int32) < traffic.open_slots(scenario.slots, progress, uniform[0])
    free = is_open & ~slots.busy
    number = world.started + jnp.cumsum(free, dtype=jnp.int32) - 1
    starts = free & (number < world.started + traffic.arrived(world.started, world.clock))
    chosen = number % world.requests.effect.shape[0]
    sizes = world.requests.sizes[chosen]
    zero, kind = jnp.zeros_like(slots.context), sizes[:, 2]
    fresh = Slots(
        busy=jnp.ones_like(slots.busy),
        generation=1 - slots.generation,
        prompt_left=sizes[:, 0],
        output_left=sizes[:, 1],
        context=zero,
        kind=kind,
        kind_read=kind,
        effect=world.requests.effect[chosen],
        stale=jnp.zeros_like(slots.stale),
        drafts=zero,
    )
    slots = jax.tree.map(lambda new, old: jnp.where(starts, new, old), fresh, slots)
    started = world.started + jnp.sum(starts, dtype=jnp.int32)

    runs = is_open & slots.busy
    left = jnp.where(runs, slots.prompt_left, 0)
    prompt = jnp.clip(scenario.prompt_chunk - (jnp.cumsum(left, dtype=jnp.int32) - left), 0, left)
    decoding = runs & (slots.prompt_left == 0)
    world = eqx.tree_at(lambda w: (w.slots, w.started), world, (slots, started))
    return world, Schedule(
        scheduled=decoding | (prompt > 0),
        starts=starts,
        decoding=decoding,
        prompt=prompt,
        ends_prompt=(prompt > 0) & (prompt == slots.prompt_left),
        waiting=traffic.queued(started, world.clock),
    )


def view(scenario: Scenario, world: World, plan: Schedule) -> View:
    """What policies see: the outcome of two steps ago beside the batch of now."""
    slots = world.slots
    step = _step_features(slots, plan, jnp.zeros((), jnp.int32))
    factor, _ = scenario.windows.factors(world.tokens / scenario.work_tokens)
    row = _rows(slots)
    return View(
        outcome=world.in_flight[0],
        row=row,
        begins=jnp.concatenate([plan.starts & (slots.generation == 0), plan.starts & (slots.generation == 1)]),
        decoding=plan.decoding,
        decodes_next=plan.decoding | plan.ends_prompt,
        mode=slots.kind_read,
        requests=jnp.sum(plan.scheduled, dtype=jnp.int32),
        context=step.context,
        truth=Truth(
            rates=scenario.text.conditional_rates(slots.kind, slots.effect, slots.context, factor),
            context=step.context + step.prefill,
        ),
    )


def execute(
    scenario: Scenario,
    world: World,
    plan: Schedule,
    draft_length: Int[Array, ""],
    per_request: Int[Array, " n"] | None,
    uniform: Float[Array, " u"],
) -> tuple[World, StepRecord]:
    """Runs the step: verifies the drafts made in the last one, and makes those that the next one verifies.

    Args:
        scenario: what is true.
        world: with the step scheduled.
        plan: who is in the step.
        draft_length: drafts that each request gets for its next step; what the drafter costs goes by it.
        per_request: of each slot, if they differ.
        uniform: the step's random numbers.
    """
    slots, n = world.slots, scenario.slots
    progress = world.tokens / scenario.work_tokens
    acceptance_factor, time_factor = scenario.windows.factors(progress)
    step = _step_features(slots, plan, draft_length)
    is_idle = ~jnp.any(plan.scheduled)
    ms = jnp.where(
        is_idle,
        jnp.maximum(scenario.traffic.next_arrival(world.started) - world.clock, 0.0),
        scenario.times.ms(step, progress, time_factor, uniform[1:3]),
    )

    rates = scenario.text.conditional_rates(slots.kind, slots.effect + slots.stale, slots.context, acceptance_factor)
    drafted = jnp.where(plan.decoding, slots.drafts, 0)
    accepted = accepted_drafts(rates, drafted, uniform[3 : 3 + n])
    yielded = jnp.where(plan.decoding, 1 + accepted, plan.ends_prompt.astype(jnp.int32))
    yielded = jnp.minimum(yielded, slots.output_left)

    outcome = Outcome(
        step=step,
        ms=ms,
        teaches=~is_idle,
        observations=Observations(
            row=jnp.where(drafted > 0, _rows(slots), 2 * n), drafted=drafted, accepted=accepted, mode=slots.kind
        ),
    )
    asked = jnp.broadcast_to(draft_length, n) if per_request is None else per_request
    output_left = slots.output_left - yielded
    after = Slots(
        busy=slots.busy & (output_left > 0),
        generation=slots.generation,
        prompt_left=slots.prompt_left - plan.prompt,
        output_left=output_left,
        context=slots.context + plan.prompt + yielded,
        kind=scenario.text.next_kind(slots.kind, yielded, uniform[3 + n : 3 + 2 * n]),
        kind_read=slots.kind,
        effect=slots.effect,
        stale=jnp.where(plan.decoding, scenario.drafter.staleness(slots.stale, drafted), slots.stale),
        # The slots' last numbers are of the lists, if the drafter makes any; else it reads none.
        drafts=jnp.where(plan.scheduled, scenario.drafter.drafts(asked, uniform[-n:]), slots.drafts),
    )
    generated = jnp.sum(yielded, dtype=jnp.int32)
    record = StepRecord(
        ms=ms,
        tokens=generated,
        requests=jnp.sum(plan.scheduled, dtype=jnp.int32),
        present=jnp.sum(slots.busy, dtype=jnp.int32) + plan.waiting,
        drafted=jnp.sum(drafted, dtype=jnp.int32),
        accepted=jnp.sum(accepted, dtype=jnp.int32),
    )
    return (
        World(
            key=world.key,
            step=world.step + 1,
            clock=world.clock + ms,
            tokens=world.tokens + generated.astype(jnp.float64),
            started=world.started,
            slots=after,
            requests=world.requests,
            in_flight=(world.in_flight[1], outcome),
        ),
        record,
    )


def _rows(slots: Slots) -> Int[Array, " n"]:
    count = slots.busy.shape[0]
    return jnp.arange(count, dtype=jnp.int32) + count * slots.generation


def _step_features(slots: Slots, plan: Schedule, drafting: Int[Array, ""]) -> StepFeatures:
    drafts = jnp.where(plan.decoding, slots.drafts, 0)
    least = jnp.min(jnp.where(plan.decoding, slots.drafts, 1 << 20))
    requests = jnp.sum(plan.scheduled, dtype=jnp.int32)
    return _features(
        requests + jnp.sum(drafts, dtype=jnp.int32),
        requests,
        drafting,
        jnp.sum(jnp.where(plan.scheduled, slots.context, 0), dtype=jnp.int32),
        jnp.sum(plan.prompt, dtype=jnp.int32),
        (jnp.max(drafts) > least).astype(jnp.int32),
    )


def _features(
    tokens: Int[Array, ""],
    requests: Int[Array, ""],
    drafting: Int[Array, ""],
    context: Int[Array, ""],
    prefill: Int[Array, ""],
    uneven: Int[Array, ""],
) -> StepFeatures:
    real = [x.astype(jnp.float64) for x in (tokens, requests, drafting, context, prefill, uneven)]
    tokens_, requests_, drafting_, context_, prefill_, uneven_ = real
    return StepFeatures(
        tokens=tokens_,
        requests=requests_,
        drafting=drafting_,
        context=context_,
        prefill=prefill_,
        uneven=uneven_,
    )
