"""Serves the tiny pair with the real engine: k against time and kind, what the models learn, and what it is worth.

First every kind of text at every concurrency, adapting; then the same again with each k forced through the control
file, in the same engine, beside adapting.
"""

import itertools
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine in this process, so that its scheduler can be looked at
    VLLM_CPU_KVCACHE_SPACE="1",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="ERROR",
)

from rich.console import Console
from rich.progress import track
from rich.table import Table
from vllm import LLM, SamplingParams

from akjax.scheduler.reports import describe_cost
from tiny_pair.prompts import PROMPTS

PAIR = Path(__file__).parent / "tiny_pair"
CONCURRENCIES = (1, 4, 16)
DRAFT_LIMIT = 6
# Every k from 1 to 6 is in the schedule, so that every one may be chosen.
SCHEDULE = [[1, 1, 6], [2, 2, 5], [3, 4, 4], [5, 6, 3], [7, 8, 2], [9, 16, 1]]
# Where learning starts: a quick CPU core. The default start is a model a hundred thousand times as large, whose
# steps are so far from these that the gate would let none of them teach.
START = "3.0,0.05,0.05"

MAX_TOKENS = 160
ADAPT_SECONDS = 4.0
COMPARE_SECONDS = 1.5
ROUNDS = 2
SLICES = 40


@dataclass
class Served:
    """What a while of serving gave.

    Attributes:
        tokens: output tokens.
        seconds: that it took.
        k: (seconds since the start, k planned) of each step.
    """

    tokens: int = 0
    seconds: float = 0.0
    k: list[tuple[float, int]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def mean_k(self) -> float:
        """Over the steps."""
        return sum(k for _, k in self.k) / len(self.k)

    def picture(self) -> str:
        """The k of most steps in each slice of time, a digit each."""
        width = self.seconds / SLICES
        slices = itertools.groupby(self.k, key=lambda step: int(step[0] / width))
        return "".join(str(max(ks, key=ks.count)) for ks in ([k for _, k in steps] for _, steps in slices))


class Engine:
    """vLLM's engine, serving the tiny pair at a steady concurrency."""

    def __init__(self, control: Path) -> None:
        """Starts it; `control` is its control file."""
        os.environ["VLLM_ADAPTIVE_K_MODEL"] = START
        os.environ["VLLM_ADAPTIVE_K_CONTROL"] = str(control)
        self._control = control
        self._llm = LLM(
            model=str(PAIR / "target"),
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=max(CONCURRENCIES),
            speculative_config={
                "method": "draft_model",
                "model": str(PAIR / "draft"),
                "num_speculative_tokens": DRAFT_LIMIT,
                "num_speculative_tokens_per_batch_size": SCHEDULE,
            },
            scheduler_cls="akjax.scheduler.AdaptiveKScheduler",
        )
        self._ids = itertools.count()
        core: Any = self._llm.llm_engine.engine_core
        self._scheduler = core.engine_core.scheduler

    def serve(self, kind: str, concurrency: int, seconds: float, forced: int | None = None) -> Served:
        """Keeps `concurrency` requests of a kind running for `seconds`, with k `forced` or chosen."""
        self._control.write_text("adapt\n" if forced is None else f"force {forced}\n")
        engine = self._llm.llm_engine
        prompts = itertools.cycle(PROMPTS[kind])
        lengths: dict[str, int] = {}
        served = Served()
        started = time.perf_counter()
        while served.seconds < seconds:
            while len(lengths) < concurrency:
                request_id = f"{kind}-{next(self._ids)}"
                engine.add_request(request_id, next(prompts), SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
                lengths[request_id] = 0
            for output in engine.step():
                length = len(output.outputs[0].token_ids)  # pyright: ignore[reportAttributeAccessIssue]
                served.tokens += length - lengths[output.request_id]
                lengths[output.request_id] = length
                if output.finished:
                    del lengths[output.request_id]
            served.seconds = time.perf_counter() - started
            served.k.append((served.seconds, self._scheduler.plan.draft_length))
        engine.abort_request(list(lengths), internal=False)
        while engine.has_unfinished_requests():
            engine.step()
        return served

    def learned(self) -> str:
        """What the cost model knows by now."""
        return describe_cost(self._scheduler.pilot.controller)


def cells() -> Iterator[tuple[str, int]]:
    """Every kind at every concurrency."""
    return itertools.product(PROMPTS, CONCURRENCIES)


def show_adapting(console: Console, engine: Engine) -> None:
    """Prints k against time for every cell as it is served, and what was learned."""
    console.rule("Adapting: k against time (a digit is the k of a slice of time)")
    for kind, concurrency in cells():
        served = engine.serve(kind, concurrency, ADAPT_SECONDS)
        console.print(
            f"{kind:>5} x{concurrency:<2}  mean k {served.mean_k:.1f}  {served.rate:5.0f} tok/s  {served.picture()}",
            highlight=False,
        )
        console.print(f"           [dim]{engine.learned()}[/dim]", highlight=False)


def show_comparison(console: Console, engine: Engine) -> None:
    """Prints tok/s of every forced k beside adapting; the arms take turns, so that drift of the machine is shared."""
    console.rule("tok/s of each forced k, and adapting, in the same engine")
    arms: list[int | None] = [*range(1, DRAFT_LIMIT + 1), None]
    sums: dict[tuple[str, int, int | None], list[float]] = {}
    turns = [(cell, arm) for _ in range(ROUNDS) for cell in cells() for arm in arms]
    for (kind, concurrency), arm in track(turns, "measuring", console=console):
        rate = engine.serve(kind, concurrency, COMPARE_SECONDS, arm).rate
        sums.setdefault((kind, concurrency, arm), []).append(rate)
    table = Table("kind", "requests", *(f"k={k}" for k in arms[:-1]), "adaptive", "of the best fixed k")
    for kind, concurrency in cells():
        *fixed, adaptive = (sum(sums[kind, concurrency, arm]) / ROUNDS for arm in arms)
        best = max(fixed)
        shown = [f"[bold]{rate:.0f}[/bold]" if rate == best else f"{rate:.0f}" for rate in fixed]
        table.add_row(kind, str(concurrency), *shown, f"{adaptive:.0f}", f"{adaptive / best:.2f}")
    console.print(table)


def main() -> int:
    """Runs the demo; returns the process's exit code."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    started = time.perf_counter()
    console.print("Starting vLLM with a 2.6 M parameter Mixture-of-Experts model and its draft model ...")
    with TemporaryDirectory() as folder:
        engine = Engine(Path(folder) / "control")
        console.print(f"ready after {time.perf_counter() - started:.0f} s")
        show_adapting(console, engine)
        show_comparison(console, engine)
        console.print(engine.learned(), highlight=False)
    console.print(f"done after {time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
