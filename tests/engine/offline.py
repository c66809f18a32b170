"""Serves prompts with the real engine in a process of its own: `offline.py JOB.json REPORT.json`.

A process for each engine: vLLM keeps global state, and settings are read from the environment.
"""

import json
import os
import sys
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
from vllm.v1.core.sched.output import SchedulerOutput

from akjax.scheduler import AdaptiveKScheduler

PAIR = Path(__file__).parents[2] / "scripts" / "tiny_pair"
DRAFT_LIMIT = 10
SCHEDULE = [[1, 2, 10], [3, 4, 6], [5, 8, 3], [9, 15, 1], [16, 16, 0]]

drafts_by_step: list[dict[str, int]] = []


class RecordingScheduler(AdaptiveKScheduler):
    """Notes the drafts of each step that goes to the worker."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """vLLM's, and a note of its drafts."""
        output = super().schedule(throttle_prefills)
        drafts = output.scheduled_spec_decode_tokens
        drafts_by_step.append({request_id: len(tokens) for request_id, tokens in drafts.items()})
        return output


def main() -> None:
    """Runs the job's phases one after the other in one engine and writes what came out.

    A job has `speculation` ("none", "fixed" or "adaptive"), `settings` for the scheduler, `max_tokens`, and
    `phases`: each with `prompts` served together, and what is written to the control file before (`control`).
    """
    job_path, report_path = map(Path, sys.argv[1:])
    job: dict[str, Any] = json.loads(job_path.read_text())
    engine: dict[str, Any] = {}
    if job["speculation"] != "none":
        engine["speculative_config"] = {
            "method": "draft_model",
            "model": str(PAIR / "draft"),
            "num_speculative_tokens": job.get("draft_limit", DRAFT_LIMIT),
        }
    if job["speculation"] == "adaptive":
        engine["speculative_config"]["num_speculative_tokens_per_batch_size"] = SCHEDULE
        engine |= {"scheduler_cls": RecordingScheduler, "additional_config": {"adaptive_k": job["settings"]}}
    llm = LLM(
        model=str(PAIR / "target"), dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=16, **engine
    )
    sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True)
    results = []
    for phase in job["phases"]:
        if "control" in phase:
            Path(job["settings"]["control"]).write_text(phase["control"])
        drafts_by_step.clear()
        outputs = llm.generate(phase["prompts"], sampling, use_tqdm=False)
        results.append({"tokens": [list(o.outputs[0].token_ids) for o in outputs], "drafts": list(drafts_by_step)})
    report: dict[str, Any] = {"phases": results}
    if job["speculation"] == "adaptive":
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler  # pyright: ignore[reportAttributeAccessIssue]
        controller = scheduler.pilot.controller
        state = controller.settle()
        report |= {"taught": int(state.cost.taught), "error": float(state.cost.error)}
        report["faults"] = scheduler.faults.count
        report |= {"rows": len(controller._rows), "rows_in_use": len(controller._slots)}
    report_path.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
