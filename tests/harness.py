"""Drive vLLM's real v1 scheduler without an engine, a model or a GPU.

The scheduler under test is vLLM's own class or a subclass, built from a real `VllmConfig`. What surrounds
it is replaced: `FakeEngine` turns the loop of vLLM's `EngineCore`, and `World` stands for the workers. It
decides how many drafts are accepted, and it tracks what a model runner tracks, so that a scheduler which
loses count of tokens is caught at the step where it does.

Outputs cannot depend on how many drafts are asked for: the token at each output position of a request is a
pure function of the request and the position. Acceptance decides only how many of them one step yields.

A structured output is vLLM's own but for its grammar, which lets every sampled token pass and as many drafts as the
test says. A KV connector is not there, only its news that blocks failed to load.

Not covered: multi-modal inputs, pooling and LoRA.
"""

import json
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, Literal
from unittest.mock import patch

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

VOCAB_SIZE = 512

Accept = Callable[[str, int, Random], int]
"""(request id, drafts to verify, the request's own generator) -> how many of them are accepted."""

Token = Callable[[str, int], int]
"""(request id, output position) -> the one token that belongs there."""

DraftsGiven = Callable[[str, int], int]
"""(request id, drafts asked for) -> how many the drafter gives."""

Allows = Callable[[str, int], int]
"""(request id, drafts proposed) -> how many of them the request's grammar lets stand."""

StepMs = Callable[[SchedulerOutput], float]
"""A scheduled step -> the milliseconds for which the model runs it."""


def make_config(
    *,
    num_speculative_tokens: int | None = 4,
    schedule: Sequence[tuple[int, int, int]] | None = None,
    method: Literal["draft_model", "ngram"] = "draft_model",
    async_scheduling: bool = True,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 1024,
    max_model_len: int = 1024,
    block_size: int = 16,
    num_experts: int = 8,
    num_experts_per_tok: int = 2,
    model_overrides: Mapping[str, Any] | None = None,
    additional_config: Mapping[str, Any] | None = None,
    enable_prefix_caching: bool = False,
    tokenizer: str | None = None,
    **engine_args: Any,
) -> VllmConfig:
    """A config as vLLM itself makes it, for a tiny Qwen3 model that exists only as a config.json.

    Args:
        num_speculative_tokens: the most drafts per request and step; None turns speculation off.
        schedule: vLLM's dynamic schedule, as (first batch size, last batch size, drafts).
        method: vLLM allows async scheduling with "draft_model", which reserves KV slots for the drafts and
            one more input slot per request. "ngram" reserves nothing; vLLM itself never runs it async.
        async_scheduling: set after vLLM has made the config, since its CPU platform always turns it off.
        max_num_seqs, max_num_batched_tokens, max_model_len, block_size, enable_prefix_caching: as in vLLM,
            except that prefix caching is off unless asked for.
        num_experts: 0 makes the model dense.
        num_experts_per_tok: experts that each token visits.
        model_overrides: any other fields of the model's config.json.
        additional_config: handed to `VllmConfig.additional_config`.
        tokenizer: a folder with one, for schedulers that look at it.
        engine_args: any other arguments of `EngineArgs`.
    """
    with TemporaryDirectory() as folder:
        target = _write_model(Path(folder, "target"), num_experts, num_experts_per_tok, model_overrides or {})
        speculation: dict[str, Any] | None = None
        if num_speculative_tokens is not None:
            speculation = {"method": method, "num_speculative_tokens": num_speculative_tokens}
            if method == "draft_model":
                speculation["model"] = _write_model(Path(folder, "draft"), 0, 0, {})
            if schedule is not None:
                speculation["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in schedule]
        config = EngineArgs(
            model=target,
            tokenizer=tokenizer,
            skip_tokenizer_init=tokenizer is None,
            enforce_eager=True,
            speculative_config=speculation,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            additional_config=dict(additional_config or {}),
            **engine_args,
        ).create_engine_config()
    config.scheduler_config.async_scheduling = async_scheduling
    return config


def _write_model(folder: Path, num_experts: int, num_experts_per_tok: int, overrides: Mapping[str, Any]) -> str:
    model: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 1 << 20,
        "torch_dtype": "bfloat16",
    }
    if num_experts:
        model |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": 32,
            "num_experts": num_experts,
            "num_experts_per_tok": num_experts_per_tok,
        }
    folder.mkdir()
    Path(folder, "config.json").write_text(json.dumps(model | dict(overrides)))
    return str(folder)


def bernoulli(probabilities: Sequence[float]) -> Accept:
    """Accept the draft at each place with its own probability, up to the first that fails.

    Places beyond the given ones use the last probability.
    """

    def accept(request_id: str, drafts: int, rng: Random) -> int:
        for place in range(drafts):
            if rng.random() >= probabilities[min(place, len(probabilities) - 1)]:
                return place
        return drafts

    return accept


DEFAULT_ACCEPT = bernoulli((0.8, 0.7, 0.6, 0.5))


def hashed_token(request_id: str, position: int) -> int:
    """A continuation that looks random, the same in every process."""
    return zlib.crc32(f"{request_id}/{position}".encode()) % VOCAB_SIZE


@dataclass
class Clock:
    """Seconds that pass only while a step runs (or when a test sets `now`), for code that reads a clock."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Execution:
    """What the model made of one scheduled step.

    `drafted` counts the scheduled drafts of each request that had any, `accepted` those that held, and
    `blank` those that were no drafts when they were verified: vLLM's padding of new decodes, a drafter that gave
    fewer than were scheduled, or what a grammar cut. Blank drafts are always rejected.
    """

    output: ModelRunnerOutput
    drafts: DraftTokenIds
    drafted: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    blank: dict[str, int] = field(default_factory=dict)

    def rejected(self, request_id: str) -> int:
        """Drafts of the request that this step rejected."""
        return self.drafted.get(request_id, 0) - self.accepted.get(request_id, 0)


@dataclass
class _Row:
    """A request as the model runner knows it: exact, where an async scheduler's counts are hopes."""

    prompt: int
    tokens: int
    computed: int
    proposed: int = 0


class World:
    """The fake model runner: turns scheduled steps into outputs, in the order of their scheduling.

    Attributes:
        recomputes: requests of which the scheduler threw an output away, since what it was computed from was not
            there: they go on from where the scheduler has them.
    """

    def __init__(self, accept: Accept, token: Token, drafts_given: DraftsGiven, seed: int) -> None:
        self.accept = accept
        self.token = token
        self.drafts_given = drafts_given
        self.seed = seed
        self.recomputes: set[str] = set()
        self._rows: dict[str, _Row] = {}
        self._rngs: dict[str, Random] = {}

    def prepare(self, step: SchedulerOutput, in_flight: Iterable[Execution] = ()) -> None:
        """Take in who is in a step that was just scheduled, and how far they are.

        `in_flight` are the executions that the scheduler has not seen: its counts still include their
        rejected drafts, which is the only way in which they may differ from the truth.
        """
        in_flight = tuple(in_flight)
        for request_id in step.finished_req_ids:
            self._rows.pop(request_id, None)
            self._rngs.pop(request_id, None)
            self.recomputes.discard(request_id)
        for new in step.scheduled_new_reqs:
            # vLLM's second model runner gets resumed requests as new ones, with their output so far.
            known = new.prefill_token_ids or new.prompt_token_ids or ()
            self._rows[new.req_id] = _Row(new.prompt_len, len(known), new.num_computed_tokens)
            self.recomputes.discard(new.req_id)
        cached = step.scheduled_cached_reqs
        for request_id, computed, outputs in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            row = self._rows[request_id]
            if request_id in cached.resumed_req_ids or request_id in self.recomputes:
                self.recomputes.discard(request_id)
                self._rows[request_id] = _Row(row.prompt, row.prompt + outputs, computed)
                continue
            unseen = sum(execution.rejected(request_id) for execution in in_flight)
            assert computed == row.computed + unseen, (
                f"{request_id}: the scheduler counts {computed} computed tokens and has yet to see {unseen} "
                f"of them rejected, but the model has computed {row.computed}"
            )

    def execute(self, step: SchedulerOutput) -> Execution:
        """Run one step, which was prepared."""
        ids = list(step.num_scheduled_tokens)
        output = ModelRunnerOutput(ids, {request_id: place for place, request_id in enumerate(ids)})
        done = Execution(output, DraftTokenIds(ids, []))
        asked = step.num_spec_tokens_to_schedule
        cut = step.num_invalid_spec_tokens or {}
        for request_id, scheduled in step.num_scheduled_tokens.items():
            row = self._rows[request_id]
            drafts = len(step.scheduled_spec_decode_tokens.get(request_id, ()))
            row.proposed = min(row.proposed, drafts - cut.get(request_id, 0))
            end = row.computed + scheduled
            if end == row.tokens + drafts:
                output.sampled_token_ids.append(self._sample(request_id, row, drafts, done))
            else:
                # A piece of the prompt (or of what a preempted request must compute again) samples nothing.
                assert end < row.tokens, f"{request_id}: {scheduled} tokens scheduled, fewer remain: {row}"
                assert not drafts, f"{request_id}: drafts scheduled before the known tokens end: {row}"
                row.computed = end
                output.sampled_token_ids.append([])
            row.proposed = min(asked, self.drafts_given(request_id, asked))
            # Schedulers never look at draft ids, only at how many there are.
            done.drafts.draft_token_ids.append([0] * row.proposed)
        return done

    def _sample(self, request_id: str, row: _Row, drafts: int, done: Execution) -> list[int]:
        proposed, accepted = row.proposed, 0
        if proposed:
            if request_id not in self._rngs:
                # A generator per request: its luck does not depend on who shares its batches.
                self._rngs[request_id] = Random(f"{self.seed}/{request_id}")
            accepted = self.accept(request_id, proposed, self._rngs[request_id])
            assert 0 <= accepted <= proposed, f"accept() gave {accepted} of {proposed} drafts"
        if drafts:
            done.drafted[request_id] = drafts
            done.accepted[request_id] = accepted
        if drafts > proposed:
            done.blank[request_id] = drafts - proposed
        first = row.tokens - row.prompt
        row.tokens += accepted + 1
        row.computed = row.tokens - 1
        return [self.token(request_id, position) for position in range(first, first + accepted + 1)]


@dataclass(frozen=True)
class Turn:
    """What one turn of the engine loop did.

    Async, the step `scheduled` in a turn is not the one `delivered` in it. `tokens` are the new tokens as the
    user gets them: cut at a stop, none for requests that are gone. `drafted`, `accepted` and `blank` are
    those of the delivered `Execution`, which counts what the model did for requests that are gone too.
    `schedule_ns` is the time spent inside `schedule`, `update_ns` that inside `update_from_output` and (sync)
    `update_draft_token_ids`.
    """

    scheduled: SchedulerOutput | None = None
    delivered: SchedulerOutput | None = None
    outputs: dict[int, EngineCoreOutputs] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    drafted: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    blank: dict[str, int] = field(default_factory=dict)
    schedule_ns: int = 0
    update_ns: int = 0


class _Grammar(StructuredOutputGrammar):
    """Takes every token that was sampled, and of drafts as many as it is told to."""

    def __init__(self, allows: Callable[[int], int]) -> None:
        self._allows = allows

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens[: self._allows(len(tokens))]

    def is_terminated(self) -> bool:
        return False

    def rollback(self, num_tokens: int) -> None:
        """There is no state."""

    def reset(self) -> None:
        """There is no state."""

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        raise NotImplementedError("masks are for a model's logits")


class FakeEngine:
    """vLLM's engine loop around a real scheduler and a fake model.

    Args:
        scheduler_class: the class under test.
        config: from `make_config`. Its number of KV blocks is set here; vLLM does so after profiling memory.
        accept: how many drafts hold; see `bernoulli`.
        token: the true continuation of every request.
        drafts_given: for drafters that give fewer drafts than asked.
        allows: what the grammars of structured requests make of their drafts.
        seed: of the generators that `accept` is given.
        num_blocks: size of the KV cache; by default every request fits at its longest, so none is preempted.
        clock: advances by `step_ms` just before the output of a step is delivered. Async, the model is thus
            busy without a pause; steps that schedule nothing take no time.
        step_ms: how long the model takes.
        log_stats: let the scheduler make its statistics, as vLLM's server does by default.
        v2_model_runner: the model runner that vLLM takes on a GPU unless something rules it out. The
            scheduler describes resumed requests differently to the two.
    """

    def __init__(
        self,
        scheduler_class: type[Scheduler],
        config: VllmConfig,
        *,
        accept: Accept = DEFAULT_ACCEPT,
        token: Token = hashed_token,
        drafts_given: DraftsGiven = lambda request_id, asked: asked,
        allows: Allows = lambda request_id, proposed: proposed,
        seed: int = 0,
        num_blocks: int | None = None,
        clock: Clock | None = None,
        step_ms: StepMs = lambda step: 10.0,
        log_stats: bool = False,
        v2_model_runner: bool = True,
    ) -> None:
        self.config = config
        self.clock = Clock() if clock is None else clock
        self.step_ms = step_ms
        self.world = World(accept, token, drafts_given, seed)
        self.allows = allows
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.finish_reasons: dict[str, FinishReason] = {}
        self._queue: deque[tuple[SchedulerOutput, Execution]] = deque()
        self._late_aborts: list[str] = []
        self._failed_blocks: set[int] = set()
        self._drafts = DraftTokenIds([], [])

        block_size = config.cache_config.block_size
        max_model_len = config.model_config.max_model_len
        if num_blocks is None:
            # One block is vLLM's own null block; drafts may reach past the longest request.
            longest = max_model_len + config.num_lookahead_tokens
            num_blocks = 1 + config.scheduler_config.max_num_seqs * -(-longest // block_size)
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
        # vLLM refuses the second runner to a config made on a CPU; the scheduler asks only here.
        with patch.object(VllmConfig, "use_v2_model_runner", v2_model_runner):
            self._depth = config.max_concurrent_batches
            self.scheduler = scheduler_class(
                vllm_config=config,
                kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
                structured_output_manager=StructuredOutputManager(config),
                block_size=block_size,
                log_stats=log_stats,
            )
        self._block_hasher = None
        if config.cache_config.enable_prefix_caching:
            hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
            init_none_hash(hash_function)
            self._block_hasher = get_request_block_hasher(block_size, hash_function)

    def add(
        self,
        prompt: list[int] | int,
        max_tokens: int,
        request_id: str | None = None,
        *,
        priority: int = 0,
        structured: bool = False,
        session: bool = False,
        **sampling: Any,
    ) -> str:
        """Hand a request to the scheduler and return its id.

        An int makes up a prompt of that length, unlike those of other requests. `sampling` goes to
        `SamplingParams`; only what the scheduler itself sees to, such as `stop_token_ids`, has any effect. A
        `structured` one has a grammar, and a `session` waits at its end for `resume`.
        """
        if request_id is None:
            request_id = f"request-{len(self.requests)}"
        if request_id in self.scheduler.requests or any(
            request_id in step.num_scheduled_tokens for step, _ in self._queue
        ):
            # vLLM would take it for more of the old request, or credit that one's output in flight to it.
            raise ValueError(f"request id {request_id} is still in use")
        if request_id in self.requests:
            self.check([request_id])
            self.finish_reasons.pop(request_id, None)
        request = self._request(request_id, prompt, max_tokens, priority, structured, session, sampling)
        self.requests[request_id] = request
        self.outputs[request_id] = []
        self.scheduler.add_request(request)
        return request_id

    def resume(self, request_id: str, prompt: list[int] | int, max_tokens: int, **sampling: Any) -> None:
        """Hand a session that waits more of its prompt; its output so far is checked and begins anew."""
        session = self.requests[request_id]
        if session.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
            raise ValueError(f"{request_id} waits for nothing: {session.status.name}")
        self.check([request_id])
        del self.finish_reasons[request_id]
        self.outputs[request_id] = []
        self.scheduler.add_request(self._request(request_id, prompt, max_tokens, 0, False, True, sampling))

    def waiting_sessions(self) -> list[str]:
        """The sessions that wait for more of their prompt."""
        waits = RequestStatus.WAITING_FOR_STREAMING_REQ
        return [request_id for request_id, request in self.scheduler.requests.items() if request.status == waits]

    def _request(
        self,
        request_id: str,
        prompt: list[int] | int,
        max_tokens: int,
        priority: int,
        structured: bool,
        session: bool,
        sampling: Mapping[str, Any],
    ) -> Request:
        if isinstance(prompt, int):
            prompt = [hashed_token(f"prompt of {request_id}", position) for position in range(prompt)]
        if not 0 < len(prompt) < self.config.model_config.max_model_len:
            raise ValueError(f"vLLM refuses a prompt of {len(prompt)} tokens before it meets the scheduler")
        if structured:
            sampling = {**sampling, "structured_outputs": StructuredOutputsParams(regex=".*")}
        request = Request(
            request_id,
            prompt,
            SamplingParams(max_tokens=max_tokens, **sampling),
            pooling_params=None,
            arrival_time=self.clock.now,
            priority=priority,
            block_hasher=self._block_hasher,
            resumable=session,
        )
        if request.structured_output_request is not None:
            request.structured_output_request.grammar = _Grammar(partial(self.allows, request_id))
        return request

    def abort(self, request_id: str, *, late: bool = False) -> None:
        """Abort a request, as when its client leaves.

        `late` holds the abort back until the next output is there, just before the scheduler sees it: so it
        goes for an abort that arrives while the engine waits for the model.
        """
        if late:
            self._late_aborts.append(request_id)
        else:
            self._abort([request_id])

    def _abort(self, request_ids: list[str]) -> None:
        for request in self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED):
            self.finish_reasons[request.request_id] = FinishReason.ABORT

    def fail_load(self, request_id: str) -> None:
        """With the next output comes the news that the request's first block was never loaded.

        vLLM then throws that output of the request away. Without async scheduling, which has a step in flight that was
        computed from the same blocks, it computes the request's tokens again; else set the scheduler's
        `recompute_kv_load_failures` to False, and the request ends with an error.
        """
        if self._depth > 1 and self.scheduler.recompute_kv_load_failures:
            raise ValueError("with a step in flight there is nothing to go back to: set recompute_kv_load_failures")
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        self._failed_blocks.update(blocks[:1])

    def forget_ended(self) -> list[str]:
        """Drops what is kept of requests that ended, once their output is checked; their ids."""
        ended = [request_id for request_id in self.finish_reasons if request_id not in self.scheduler.requests]
        self.check(ended)
        for request_id in ended:
            del self.requests[request_id], self.outputs[request_id], self.finish_reasons[request_id]
        return ended

    @property
    def has_work(self) -> bool:
        """Whether the engine would turn: also to tell the workers of finished requests, or for output."""
        return self.scheduler.has_requests() or bool(self._queue)

    def step(self) -> Turn:
        """One turn of the engine loop, in the order of `EngineCore.step_with_batch_queue`.

        First a step is scheduled. Unless the queue has room for another, the oldest output is then delivered.
        With a queue of one, which is what sync scheduling has, that is `EngineCore.step`.
        """
        scheduled: SchedulerOutput | None = None
        schedule_ns = 0
        waits = False
        if self.scheduler.has_requests():
            start = time.perf_counter_ns()
            scheduled = self.scheduler.schedule()
            schedule_ns = time.perf_counter_ns() - start
            self.world.prepare(scheduled, (execution for _, execution in self._queue))
            # Its grammars need the tokens of the step before.
            waits = scheduled.pending_structured_output_tokens
            if not waits:
                self._execute(scheduled)
                busy = scheduled.total_num_scheduled_tokens > 0 or self.scheduler.has_requests()
                if len(self._queue) < self._depth and busy:
                    return Turn(scheduled=scheduled, schedule_ns=schedule_ns)
        elif not self._queue:
            return Turn()
        turn = self._deliver(scheduled, schedule_ns)
        if scheduled is not None and waits:
            drafts = DraftTokenIds(self._drafts.req_ids, [list(ids) for ids in self._drafts.draft_token_ids])
            self.scheduler.update_draft_token_ids_in_output(drafts, scheduled)
            self._execute(scheduled)
        return turn

    def _execute(self, step: SchedulerOutput) -> None:
        execution = self.world.execute(step)
        self._drafts = execution.drafts
        self._queue.append((step, execution))

    def _deliver(self, scheduled: SchedulerOutput | None, schedule_ns: int) -> Turn:
        delivered, execution = self._queue.popleft()
        executed = delivered.total_num_scheduled_tokens > 0
        if executed:
            self.clock.now += self.step_ms(delivered) / 1000
        if self._late_aborts:
            self._abort(self._late_aborts)
            self._late_aborts = []
        if executed and self._failed_blocks:
            execution.output.kv_connector_output = KVConnectorOutput(invalid_block_ids=self._failed_blocks)
            self._failed_blocks = set()
        start = time.perf_counter_ns()
        outputs = self.scheduler.update_from_output(delivered, execution.output)
        drafts_come_back = self.config.speculative_config and not self.config.scheduler_config.async_scheduling
        if drafts_come_back and executed:
            self.scheduler.update_draft_token_ids(execution.drafts)
        update_ns = time.perf_counter_ns() - start
        tokens: dict[str, list[int]] = {}
        for output in (output for client in outputs.values() for output in client.outputs):
            tokens[output.request_id] = list(output.new_token_ids)
            self.outputs[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.finish_reasons[output.request_id] = output.finish_reason
        if execution.output.kv_connector_output is not None and self.scheduler.recompute_kv_load_failures:
            # Those that sampled nothing anyway stand where the scheduler has them.
            unheard = delivered.num_scheduled_tokens.keys() & self.scheduler.requests.keys() - tokens.keys()
            self.world.recomputes |= unheard
        return Turn(
            scheduled=scheduled,
            delivered=delivered,
            outputs=outputs,
            tokens=tokens,
            drafted=execution.drafted,
            accepted=execution.accepted,
            blank=execution.blank,
            schedule_ns=schedule_ns,
            update_ns=update_ns,
        )

    def run(self, steps: int) -> list[Turn]:
        """Turn the loop this many times."""
        return [self.step() for _ in range(steps)]

    def drain(self, limit: int = 100_000) -> list[Turn]:
        """Turn the loop until nothing is left to do; fails if that takes more turns than the limit."""
        turns: list[Turn] = []
        while self.has_work:
            if len(turns) == limit:
                raise RuntimeError(f"unfinished after {limit} turns: {sorted(self.scheduler.requests)}")
            turns.append(self.step())
        return turns

    def expected(self, request_id: str) -> list[int]:
        """All that the request must have produced by the time it ends of itself."""
        request = self.requests[request_id]
        assert request.sampling_params is not None
        stops = set(request.sampling_params.stop_token_ids or ())
        room = min(request.max_tokens, self.config.model_config.max_model_len - request.num_prompt_tokens)
        tokens: list[int] = []
        for position in range(room):
            tokens.append(self.world.token(request_id, position))
            if tokens[-1] in stops:
                break
        return tokens

    def check(self, request_ids: Iterable[str] | None = None) -> None:
        """Assert that all output is true, and whole for the requests that ended of themselves; of all by default."""
        for request_id in list(self.outputs) if request_ids is None else request_ids:
            output, expected = self.outputs[request_id], self.expected(request_id)
            ended = self.finish_reasons.get(request_id) in (FinishReason.STOP, FinishReason.LENGTH)
            assert output == (expected if ended else expected[: len(output)]), request_id
