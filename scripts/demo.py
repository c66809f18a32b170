"""Serves the tiny pair with the real engine: k against time and kind, what the models learn, and what it is worth.

First every kind of text at every concurrency, adapting; then the same again with each k forced through the control
file, in the same engine, beside adapting.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from akjax.scheduler.reports import describe_cost
from tiny_pair.prompts import PROMPTS
from tiny_pair.serving import Engine, Served

CONCURRENCIES = (1, 4, 16)
# The lengths of the schedule are those that may be chosen, whatever the batch.
SCHEDULE = [(1, 1, 10), (2, 2, 8), (3, 4, 6), (5, 8, 4), (9, 12, 2), (13, 16, 1)]
LEVELS = sorted(k for _, _, k in SCHEDULE)
# Where learning starts: a quick CPU core. The default start is that of a far larger model, whose
# steps are so far from these that the gate would let none of them teach.
START = "3.0,0.05,0.05"

WARM_UP_SECONDS = 0.5
ADAPT_SECONDS = 4.0
COMPARE_SECONDS = 1.0
ROUNDS = 2
SLICES = 40


class LivePicture:
    """Prints k against time while it happens: a hexadecimal digit for each slice, the k of most of its steps."""

    def __init__(self, slice_seconds: float) -> None:
        """Before the first slice."""
        self._slice_seconds = slice_seconds
        self._slice = 0
        self._steps: Counter[int] = Counter()

    def __call__(self, seconds: float, k: int) -> None:
        """Takes a step planned at `k`, `seconds` after the start."""
        now = int(seconds / self._slice_seconds)
        if now > self._slice and self._steps:
            print(f"{self._steps.most_common(1)[0][0]:X}" * (now - self._slice), end="", flush=True)
            self._slice = now
            self._steps.clear()
        self._steps[k] += 1


def serve(
    engine: Engine,
    kind: str,
    concurrency: int,
    seconds: float,
    forced: int | None = None,
    watch: Callable[[float, int], None] = lambda seconds, k: None,
) -> Served:
    """Keeps `concurrency` requests of a kind running for `seconds`, with k `forced` or chosen; `watch` sees it."""
    command = "adapt" if forced is None else f"force {forced}"
    return engine.serve(PROMPTS[kind], concurrency, seconds, command, watch=watch)


def learned(engine: Engine) -> str:
    """What the cost model knows by now."""
    pilot = engine.scheduler.pilot
    return "" if pilot is None else describe_cost(pilot.controller)


def cells() -> Iterator[tuple[str, int]]:
    """Every kind at every concurrency."""
    return itertools.product(PROMPTS, CONCURRENCIES)


def warm_up(engine: Engine) -> None:
    """A moment at every k and concurrency, so that the cost model has seen each; by itself it sees what it chooses."""
    for kind, concurrency, k in itertools.product(list(PROMPTS)[:1], CONCURRENCIES, LEVELS):
        serve(engine, kind, concurrency, WARM_UP_SECONDS, k)


def show_adapting(engine: Engine) -> None:
    """Prints k against time for every cell as it is served, and what was learned."""
    heading(f"Adapting, {ADAPT_SECONDS:.0f} s each: k against time (a digit is the k of a slice of time; A is 10)")
    for kind, concurrency in cells():
        print(f"{kind:>5} x{concurrency:<2}  ", end="", flush=True)
        served = serve(engine, kind, concurrency, ADAPT_SECONDS, watch=LivePicture(ADAPT_SECONDS / SLICES))
        say(f"  mean k {served.mean_k:4.1f}  {served.rate:6.0f} tok/s")
        say(f"           {learned(engine)}")


def show_comparison(engine: Engine) -> None:
    """Prints tok/s of every forced k beside adapting. The arms take turns, so that the machine's drift is shared."""
    heading("tok/s of each forced k, and adapting, in the same engine")
    arms: list[int | None] = [*LEVELS, None]
    say("kind  requests" + "".join(f"{f'k={k}':>8}" for k in LEVELS) + "  adaptive  of the best fixed k")
    for kind, concurrency in cells():
        sums = [0.0] * len(arms)
        for _ in range(ROUNDS):
            for number, arm in enumerate(arms):
                sums[number] += serve(engine, kind, concurrency, COMPARE_SECONDS, arm).rate
        *fixed, adaptive = (total / ROUNDS for total in sums)
        say(
            f"{kind:<5} {concurrency:8d}"
            + "".join(f"{rate:8.0f}" for rate in fixed)
            + f"  {adaptive:8.0f}  {adaptive / max(fixed):.2f}"
        )


def heading(text: str) -> None:
    """A line that begins a part."""
    say(f"\n{text}")


def say(text: str) -> None:
    """A line, at once."""
    print(text, flush=True)


def main() -> None:
    """Runs the demo."""
    started = time.perf_counter()
    say("Starting vLLM with a Mixture-of-Experts model of 2.6 M parameters and its draft model ...")
    with TemporaryDirectory() as folder:
        engine = Engine(Path(folder) / "control", SCHEDULE, max_requests=max(CONCURRENCIES), settings={"model": START})
        say(f"ready after {time.perf_counter() - started:.0f} s; a moment at every k, for the cost model ...")
        warm_up(engine)
        say(learned(engine))
        show_adapting(engine)
        show_comparison(engine)
        say(f"\n{learned(engine)}")
    say(f"done after {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
