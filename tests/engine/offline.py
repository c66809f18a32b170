"""Serves prompts with the real engine in a process of its own: `offline.py JOB.json REPORT.json`.

A process for each engine: vLLM keeps global state, and settings are read from the environment.
"""

import json
import os
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="0",
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
)

from vllm import LLM, SamplingParams
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from akjax.scheduler import AdaptiveKScheduler
from harness import Turn
from invariants import Invariants
from tiny_pair.cpu_sampling import repair_sampling

PAIR = Path(__file__).parents[2] / "scripts" / "tiny_pair"
DRAFT_LIMIT = 10
SCHEDULE = [[1, 2, 10], [3, 4, 6], [5, 8, 3], [9, 15, 1], [16, 16, 0]]


class RecordingScheduler(AdaptiveKScheduler):
    """Notes the drafts of each step that goes to the worker, and what came of them.

    Attributes:
        drafts_by_step: how many drafts each request has in it.
        counts: of what happened, by name.
        sampled: tokens of each request, those among them that nobody gets.
        turn: the step whose output came last.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what vLLM's scheduler takes."""
        super().__init__(*args, **kwargs)
        self.turn = Turn()
        self.restart()

    def restart(self) -> None:
        """Begins the notes anew."""
        self.drafts_by_step: list[dict[str, int]] = []
        self.counts, self.sampled = Counter[str](), Counter[str]()

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """vLLM's, and a note of its drafts."""
        output = super().schedule(throttle_prefills)
        drafts = output.scheduled_spec_decode_tokens
        self.drafts_by_step.append({request_id: len(tokens) for request_id, tokens in drafts.items()})
        self.counts["preempted"] += len(output.preempted_req_ids or ())
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """vLLM's, and a note of what the model accepted and what came out."""
        # vLLM cuts these lists where a request stops, so they are counted before.
        rows = model_runner_output.req_id_to_index
        sampled = {request_id: len(model_runner_output.sampled_token_ids[row]) for request_id, row in rows.items()}
        self.sampled.update(sampled)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        drafted = self.drafts_by_step[-1]
        tokens = {output.request_id: output.new_token_ids for client in outputs.values() for output in client.outputs}
        self.turn = Turn(
            scheduled=scheduler_output,
            delivered=scheduler_output,
            outputs=outputs,
            tokens=tokens,
            drafted=drafted,
            accepted={request_id: max(sampled[request_id] - 1, 0) for request_id in drafted},
        )
        self.counts["accepted"] += sum(self.turn.accepted.values())
        return outputs

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Ours, and a note of what grammars cut."""
        super().update_draft_token_ids(draft_token_ids)
        plan = self.plan
        for request_id, drafts in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            request = self.requests.get(request_id)
            if plan is not None and request is not None and request.use_structured_output:
                planned = plan.each.get(request_id, plan.draft_length)
                self.counts["cut"] += min(len(drafts), planned) - len(request.spec_token_ids)


def main() -> None:
    """Runs the job's phases one after the other in one engine and writes what came out.

    A job has `speculation` ("none", "fixed" or "adaptive"), `settings` for the scheduler, `max_tokens`, perhaps
    `engine` with more arguments of vLLM's and `drafter` with another method, and `phases`: each with `prompts` served
    together, and perhaps their `sampling`, one for each; `leave`, at how many tokens the clients of some go; and what
    is written to the control file before (`control`). With "adaptive" the invariants hold in every step, and nothing is
    left of a phase's requests.
    """
    job_path, report_path = map(Path, sys.argv[1:])
    job: dict[str, Any] = json.loads(job_path.read_text())
    engine: dict[str, Any] = job.get("engine", {})
    if job["speculation"] != "none":
        engine["speculative_config"] = {
            "num_speculative_tokens": job.get("draft_limit", DRAFT_LIMIT),
            **job.get("drafter", {"method": "draft_model", "model": str(PAIR / "draft")}),
        }
    if job["speculation"] == "adaptive":
        engine["speculative_config"]["num_speculative_tokens_per_batch_size"] = SCHEDULE
        engine |= {"scheduler_cls": RecordingScheduler, "additional_config": {"adaptive_k": job["settings"]}}
    options = {"max_model_len": 1024, "max_num_seqs": 16, **engine}
    llm = LLM(model=str(PAIR / "target"), dtype="float32", enforce_eager=True, **options)
    repair_sampling()
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler  # pyright: ignore[reportAttributeAccessIssue]
    with ExitStack() as stack:
        invariants = None
        if isinstance(scheduler, RecordingScheduler):
            invariants = Invariants(scheduler)
            stack.enter_context(invariants.watching())
        phases = [serve(llm, job, phase, invariants) for phase in job["phases"]]
    report: dict[str, Any] = {"phases": phases}
    if isinstance(scheduler, RecordingScheduler):
        assert scheduler.pilot is not None
        controller = scheduler.pilot.controller
        state = controller.settle()
        report |= {"taught": int(state.cost.taught), "error": float(state.cost.error)}
        report["faults"] = scheduler.faults.count
        report |= {"rows": len(controller._rows)}
    report_path.write_text(json.dumps(report))


def serve(llm: LLM, job: dict[str, Any], phase: dict[str, Any], invariants: Invariants | None) -> dict[str, Any]:
    """Serves the prompts of a phase.

    Returns:
        For each of its requests the `completions` (`tokens`, `text` and so on) and, with akjax, what was noted: tokens
        that the model gave and nobody got (`dropped`), `drafts` in each step, `counts` of what happened, and how many
        `observations` the models were told.
    """
    if "control" in phase:
        Path(job["settings"]["control"]).write_text(phase["control"])
    engine = llm.llm_engine
    scheduler: Any = engine.engine_core.engine_core.scheduler  # pyright: ignore[reportAttributeAccessIssue]
    observed = 0 if invariants is None else invariants.observations
    if invariants is not None:
        scheduler.restart()
    sampling = phase.get("sampling", [{}] * len(phase["prompts"]))
    ids = [
        engine.add_request(str(number), prompt, sampling_of(job, params))
        for number, (prompt, params) in enumerate(zip(phase["prompts"], sampling, strict=True))
    ]
    leave: dict[str, int] = phase.get("leave", {})
    told: list[dict[str, Any]] = [{"completions": [], "prompt_logprobs": None} for _ in ids]
    # The last step, without requests, tells the scheduler which are gone.
    while scheduler.has_requests():
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            request = told[int(output.request_id)]
            # A step tells only of those of several completions that it went on with.
            by_index = {done["index"]: done for done in (*request["completions"], *map(completion, output.outputs))}
            request["completions"] = [by_index[index] for index in sorted(by_index)]
            request["prompt_logprobs"] = output.prompt_logprobs and [*map(numbers, output.prompt_logprobs)]
        for number in [number for number, most in leave.items() if length(told[int(number)]) >= most]:
            engine.abort_request([number], internal=False)
            del leave[number]
        if invariants is not None:
            invariants.after(scheduler.turn)
    report: dict[str, Any] = {"requests": told}
    if invariants is not None:
        invariants.at_the_end()
        report |= {"drafts": scheduler.drafts_by_step, "counts": scheduler.counts}
        report["observations"] = invariants.observations - observed
        for own, request in zip(ids, told, strict=True):
            # Of several completions each has an id that ends so.
            sampled = sum(count for request_id, count in scheduler.sampled.items() if request_id.endswith(own))
            request["dropped"] = sampled - length(request)
    return report


def sampling_of(job: dict[str, Any], params: dict[str, Any]) -> SamplingParams:
    """Greedy up to the job's `max_tokens`, but for what `params` say."""
    params = {"temperature": 0, "max_tokens": job["max_tokens"], "ignore_eos": True, **params}
    if "structured_outputs" in params:
        params["structured_outputs"] = StructuredOutputsParams(**params["structured_outputs"])
    return SamplingParams(**params)


def completion(done: CompletionOutput) -> dict[str, Any]:
    """One of a request's completions, for a report."""
    return {
        "index": done.index,
        "tokens": list(done.token_ids),
        "text": done.text,
        "ended": [done.finish_reason, done.stop_reason],
        "logprobs": done.logprobs and [*map(numbers, done.logprobs)],
    }


def numbers(logprobs: dict[int, Logprob] | None) -> dict[int, float] | None:
    """Those of one place, by token."""
    return logprobs and {token: of.logprob for token, of in logprobs.items()}


def length(request: dict[str, Any]) -> int:
    """Tokens that a request's client got."""
    return sum(len(done["tokens"]) for done in request["completions"])


if __name__ == "__main__":
    main()
