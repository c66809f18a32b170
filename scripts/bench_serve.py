"""Rates both adaptive policies against every fixed k, in tokens per second, with the real engine and the tiny pair.

One engine serves all arms in turn: every k of the schedule, forced, and the two policies. What is served is a cell,
that is a kind of text, a number of requests at once and a temperature; and the mix, which goes through all cells.

A slice is one arm's turn. It starts fresh requests and ends when 80 tokens for each request at once have come, some
tenths of a second later. The first step, which reads the prompts, does not count. No step of a slice was planned by
another arm. In a round every arm has one slice, in an order drawn anew, with the same prompts: at temperature 0 the
same text, so that neither the text nor the machine's speed, which wanders within seconds, tells the arms apart. A round
that was not served completely does not count.

A cell is a steady load. All its rounds are served one after the other, and the first two do not count: a policy is
rated as it serves a load that it has seen for some rounds, its first steps ever left out. Whether it notices a change
in time is not rated there but in the mix. Nor does a round count in which other processes kept an arm from the CPU for
more than a tenth of its slice, unless hardly any is left. A cell is served until both policies' ratios have a standard
error of 1% or its time is over; time that it leaves is for the cells after it. Cells above temperature 0, where each
arm samples a text of its own, have two or three times as long as the others.

The mix visits all cells several times, each time in another order, for some rounds each, and everything counts. Its
rate is the mean of the cells' rates, as if each had the same time.

What the policies have seen: the engine and its kernels are warm, by one round over the cells with k forced. Each
policy then begins with state of its own, from the settings' start, and learns from its own slices only, in the order in
which they are served: the cells, then the mix. No step of another arm teaches it. The start is akjax's default, a fit
from other hardware with steps some ten times as long, unless `--start` gives another.

In a cell a fixed k is left out from the rounds to come once it is sure to be beaten, by 5% and three standard errors:
the others get its time. The rate given for it is what it had beside the others. The mix leaves none out.

A rate is all tokens by all seconds, and a ratio is the policy's rate by that of the best fixed arm. Its standard error
comes from the rounds' differences between the two. The best of several noisy arms is flattered by the noise: the
unbiased ratio picks the best fixed arm by the odd rounds and compares in the even ones, the other way round too, and is
the mean of the two. It leans the other way where arms are close, for what it picks is not always the best. The worst of
many cells is likewise the one that noise made worst. The spread is how far a slice is off what its arm and its round
have in common, as a standard deviation.
"""

import argparse
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from ratings import (
    Estimate,
    Rounds,
    Slice,
    Strata,
    beaten,
    best,
    rate,
    ratio_to_best,
    spread,
    unbiased_ratio,
    undisturbed,
)

from akjax.scheduler.assembly import assemble
from measuring import say
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

# Of a slice, for each request at once. Shorter ones share the machine's speed better, longer ones see more of a text.
TOKENS = 80
# The step that reads the prompts takes as long whatever k is.
LEAD_IN_STEPS = 1
# Of a cell, that do not count.
WARM_ROUNDS = 2
# A fixed k that is further behind than this share, and so many standard errors on top, is left out after these rounds.
BEATEN_BY, BEATEN_ERRORS, BEATEN_ROUNDS = 0.05, 3.0, 6
# With fewer rounds that count a cell does not end before its time: a small error may be luck.
EXACT_ROUNDS = 16
# The fewest that count, however long they take: one has no error, and the unbiased ratio picks in half of them.
LEAST_ROUNDS = 2
# Of a slice, the share of its time that it may wait for the CPU, where its round counts.
MOST_WAITED = 0.1
SECONDS_BETWEEN_LINES = 10.0


class Cell(NamedTuple):
    """What is served."""

    kind: str
    concurrency: int
    temperature: int

    @property
    def name(self) -> str:
        """As `--cells` has it."""
        return f"{self.kind}-{self.concurrency}-{self.temperature}"

    @property
    def patience(self) -> int:
        """For how long it is served, beside others. Where arms sample different texts, more rounds even them out."""
        if self.temperature == 0:
            return 1
        return 3 if self.concurrency == 1 else 2


CELLS = [Cell(kind, concurrency, heat) for heat in TEMPERATURES for kind in KINDS for concurrency in CONCURRENCIES]


@dataclass(frozen=True)
class Plan:
    """How long what is served.

    Attributes:
        cells: that are rated each by itself.
        mix: the cells of the mix; empty to leave it out.
        seconds: of a cell on average, all arms together.
        mix_seconds: of a visit of the mix to a cell, all arms together.
        repeats: visits of the mix to each cell.
        error: standard error of both ratios at which a cell ends before its time; 0 for never.
        seed: of all that is random.
    """

    cells: Sequence[Cell]
    mix: Sequence[Cell]
    seconds: float
    mix_seconds: float
    repeats: int
    error: float
    seed: int

    @property
    def expected_seconds(self) -> float:
        """That the whole run takes, without the start of the engine."""
        return len(self.cells) * self.seconds + self.repeats * len(self.mix) * self.mix_seconds


@dataclass(frozen=True)
class Measured:
    """What was served.

    Attributes:
        cells: the rounds of each cell that count.
        mix: the visits of the mix to each cell, each as one round.
    """

    cells: dict[Cell, Rounds] = field(default_factory=dict)
    mix: dict[Cell, Rounds] = field(default_factory=dict)

    @property
    def strata(self) -> dict[str, Strata]:
        """What is rated, by name."""
        named: dict[str, Strata] = {cell.name: [rounds] for cell, rounds in self.cells.items()}
        return named | ({MIX: [*self.mix.values()]} if self.mix else {})


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

    def serve(self, arm: str, cell: Cell, seed: str) -> Slice:
        """An arm's slice of a cell, with prompts of this seed."""
        self._engine.scheduler.pilot = self._pilots.get(arm, self._forcing)
        waited, started = waited_seconds(), time.perf_counter()
        served = self._serve(ARMS[arm], cell, seed, tokens=TOKENS * cell.concurrency)
        took = time.perf_counter() - started
        return Slice(served.tokens, served.seconds, (waited_seconds() - waited) / took)

    def _serve(
        self, command: str, cell: Cell, seed: str, *, seconds: float = math.inf, tokens: float = math.inf
    ) -> Served:
        rng = Random(f"{seed}/{cell.name}")
        prompts = [*KINDS[cell.kind]]
        rng.shuffle(prompts)
        return self._engine.serve(
            prompts,
            cell.concurrency,
            seconds,
            command,
            tokens=tokens,
            lead_in=LEAD_IN_STEPS,
            temperature=cell.temperature,
            seed=rng.randrange(1000),
        )

    def _warm_up(self) -> None:
        for number, cell in enumerate(CELLS):
            command = [*FIXED.values()][number % len(FIXED)]
            self._serve(command, cell, "warm-up", seconds=WARM_UP_SECONDS)


def waited_seconds() -> float:
    """For how long this thread has been ready to run while the CPU ran others; 0 where the system does not say."""
    try:
        text = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text()
    except OSError:
        return 0.0
    return int(text.split()[1]) / 1e9


class Progress:
    """Says how far it is and how long it will yet take."""

    def __init__(self, expected_seconds: float) -> None:
        """At the start of what is expected to take so long, which only shares of it are read off."""
        self._expected = expected_seconds
        self._done = 0.0
        self._started = self._last_line = time.perf_counter()

    def within(self, what: str) -> None:
        """Says where it is, unless it did so moments ago."""
        now = time.perf_counter()
        if now - self._last_line >= SECONDS_BETWEEN_LINES:
            say(f"      {what}")
            self._last_line = now

    def advance(self, expected_seconds: float, what: str) -> None:
        """A part is done that was expected to take so long."""
        self._done += expected_seconds
        self._last_line = time.perf_counter()
        left = (self._last_line - self._started) * (self._expected / self._done - 1)
        say(f"{self._done / self._expected:4.0%}, {left / 60:.1f} min left: {what}")


ServeSlice = Callable[[str, Cell, str], Slice]
"""Of an arm, a cell and a seed."""


def measure(serve: ServeSlice, plan: Plan) -> Measured:
    """Serves all cells by themselves, then the mix."""
    progress = Progress(plan.expected_seconds)
    measured = Measured()
    unit = plan.seconds * len(plan.cells) / max(sum(cell.patience for cell in plan.cells), 1)
    started = time.perf_counter()
    for number, cell in enumerate(plan.cells):
        # Time that is left over is shared; where a cell took longer than it had, the others keep theirs.
        left = unit * sum(each.patience for each in plan.cells) - (time.perf_counter() - started)
        share = cell.patience / sum(each.patience for each in plan.cells[number:])
        seconds = max(share * left, unit * cell.patience)
        rounds = serve_cell(serve, cell, seconds, plan, progress)
        measured.cells[cell] = rounds
        progress.advance(unit * cell.patience, f"{cell.name}, {len(rounds)} rounds, {outcome([rounds])}")
    rng = Random(f"{plan.seed}/{MIX}")
    visits: dict[Cell, list[Mapping[str, Slice]]] = {cell: [] for cell in plan.mix}
    for repeat in range(plan.repeats):
        for number, cell in enumerate(rng.sample(plan.mix, len(plan.mix)), start=1):
            visits[cell].append(visit(serve, cell, f"{plan.seed}/{MIX}/{repeat}", plan.mix_seconds, rng))
            where = f"{MIX}, repeat {repeat + 1} of {plan.repeats}, cell {number} of {len(plan.mix)}"
            progress.advance(plan.mix_seconds, f"{where}, {cell.name}: {outcome([visits[cell][-1:]])}")
    measured.mix.update(visits)
    return measured


def serve_cell(serve: ServeSlice, cell: Cell, seconds: float, plan: Plan, progress: Progress) -> Rounds:
    """The rounds of a cell that count, served for `seconds`."""
    rng = Random(f"{plan.seed}/{cell.name}")
    arms = [*ARMS]
    rounds: list[Mapping[str, Slice]] = []
    counted: Rounds = []
    timer = RoundTimer(seconds)
    while len(rounds) < WARM_ROUNDS + LEAST_ROUNDS or (timer.has_time and not is_exact(counted, plan.error)):
        rounds.append(serve_round(serve, cell, f"{plan.seed}/{len(rounds)}", rng.sample(arms, len(arms))))
        timer.round_done()
        counted = undisturbed(rounds[WARM_ROUNDS:], MOST_WAITED)
        if len(counted) >= BEATEN_ROUNDS:
            out = beaten(counted, FIXED, by=BEATEN_BY, errors=BEATEN_ERRORS)
            arms = [arm for arm in arms if arm not in out]
        progress.within(f"{cell.name}, {len(counted)} of {len(rounds)} rounds count, {len(arms)} arms")
    if len(counted) >= max(LEAST_ROUNDS, len(rounds) // 4):
        return counted
    say(f"      {cell.name}: other processes disturbed most rounds, so all count; its figures are noisy")
    return rounds[WARM_ROUNDS:]


def is_exact(rounds: Rounds, error: float) -> bool:
    """Whether both policies' ratios have at most this standard error, by enough rounds to tell."""
    if len(rounds) < EXACT_ROUNDS:
        return False
    errors = [ratio_to_best([rounds], arm, FIXED).error for arm in POLICIES]
    return all(each is not None and each <= error for each in errors)


def visit(serve: ServeSlice, cell: Cell, seed: str, seconds: float, rng: Random) -> dict[str, Slice]:
    """What each arm serves in a visit of the mix, as one slice each."""
    rounds: list[Mapping[str, Slice]] = []
    timer = RoundTimer(seconds)
    while timer.has_time:
        rounds.append(serve_round(serve, cell, f"{seed}/{len(rounds)}", rng.sample([*ARMS], len(ARMS))))
        timer.round_done()
    return {arm: total([each[arm] for each in rounds]) for arm in ARMS}


def total(slices: Sequence[Slice]) -> Slice:
    """Slices as one."""
    tokens, seconds = sum(each.tokens for each in slices), sum(each.seconds for each in slices)
    return Slice(tokens, seconds, sum(each.waited * each.seconds for each in slices) / seconds)


def serve_round(serve: ServeSlice, cell: Cell, seed: str, arms: Sequence[str]) -> dict[str, Slice]:
    """A slice of each arm in this order, all with the same prompts."""
    return {arm: serve(arm, cell, seed) for arm in arms}


class RoundTimer:
    """Whether another round brings the time nearer to what is wanted."""

    def __init__(self, seconds: float) -> None:
        """Before the first round of what is to take so long."""
        self._seconds = seconds
        self._rounds = 0
        self._started = time.perf_counter()
        self._took = 0.0

    def round_done(self) -> None:
        """At the end of each round."""
        self._rounds += 1
        self._took = time.perf_counter() - self._started

    @property
    def has_time(self) -> bool:
        """Whether at least half of another round, as long as those before, has room; the first one always has."""
        return not self._rounds or self._took * (1 + 0.5 / self._rounds) < self._seconds


def outcome(strata: Strata) -> str:
    """The best fixed arm, and the policies beside it, in a line."""
    leader = best(strata, FIXED)
    policies = ", ".join(f"{arm} {shown(ratio_to_best(strata, arm, FIXED))}" for arm in POLICIES)
    return f"best {leader} {rate(strata, leader):.0f} tok/s, {policies}"


def shown(estimate: Estimate | None) -> str:
    """An estimate with its standard error, as far as they are known."""
    if estimate is None:
        return "-"
    error = "" if estimate.error is None else f"±{estimate.error:.3f}"
    return f"{estimate.value:.3f}{error}"


def row(name: str, strata: Strata, policy: str) -> dict[str, Any]:
    """What is reported of a cell or the mix for a policy."""
    ratio, unbiased = ratio_to_best(strata, policy, FIXED), unbiased_ratio(strata, policy, FIXED)
    off = spread(strata)
    return {
        "cell": name,
        "ratio": round(ratio.value, 4),
        "ratio_se": rounded(ratio.error),
        "ratio_95": ratio.interval and [round(end, 4) for end in ratio.interval],
        "unbiased": rounded(unbiased and unbiased.value),
        "unbiased_se": rounded(unbiased and unbiased.error),
        "spread_percent": None if off is None else round(100 * off, 2),
        "waited_percent": round(100 * waited_share(strata), 2),
        "rounds": min(map(len, strata)),
        "best_fixed": best(strata, FIXED),
        "tokens_per_second": {arm: round(rate(strata, arm), 1) for arm in (*FIXED, policy)},
    }


def waited_share(strata: Strata) -> float:
    """For what share of the time that counts other processes had the CPU instead."""
    return total([each for rounds in strata for of_round in rounds for each in of_round.values()]).waited


def rounded(value: float | None) -> float | None:
    """To four digits, if there is one."""
    return None if value is None else round(value, 4)


def summary(measured: Measured, policy: str) -> dict[str, Any]:
    """The worst cell, the mix and all rows of a policy; what was not served is None."""
    rows = [row(name, strata, policy) for name, strata in measured.strata.items()]
    cells = [each for each in rows if each["cell"] != MIX]
    mix = next((each for each in rows if each["cell"] == MIX), None)
    worst = min(cells, key=lambda each: each["ratio"], default=None)
    unbiased = [each["unbiased"] for each in cells if each["unbiased"] is not None]
    spreads = [each["spread_percent"] for each in rows if each["spread_percent"] is not None]
    return {
        "worst_cell": worst and worst["ratio"],
        "worst_cell_se": worst and worst["ratio_se"],
        "worst_cell_name": worst and worst["cell"],
        "worst_cell_unbiased": min(unbiased, default=None),
        "mixed": mix and mix["ratio"],
        "mixed_se": mix and mix["ratio_se"],
        "mixed_unbiased": mix and mix["unbiased"],
        "mixed_unbiased_se": mix and mix["unbiased_se"],
        "spread_percent": median(spreads) if spreads else None,
        "table": rows,
    }


def print_tables(measured: Measured) -> None:
    """The rates of all arms, and both policies' ratios."""
    print("tok/s; of a policy: its ratio to the best fixed k and the unbiased one, each ± its standard error")
    heads = "".join(f"{arm:>7}" for arm in FIXED) + "".join(
        f"{arm:>11} {'ratio':>12}{'unbiased':>12}" for arm in POLICIES
    )
    print(f"{'cell':<11}{heads} spread waited rounds")
    for name, strata in measured.strata.items():
        line = "".join(f"{rate(strata, arm):7.0f}" for arm in FIXED)
        for policy in POLICIES:
            ratios = ratio_to_best(strata, policy, FIXED), unbiased_ratio(strata, policy, FIXED)
            line += f"{rate(strata, policy):11.0f} {shown(ratios[0]):>12}{shown(ratios[1]):>12}"
        off, rounds = spread(strata), min(map(len, strata))
        print(f"{name:<11}{line} {'-' if off is None else f'{off:.1%}':>6} {waited_share(strata):6.1%} {rounds:6d}")
    for policy in POLICIES:
        of_policy = summary(measured, policy)
        print(
            f"{policy}: worst cell {of_policy['worst_cell']} ± {of_policy['worst_cell_se']}"
            f" ({of_policy['worst_cell_name']}), unbiased {of_policy['worst_cell_unbiased']};"
            f" mix {of_policy['mixed']} ± {of_policy['mixed_se']}, unbiased {of_policy['mixed_unbiased']}"
        )


def plan_of(arguments: argparse.Namespace) -> Plan:
    """The plan that the options ask for."""
    patterns = arguments.cells.split(",")
    wanted = {name for name in (MIX, *(cell.name for cell in CELLS)) if any(fnmatch(name, each) for each in patterns)}
    quick = arguments.quick
    mix = Random(f"{arguments.seed}/{MIX}").sample(CELLS, 6 if quick else len(CELLS)) if MIX in wanted else []
    return Plan(
        cells=[cell for cell in CELLS if cell.name in wanted],
        mix=mix,
        seconds=arguments.seconds or (8.0 if quick else 66.0),
        mix_seconds=arguments.mix_seconds or (3.0 if quick else 12.0),
        repeats=arguments.repeats or (2 if quick else 3),
        error=arguments.error / 100,
        seed=arguments.seed,
    )


def positive(text: str) -> float:
    """A number above 0.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def whole(text: str) -> int:
    """A whole number above 0.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


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
    parser.add_argument(
        "--seconds", type=positive, help="of a cell on average, all arms together (default: 66; quick: 8)"
    )
    parser.add_argument(
        "--mix-seconds",
        type=positive,
        help="of a visit of the mix to a cell, all arms together (default: 12; quick: 3)",
    )
    parser.add_argument("--repeats", type=whole, help="visits of the mix to each cell (default: 3; quick: 2)")
    parser.add_argument(
        "--error", type=float, default=1.0, help="standard error, in percent, at which a cell ends early (default: 1)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a look: less time, half of the mix's cells and fewer, noisy figures"
    )
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
        say(f"Ready after {time.perf_counter() - started:.0f} s; about {plan.expected_seconds / 60:.1f} min to go.")
        measured = measure(bench.serve, plan)
    say(f"Done after {(time.perf_counter() - started) / 60:.1f} min.")
    if arguments.json:
        print(json.dumps({**summary(measured, "default"), "reference": summary(measured, "reference")}, indent=2))
    else:
        print_tables(measured)


if __name__ == "__main__":
    main()
