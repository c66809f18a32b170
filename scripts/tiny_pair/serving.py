"""vLLM's engine in this process, serving the tiny pair at a steady concurrency with akjax choosing k."""

import itertools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Read by vLLM when it is imported.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine in this process, so that its scheduler can be looked at
    VLLM_CPU_KVCACHE_SPACE="1",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="ERROR",
)

from vllm import LLM, SamplingParams

from akjax.scheduler.adaptive_k import AdaptiveKScheduler

PAIR = Path(__file__).parent
MAX_TOKENS = 160

Schedule = Sequence[tuple[int, int, int]]
"""vLLM's dynamic schedule: (first batch size, last batch size, draft length)."""


@dataclass
class Served:
    """What a while of serving gave.

    Attributes:
        tokens: output tokens.
        seconds: that it took.
        k: planned in each step.
    """

    tokens: int = 0
    seconds: float = 0.0
    k: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def mean_k(self) -> float:
        """Over the steps."""
        return sum(self.k) / len(self.k)


class Engine:
    """Keeps requests running; which k they get is what the control file says.

    Attributes:
        scheduler: the engine's own.
    """

    def __init__(
        self, control: Path, schedule: Schedule, *, max_requests: int, settings: Mapping[str, Any] | None = None
    ) -> None:
        """Starts it.

        Args:
            control: its control file.
            schedule: the draft lengths there are to choose from, whatever the batch; its longest is K.
            max_requests: the most that run at once.
            settings: of akjax, by name, that go before those of the environment.
        """
        self._control = control
        self._llm = LLM(
            model=str(PAIR / "target"),
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            use_tqdm_on_load=False,
            max_num_seqs=max_requests,
            speculative_config={
                "method": "draft_model",
                "model": str(PAIR / "draft"),
                "num_speculative_tokens": max(k for _, _, k in schedule),
                "num_speculative_tokens_per_batch_size": [list(entry) for entry in schedule],
            },
            scheduler_cls="akjax.scheduler.AdaptiveKScheduler",
            additional_config={"adaptive_k": {**(settings or {}), "control": str(control)}},
        )
        self._ids = itertools.count()
        core: Any = self._llm.llm_engine.engine_core
        self.scheduler: AdaptiveKScheduler = core.engine_core.scheduler

    def serve(
        self,
        prompts: Sequence[str],
        concurrency: int,
        seconds: float,
        command: str,
        *,
        tokens: float = math.inf,
        lead_in: int = 0,
        temperature: float = 0.0,
        seed: int = 0,
        watch: Callable[[float, int], None] = lambda seconds, k: None,
    ) -> Served:
        """Keeps `concurrency` fresh requests running for `seconds`, or until `tokens` have come, then drops them.

        Args:
            prompts: taken in turn, again from the first after the last.
            concurrency: requests at once.
            seconds: that count; the step that runs when they are over counts as a whole.
            command: the line for the control file.
            tokens: that count, of all requests together; the step that reaches them counts as a whole.
            lead_in: steps before that do not count. The first one reads the first prompts.
            temperature: of sampling; above 0 each request has its own seed, which follows from `seed`.
            seed: for that.
            watch: called after each step with the seconds since the start and the k it planned.

        Raises:
            RuntimeError: akjax had a fault of its own.
        """
        self._control.write_text(command + "\n")
        engine = self._llm.llm_engine
        upcoming = zip(itertools.cycle(prompts), itertools.count(seed * 1_000_003), strict=False)
        lengths: dict[str, int] = {}
        served = Served()
        started = counted_from = time.perf_counter()
        uncounted = lead_in
        while served.seconds < seconds and served.tokens < tokens:
            while len(lengths) < concurrency:
                prompt, request_seed = next(upcoming)
                request_id = f"request-{next(self._ids)}"
                sampling = SamplingParams(
                    temperature=temperature, max_tokens=MAX_TOKENS, seed=request_seed if temperature > 0 else None
                )
                engine.add_request(request_id, prompt, sampling)
                lengths[request_id] = 0
            came = 0
            for output in engine.step():
                length = len(output.outputs[0].token_ids)  # pyright: ignore[reportAttributeAccessIssue]
                came += length - lengths[output.request_id]
                lengths[output.request_id] = length
                if output.finished:
                    del lengths[output.request_id]
            now = time.perf_counter()
            if self.scheduler.plan is None or self.scheduler.faults.count:
                raise RuntimeError("akjax had a fault of its own")
            k = self.scheduler.plan.draft_length
            if uncounted:
                uncounted -= 1
                counted_from = now
            else:
                served.tokens += came
                served.seconds = now - counted_from
                served.k.append(k)
            watch(now - started, k)
        engine.abort_request(list(lengths), internal=False)
        # A last step without tokens tells the scheduler which requests are gone.
        while self.scheduler.has_requests():
            engine.step()
        return served
