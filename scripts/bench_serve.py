"""Rates both adaptive policies against every fixed k, in tokens per second, with the real engine and the tiny pair.

One engine serves all arms in turn: every k of the schedule, forced, and the two policies. What is served is a cell,
that is a kind of text, a number of requests at once and a temperature; and the mix, which goes through all cells in a
random order, the same for every arm. The arms of a repeat serve the same prompts one after the other, in an order that
is drawn anew each time, so that the machine's drift is shared; so they do in each cell of the mix, before any goes on
to the next. An arm's rate is the median over the repeats. An arm's slice begins with fresh requests and a lead-in that
does not count; in the mix all counts, as a policy that comes from another cell has yet to notice.

What the policies have seen: the engine and its kernels are warm, by one round over the cells with k forced. Each
policy then begins with state of its own, from the settings' start, and learns from its own slices only: in the first
repeat of the first cell it has seen nothing, in the last one all slices before. No step of another arm teaches it. The
start is akjax's default, a fit from other hardware with steps some ten times as long, unless `--start` gives another.

A ratio is the policy's rate by that of the best fixed arm. The best of several noisy arms is flattered by the noise:
the unbiased ratio picks the best fixed arm by the odd repeats and compares in the even ones, the other way round too,
and is the mean of the two. The spread is the median deviation of a repeat from its arm's median, as a share of it: a
ratio that is within it of 1 says nothing.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from ratings import Rates, best, ratio, spread, unbiased_ratio

from akjax.scheduler.assembly import assemble
from tiny_pair.cpu_sampling import repair_sampling
from tiny_pair.prompts import PROMPTS
from tiny_pair.serving import Engine, Served

# The lengths of the schedule are those that may be chosen, whatever the batch.
SCHEDULE = [(1, 1, 10), (2, 2, 8), (3, 4, 6), (5, 8, 4), (9, 12, 2), (13, 15, 1), (16, 16, 0)]
FIXED = {f"k={k}": f"force {k}" for k in sorted(k for _, _, k in SCHEDULE)}
POLICIES = {name: f"policy {name}" for name in ("default", "reference")}
ARMS = FIXED | POLICIES

KINDS = {
    "code": PROMPTS["code"],
    "prose": PROMPTS["prose"],
    "mixed": [prompt for prompts in zip(*PROMPTS.values(), strict=True) for prompt in prompts],
}
CONCURRENCIES = (1, 4, 16)
TEMPERATURES = (0, 1)
MIX = "mix"

WARM_UP_SECONDS = 0.2
LEAD_IN = 0.15


class Cell(NamedTuple):
    """What is served."""

    kind: str
    concurrency: int
    temperature: int

    @property
    def name(self) -> str:
        """As `--cells` has it."""
        return f"{self.kind}-{self.concurrency}-{self.temperature}"


CELLS = [Cell(kind, concurrency, heat) for heat in TEMPERATURES for kind in KINDS for concurrency in CONCURRENCIES]


@dataclass(frozen=True)
class Plan:
    """How long what is served.

    Attributes:
        cells: that are rated each by itself.
        mix: the cells of the mix in their order; empty to leave it out.
        seconds: of a slice that counts.
        mix_seconds: of each cell of the mix.
        repeats: of every arm.
        seed: of all that is random.
    """

    cells: Sequence[Cell]
    mix: Sequence[Cell]
    seconds: float
    mix_seconds: float
    repeats: int
    seed: int

    @property
    def estimated_seconds(self) -> float:
        """That the whole run takes, without the start of the engine."""
        cells = len(self.cells) * (self.seconds + LEAD_IN)
        return len(ARMS) * self.repeats * (cells + len(self.mix) * self.mix_seconds)


class Bench:
    """Serves the arms' slices, each policy with its own state."""

    def __init__(self, control: Path, settings: Mapping[str, Any]) -> None:
        """Starts the engine, warms it up and makes the policies' states."""
        say("Starting vLLM ...")
        self._engine = Engine(control, SCHEDULE, max_requests=max(CONCURRENCIES), settings=settings)
        if repair_sampling():
            say("This vLLM's sampling with speculation is broken above temperature 0: repaired in this process.")
        self._forcing = self._engine.scheduler.pilot
        self._warm_up()
        scheduler = self._engine.scheduler
        self._pilots = {
            arm: assemble(scheduler.vllm_config, scheduler.dynamic_sd_lookup, lambda line: None) for arm in POLICIES
        }

    def serve(self, arm: str, cell: Cell, seconds: float, seed: str, lead_in: float) -> Served:
        """What an arm serves of a cell in `seconds` after a lead-in, with prompts of this seed."""
        self._engine.scheduler.pilot = self._pilots.get(arm, self._forcing)
        return self._serve(ARMS[arm], cell, seconds, seed, lead_in=lead_in)

    def _serve(self, command: str, cell: Cell, seconds: float, seed: str, lead_in: float = 0.0) -> Served:
        rng = Random(f"{seed}/{cell.name}")
        prompts = [*KINDS[cell.kind]]
        rng.shuffle(prompts)
        return self._engine.serve(
            prompts,
            cell.concurrency,
            seconds,
            command,
            lead_in=lead_in,
            temperature=cell.temperature,
            seed=rng.randrange(1000),
        )

    def _warm_up(self) -> None:
        for number, cell in enumerate(CELLS):
            command = [*FIXED.values()][number % len(FIXED)]
            self._serve(command, cell, WARM_UP_SECONDS, "warm-up")


class Progress:
    """Says how far it is and how long it will yet take."""

    def __init__(self, expected_seconds: float) -> None:
        """At the start of what is expected to take so long, which only shares of it are read off."""
        self._expected = expected_seconds
        self._done = 0.0
        self._started = time.perf_counter()

    def advance(self, expected_seconds: float, what: str) -> None:
        """A part is done that was expected to take so long."""
        self._done += expected_seconds
        elapsed = time.perf_counter() - self._started
        left = elapsed * (self._expected / self._done - 1)
        say(f"{self._done / self._expected:4.0%}, {left / 60:.1f} min left: {what}")


def measure(bench: Bench, plan: Plan) -> dict[str, Rates]:
    """The rates of all arms in each cell and the mix, by name."""
    served: list[tuple[str, Sequence[Cell], float]] = [(cell.name, [cell], plan.seconds) for cell in plan.cells]
    if plan.mix:
        served.append((MIX, plan.mix, plan.mix_seconds))
    rates: dict[str, dict[str, list[float]]] = {name: {arm: [] for arm in ARMS} for name, _, _ in served}
    progress = Progress(plan.estimated_seconds)
    rng = Random(plan.seed)
    for repeat in range(plan.repeats):
        for name, cells, seconds in served:
            # All arms serve the same prompts, and each repeat others.
            seed = f"{plan.seed}/{repeat}"
            lead_in = 0.0 if name == MIX else LEAD_IN
            parts: dict[str, list[Served]] = {arm: [] for arm in ARMS}
            for cell in cells:
                for arm in rng.sample([*ARMS], len(ARMS)):
                    parts[arm].append(bench.serve(arm, cell, seconds, seed, lead_in))
            for arm, served_parts in parts.items():
                tokens, took = sum(part.tokens for part in served_parts), sum(part.seconds for part in served_parts)
                rates[name][arm].append(tokens / took)
            now = {arm: of_arm[-1] for arm, of_arm in rates[name].items()}
            leader = max(FIXED, key=lambda arm: now[arm])
            policies = ", ".join(f"{arm} {now[arm] / now[leader]:.2f}" for arm in POLICIES)
            progress.advance(
                len(ARMS) * (LEAD_IN + seconds * len(cells)),
                f"repeat {repeat + 1} of {plan.repeats}, {name}: best {leader} {now[leader]:.0f} tok/s, {policies}",
            )
    return {name: {arm: tuple(values) for arm, values in of_name.items()} for name, of_name in rates.items()}


def row(name: str, rates: Rates, policy: str) -> dict[str, Any]:
    """What is reported of a cell or the mix for a policy."""
    unbiased = unbiased_ratio(rates, policy, FIXED)
    medians = {arm: median(values) for arm, values in rates.items()}
    return {
        "cell": name,
        "ratio": round(ratio(rates, policy, FIXED), 4),
        "unbiased": None if unbiased is None else round(unbiased, 4),
        "spread_percent": round(100 * spread(rates), 2),
        "best_fixed": best(rates, FIXED),
        "tokens_per_second": {arm: round(medians[arm], 1) for arm in (*FIXED, policy)},
    }


def summary(rates: Mapping[str, Rates], policy: str) -> dict[str, Any]:
    """The worst cell, the mix and all rows of a policy; what was not served is None."""
    rows = [row(name, of_name, policy) for name, of_name in rates.items()]
    cells = [each for each in rows if each["cell"] != MIX]
    mix = next((each for each in rows if each["cell"] == MIX), None)
    worst = min(cells, key=lambda each: each["ratio"], default=None)
    unbiased = [each["unbiased"] for each in cells if each["unbiased"] is not None]
    return {
        "worst_cell": worst and worst["ratio"],
        "worst_cell_name": worst and worst["cell"],
        "worst_cell_unbiased": min(unbiased, default=None),
        "mixed": mix and mix["ratio"],
        "mixed_unbiased": mix and mix["unbiased"],
        "spread_percent": median(each["spread_percent"] for each in rows),
        "table": rows,
    }


def print_tables(rates: Mapping[str, Rates]) -> None:
    """The rates of all arms, and both policies' ratios."""
    print("tok/s, medians over the repeats; of a policy: its ratio to the best fixed k, and the unbiased one")
    heads = "".join(f"{arm:>8}" for arm in FIXED) + "".join(f"{arm:>11}  ratio unbiased" for arm in POLICIES)
    print(f"{'cell':<12}{heads}  spread")
    for name, of_name in rates.items():
        line = "".join(f"{median(of_name[arm]):8.0f}" for arm in FIXED)
        for policy in POLICIES:
            unbiased = unbiased_ratio(of_name, policy, FIXED)
            line += f"{median(of_name[policy]):11.0f} {ratio(of_name, policy, FIXED):6.3f}"
            line += f"{'-' if unbiased is None else f'{unbiased:.3f}':>9}"
        print(f"{name:<12}{line}  {spread(of_name):6.1%}")
    for policy in POLICIES:
        of_policy = summary(rates, policy)
        print(
            f"{policy}: worst cell {of_policy['worst_cell']} ({of_policy['worst_cell_name']}), unbiased"
            f" {of_policy['worst_cell_unbiased']}; mix {of_policy['mixed']}, unbiased {of_policy['mixed_unbiased']};"
            f" spread {of_policy['spread_percent']:.1f}%"
        )


def say(text: str) -> None:
    """A line about the run itself, at once."""
    print(text, file=sys.stderr, flush=True)


def plan_of(arguments: argparse.Namespace) -> Plan:
    """The plan that the options ask for."""
    patterns = arguments.cells.split(",")
    wanted = {name for name in (MIX, *(cell.name for cell in CELLS)) if any(fnmatch(name, each) for each in patterns)}
    mix = Random(f"{arguments.seed}/{MIX}").sample(CELLS, len(CELLS)) if MIX in wanted else []
    quick = arguments.quick
    return Plan(
        cells=[cell for cell in CELLS if cell.name in wanted],
        mix=mix[:6] if quick else mix,
        seconds=arguments.seconds or (0.3 if quick else 1.0),
        mix_seconds=arguments.mix_seconds or (0.3 if quick else 1.5),
        repeats=arguments.repeats or (2 if quick else 4),
        seed=arguments.seed,
    )


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cells", default="*", help="names with wildcards, by commas: code-*,*-16-0,mix (default: all)"
    )
    parser.add_argument("--seconds", type=float, help="of a slice (default: 1.0)")
    parser.add_argument("--mix-seconds", type=float, help="of each cell of the mix (default: 1.5)")
    parser.add_argument("--repeats", type=int, help="of every arm (default: 4)")
    parser.add_argument("--quick", action="store_true", help="a look: short slices, few repeats, noisy figures")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, sampling and the arms' order (default: 0)")
    parser.add_argument("--start", help="start of the cost model, as the setting MODEL (default: akjax's)")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    arguments = parser.parse_args()
    plan = plan_of(arguments)
    if not plan.cells and not plan.mix:
        parser.error(f"--cells {arguments.cells} names nothing; there are {MIX} and {', '.join(c.name for c in CELLS)}")

    started = time.perf_counter()
    with TemporaryDirectory() as folder:
        bench = Bench(Path(folder, "control"), {"model": arguments.start} if arguments.start else {})
        say(f"Ready after {time.perf_counter() - started:.0f} s; about {plan.estimated_seconds / 60:.1f} min to go.")
        rates = measure(bench, plan)
    say(f"Done after {(time.perf_counter() - started) / 60:.1f} min.")
    if arguments.json:
        print(json.dumps({**summary(rates, "default"), "reference": summary(rates, "reference")}, indent=2))
    else:
        print_tables(rates)


if __name__ == "__main__":
    main()
