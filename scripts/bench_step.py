"""What a step's decision takes of the engine's time, beside plain NumPy and beside vLLM's own scheduling.

decision: a controller alone observes n requests, learns from the step's time and chooses, in one process with the NumPy
oracle of the tests, made of its parts so that nothing is done twice: the loops of the contract and no more. Both begin
with the same lists. The arms take turns, a few steps each; every arm verifies as many drafts as it chose the step
before, out of the same luck. So the oracle and ours by the reference policy see and choose the same, and steps where
they did not are counted; the default policy does more than the oracle.
At one request a compiled call that does nothing stands beside: as many numbers in and out, called the same way.

scheduler: vLLM's AsyncScheduler without an engine, the base class and ours with its features on (code mode, a control
file, a step log), taking turns step by step; the time inside schedule() and update_from_output(). Steps take as long
at each k, and most drafts are accepted, so both draft at the longest and vLLM's own work is the same in both.

startup: what making the scheduler adds once vLLM is imported: JAX's import, and compiling for every number of requests
up to 256; the seconds, and by how much the process's memory has grown at its peak.

Times are microseconds, medians and 99th percentiles, of startup seconds. Each part runs in processes of its own.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol
from unittest.mock import patch

import jax
import numpy as np
from jaxtyping import Array

from akjax import (
    CompiledController,
    DraftLengths,
    DraftOutcomes,
    StepMeasures,
    default_controller,
    reference_controller,
    reference_cost,
)
from akjax.cost import UNEVEN, serving_cost
from akjax.one_kernel import compiled_for_cpu
from akjax.scheduler.jax_process import run_on_the_callers_thread
from compilations import Compilations
from measuring import apart, peak_megabytes, say, settle_garbage
from tests.oracle import PROSE, Acceptance, CostFilter, Settings, choose_batch, choose_per_request

ROOT = Path(__file__).resolve().parent.parent
DRAFT_LIMIT, LEVELS = 6, (1, 2, 3, 4, 6)
EXPERTS, TOP_K = 288, 8
START = (27.0, 0.635, 0.542)
SIZES = (1, 8, 32, 128, 256, 512, 1024)
QUICK_SIZES = (1, 32, 256)
SCHEDULER_SIZES = (1, 32, 256)
# Steps of an arm before the next one's turn: the first of them finds its caches cold. Steps that take turns one by one
# cost the oracle at one request, whose caches are the more of its time, 1.7 times as much, and ours little more.
BLOCK = 8
WARM_UP, LEAST_STEPS, MOST_STEPS = BLOCK, 6 * BLOCK, 400 * BLOCK
# Requests at once of a scheduler whose start is timed.
STARTED = 256

# Of every step that the scheduler runs.
STEP_MS = 30.0

AIMS: dict[str, Any] = {
    "batch": {"1": 1.0, "32": 0.33, "256": 0.08, "1024": 0.04},
    "per_request": {"1": 0.8, "32": 0.12, "256": 0.03},
    "scheduler_share_256": 0.1,
    "scheduler_us_1": 60.0,
    "start_seconds": 5.0,
    "start_megabytes": 250.0,
    "vs_empty_call": 5.0,
}


class Seen(NamedTuple):
    """A step's output, in plain lists of its requests, and its features."""

    requests: list[str]
    drafted: list[int]
    accepted: list[int]
    modes: list[int]
    tokens: int
    drafting: int
    context: int
    ms: float


class Arm(Protocol):
    """Something that learns from a step's output and chooses draft lengths for the same requests."""

    def step(self, seen: Seen) -> Any:
        """What is timed."""
        ...

    def lengths(self, answer: Any, requests: int) -> list[int]:
        """The draft length of each request, of what `step` returned."""
        ...

    def forget(self, request_id: str) -> None:
        """Drops a request that ended."""
        ...


class Ours:
    """A compiled controller."""

    def __init__(self, policy: str, per_request: bool, code_mode: bool, most: int) -> None:
        """Compiles for up to `most` requests."""
        rules: dict[str, Any] = {
            "draft_limit": DRAFT_LIMIT,
            "levels": LEVELS,
            "per_request": per_request,
            "code_mode": "1" if code_mode else "0",
        }
        if policy == "reference":
            controller, cost = reference_controller(**rules), reference_cost(*START, experts=EXPERTS, top_k=TOP_K)
        else:
            controller = default_controller(**rules)
            uneven = UNEVEN if per_request else None
            cost = serving_cost(*START, lengths=LEVELS, experts=EXPERTS, top_k=TOP_K, uneven=uneven)
        self.controller = CompiledController(controller, cost, most)

    def step(self, seen: Seen) -> DraftLengths:
        """One step."""
        self.controller.observe(
            step=StepMeasures(seen.tokens, len(seen.requests), seen.drafting, seen.context),
            ms=seen.ms,
            teaches=True,
            outcomes=DraftOutcomes(seen.requests, seen.drafted, seen.accepted, seen.modes),
        )
        return self.controller.decide(seen.requests, seen.modes, seen.context)

    def lengths(self, answer: DraftLengths, requests: int) -> list[int]:
        """Of each request."""
        return [answer.batch] * requests if answer.each is None else answer.each.tolist()

    def forget(self, request_id: str) -> None:
        """Drops a request."""
        self.controller.forget(request_id)


class Oracle:
    """The reference algorithm in NumPy, a loop over requests.

    The gate is left out: it lets all of these steps in, and would predict their times once more than the filter does.
    """

    def __init__(self, per_request: bool, code_mode: bool) -> None:
        """Before any step."""
        settings = Settings(per_request=per_request, code_mode="1" if code_mode else "0", model=START)
        modes = 3 if code_mode else 1
        self.margin = settings.margin
        self.per_request = per_request
        self.rates = [Acceptance(settings, DRAFT_LIMIT) for _ in range(modes)]
        self.cost = CostFilter(settings)
        self.k = DRAFT_LIMIT

    def step(self, seen: Seen) -> int | list[int]:
        """One step."""
        rates = self.rates
        usual = rates[PROSE]
        self.cost.update(seen.tokens, seen.ms)
        for request, drafted, accepted, mode in zip(
            seen.requests, seen.drafted, seen.accepted, seen.modes, strict=True
        ):
            usual.observe(request, drafted, accepted)
            if mode != PROSE:
                rates[mode].observe(request, drafted, accepted)
        if self.per_request:
            survivals = [usual.survivals(request) for request in seen.requests]
            if len(survivals) > 1:
                return choose_per_request(survivals, self.cost.predicted)
        else:
            pairs = zip(seen.requests, seen.modes, strict=True)
            survivals = [rates[mode].survivals(request) for request, mode in pairs]
        self.k = choose_batch(survivals, self.cost.predicted, LEVELS, self.k, self.margin)
        return self.k

    def lengths(self, answer: int | list[int], requests: int) -> list[int]:
        """Of each request."""
        return [answer] * requests if isinstance(answer, int) else answer

    def forget(self, request_id: str) -> None:
        """Drops a request."""
        for rates in self.rates:
            rates.drop(request_id)


class EmptyCall:
    """A compiled call that does nothing, with as many numbers in and out as a controller's step at one request."""

    def __init__(self, of: Ours) -> None:
        """Compiles it."""
        step = of.controller._steps[0]
        self._flat = np.zeros_like(step._flat)
        with jax.enable_x64(True):
            size_out = step._call(self._flat).size
        device = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        signature = jax.ShapeDtypeStruct(self._flat.shape, self._flat.dtype, sharding=device)

        def identity(flat: Array) -> Array:
            return jax.numpy.resize(flat, size_out)

        with jax.enable_x64(True):
            self._call = compiled_for_cpu(identity, signature)

    def step(self, seen: Seen) -> np.ndarray:
        """The call."""
        with jax.enable_x64(True):
            return np.asarray(self._call(self._flat))

    def lengths(self, answer: np.ndarray, requests: int) -> list[int]:
        """None is chosen, so the longest."""
        return [DRAFT_LIMIT] * requests

    def forget(self, request_id: str) -> None:
        """Knows none."""


def figures(nanos: Sequence[int]) -> dict[str, float]:
    """Microseconds, of nanoseconds."""
    micros = np.asarray(nanos) / 1e3
    return {"median_us": float(np.median(micros)), "p99_us": float(np.quantile(micros, 0.99))}


def true_ms(tokens: int) -> float:
    """What a step of so many tokens takes in the made-up world, without noise."""
    return 20.0 + 0.5 * EXPERTS * (1.0 - (1.0 - TOP_K / EXPERTS) ** (0.8 * tokens)) + 0.4 * tokens


def race(arms: dict[str, Arm], requests: list[str], modes: list[int], seconds: float) -> dict[str, Any]:
    """The arms' times in a run of steps of the same requests, and how often ours chose otherwise than the oracle."""
    rng = np.random.default_rng(len(requests))
    longest = [DRAFT_LIMIT] * len(requests)
    chosen: dict[str, list[list[int]]] = {name: [longest] for name in arms}
    nanos: dict[str, list[int]] = {name: [] for name in arms}
    names, differences, steps = list(arms), 0, -WARM_UP
    end = time.perf_counter() + seconds
    while steps < LEAST_STEPS or (steps < MOST_STEPS and time.perf_counter() < end):
        luck = (rng.geometric(0.3, (BLOCK, len(requests))) - 1).tolist()
        noise = np.exp(0.03 * rng.standard_normal(BLOCK)).tolist()
        names.append(names.pop(0))
        for name in names:
            arm, choices = arms[name], chosen[name]
            del choices[:-1]
            for of_each, factor in zip(luck, noise, strict=True):
                seen = output(requests, modes, choices[-1], of_each, factor)
                began = time.perf_counter_ns()
                answer = arm.step(seen)
                nanos[name].append(time.perf_counter_ns() - began)
                choices.append(arm.lengths(answer, len(requests)))
        differences += sum(ours != oracle for ours, oracle in zip(chosen["reference"], chosen["oracle"], strict=True))
        steps += BLOCK
    for arm in arms.values():
        for request in requests:
            arm.forget(request)
    return {
        **{name: figures(nanos[name][WARM_UP:]) for name in arms},
        "steps": steps,
        "different_choices": differences,
    }


def output(requests: list[str], modes: list[int], drafted: list[int], luck: list[int], noise: float) -> Seen:
    """What comes of a step with so many drafts of each request, of which as many as its luck has would be accepted."""
    tokens = len(requests) + sum(drafted)
    return Seen(
        requests,
        drafted,
        [min(pair) for pair in zip(luck, drafted, strict=True)],
        modes,
        tokens=tokens,
        drafting=max(drafted),
        context=300 * len(requests),
        ms=true_ms(tokens) * noise,
    )


def decide(sizes: Sequence[int], per_request: bool, code_mode: bool, seconds: float) -> dict[str, Any]:
    """A race at each number of requests, by which the report has them."""
    title = f"{'per request' if per_request else 'batch'}{', code mode' if code_mode else ''}"
    # As in an engine.
    run_on_the_callers_thread()
    compilations = Compilations()
    say(f"decision, {title}: compiling ...")
    ours = {policy: Ours(policy, per_request, code_mode, max(sizes)) for policy in ("reference", "default")}
    arms: dict[str, Arm] = {"oracle": Oracle(per_request, code_mode), **ours}
    empty = EmptyCall(ours["default"])
    settle_garbage()
    report: dict[str, Any] = {}
    for size in sizes:
        requests = [f"request-{size}-{number}" for number in range(size)]
        modes = [number % 3 if code_mode else PROSE for number in range(size)]
        row: dict[str, Any] = {}
        with compilations.told(row):
            row |= race(arms | {"empty": empty} if size == 1 else arms, requests, modes, seconds)
        report[str(size)] = row
        medians = ", ".join(f"{name} {row[name]['median_us']:.1f}" for name in arms)
        say(f"decision, {title}, {size} requests: {medians} us")
    return report


def decision(options: argparse.Namespace) -> dict[str, Any]:
    """The decision alone: batch and per request, code mode off and on."""
    kinds = {
        f"{'per_request' if per_request else 'batch'}{'_code' if code_mode else ''}": (per_request, code_mode)
        for code_mode in (False, True)
        for per_request in (False, True)
    }
    seconds = options.seconds
    return {name: apart(decide, options.sizes, *kinds[name], seconds) for name in options.kinds or kinds}


@contextmanager
def engines(
    most: int, classes: Sequence[str], other: Mapping[str, Any] | None = None, **config: Any
) -> Iterator[dict[str, Any]]:
    """A fake engine around each of the scheduler classes, "base" and "ours", for up to `most` requests at once.

    Args:
        most: requests at once.
        classes: of the schedulers.
        other: settings of ours, over those for all features.
        config: of vLLM.
    """
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from akjax.scheduler import AdaptiveKScheduler
    from tests.harness import Clock, FakeEngine, bernoulli, make_config

    schedule = [(1, 1, 6), (2, 2, 4), (3, 3, 3), (4, 4, 2), (5, most, 1)]
    clock = Clock(100.0)
    with TemporaryDirectory() as folder, patch("akjax.scheduler.adaptive_k.monotonic", clock):
        settings = {
            "control": f"{folder}/control",
            "step_log": f"{folder}/steps.jsonl",
            "step_log_mb": 16,
            "model": f"{STEP_MS},0.001,0.001",
            **(other or {}),
        }
        made: dict[str, Any] = {}
        for name in classes:
            vllm_config = make_config(
                num_speculative_tokens=DRAFT_LIMIT,
                # The base class drafts at the longest whatever the batch; ours chooses among all that there are.
                schedule=schedule if name == "ours" else [(1, most, DRAFT_LIMIT)],
                max_num_seqs=most,
                max_num_batched_tokens=8192,
                tokenizer=str(ROOT / "scripts/tiny_pair/target"),
                additional_config={"adaptive_k": settings},
                **config,
            )
            made[name] = FakeEngine(
                AdaptiveKScheduler if name == "ours" else AsyncScheduler,
                vllm_config,
                accept=bernoulli((0.95, 0.9)),
                clock=clock if name == "ours" else Clock(),
                step_ms=lambda step: STEP_MS,
                log_stats=True,
            )
        yield made
        for engine in made.values():
            engine.scheduler.shutdown()


def serve(sizes: Sequence[int], seconds: float) -> dict[str, Any]:
    """Both scheduler classes at each number of requests, by which the report has them."""
    compilations = Compilations()
    say("scheduler: starting ...")
    report: dict[str, Any] = {}
    with engines(max(sizes), ("base", "ours"), max_model_len=4096) as both:
        settle_garbage()
        for size in sizes:
            row: dict[str, Any] = {}
            with compilations.told(row):
                row |= turns(both, size, seconds)
            if both["ours"].scheduler.faults.count:
                raise RuntimeError("akjax had a fault of its own")
            report[str(size)] = row
            say(f"scheduler, {size} requests: base {row['base']['median_us']:.1f} us, ours adds {row['added_us']:.1f}")
    return report


def turns(engines: dict[str, Any], size: int, seconds: float) -> dict[str, Any]:
    """Times of steps of `size` requests, an engine after the other."""
    nanos: dict[str, list[tuple[int, int]]] = {name: [] for name in engines}
    drafts: dict[str, list[int]] = {name: [] for name in engines}
    names, steps, added = list(engines), 0, 0
    end = time.perf_counter() + seconds
    while steps < WARM_UP + LEAST_STEPS or (steps < MOST_STEPS and time.perf_counter() < end):
        names.append(names.pop(0))
        for name in names:
            engine = engines[name]
            while len(engine.scheduler.requests) < size:
                engine.add(64, 3000, f"{size}-{name}-{added}")
                added += 1
            turn = engine.step()
            if steps >= WARM_UP:
                nanos[name].append((turn.schedule_ns, turn.update_ns))
                scheduled = turn.scheduled.scheduled_spec_decode_tokens if turn.scheduled else {}
                drafts[name].append(sum(map(len, scheduled.values())))
        steps += 1
    for engine in engines.values():
        for request_id in list(engine.scheduler.requests):
            engine.abort(request_id)
        while engine.has_work:
            engine.step()
        engine.forget_ended()
    row: dict[str, Any] = {}
    for name, times in nanos.items():
        of_schedule, of_update = zip(*times, strict=True)
        row[name] = {
            **figures([sum(pair) for pair in times]),
            "schedule_us": figures(of_schedule)["median_us"],
            "update_us": figures(of_update)["median_us"],
            "drafts_of_a_request": float(np.mean(drafts[name])) / size,
        }
    row["added_us"] = row["ours"]["median_us"] - row["base"]["median_us"]
    row["share"] = row["added_us"] / row["base"]["median_us"]
    row["steps"] = steps - WARM_UP
    return row


def scheduler(options: argparse.Namespace) -> dict[str, Any]:
    """vLLM's scheduler, the base class and ours."""
    return apart(serve, SCHEDULER_SIZES, 2 * options.seconds)


def start(other: Mapping[str, Any]) -> dict[str, float]:
    """What making the scheduler takes, with these settings."""
    with engines(STARTED, ("base",)):  # so that vLLM is imported and its tokenizer read
        before, began = peak_megabytes(), time.perf_counter()
        with engines(STARTED, ("ours",), {"control": "", **other}):
            return {"seconds": time.perf_counter() - began, "megabytes": peak_megabytes() - before}


def startup(_: argparse.Namespace) -> dict[str, Any]:
    """The scheduler's start: default, reference, a k for each request, and both policies for a control file."""
    report = {}
    with TemporaryDirectory() as folder:
        kinds = {
            "default": {},
            "reference": {"policy": "reference"},
            "per_request": {"per_request": True},
            "control": {"control": f"{folder}/control"},
        }
        for name, other in kinds.items():
            say(f"startup: {name} ...")
            report[name] = apart(start, other)
    return report


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "decision": decision,
    "scheduler": scheduler,
    "startup": startup,
}
KINDS = ("batch", "per_request", "batch_code", "per_request_code")


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """The figures that there are aims for, and their like."""
    found: dict[str, Any] = {}
    for policy, prefix in (("reference", ""), ("default", "default_")):
        for kind, rows in report.get("decision", {}).items():
            found[prefix + kind] = {n: row[policy]["median_us"] / row["oracle"]["median_us"] for n, row in rows.items()}
    alone = report.get("decision", {}).get("batch", {}).get("1")
    if alone is not None:
        empty = alone["empty"]["median_us"]
        found["vs_empty_call"] = alone["default"]["median_us"] / empty
        found["vs_empty_call_reference"] = alone["reference"]["median_us"] / empty
    if "scheduler" in report:
        found["scheduler_share_256"] = report["scheduler"]["256"]["share"]
        found["scheduler_us_1"] = report["scheduler"]["1"]["added_us"]
    if "startup" in report:
        found["start_seconds"] = report["startup"]["default"]["seconds"]
        found["start_megabytes"] = report["startup"]["default"]["megabytes"]
    rows = [row for kind in report.get("decision", {}).values() for row in kind.values()]
    if rows:
        found["different_choices"] = sum(row["different_choices"] for row in rows)
    rows += [*report.get("scheduler", {}).values()]
    if rows:
        found["compilations"] = sum(row["compilations"] for row in rows)
    return found


def tables(report: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    """The report for people, line by line."""
    for kind, rows in report.get("decision", {}).items():
        yield f"decision, {kind.replace('_', ' ')}: us, median and p99; the medians' ratio to the oracle's"
        yield f"{'n':>6}{'oracle':>17}{'reference':>17}{'default':>17}{'ratio':>9}{'aim':>7}{'default':>9}{'steps':>7}"
        for n, row in rows.items():
            times = "".join(
                f"{row[name]['median_us']:>9.1f}{row[name]['p99_us']:>8.1f}"
                for name in ("oracle", "reference", "default")
            )
            aim = AIMS.get(kind, {}).get(n, "")
            ratios = f"{found[kind][n]:>9.3f}{aim:>7}{found['default_' + kind][n]:>9.3f}"
            yield f"{n:>6}{times}{ratios}{row['steps']:>7}"
        yield ""
    if "vs_empty_call" in found:
        empty = report["decision"]["batch"]["1"]["empty"]
        yield (
            f"an empty call: {empty['median_us']:.1f} us, p99 {empty['p99_us']:.1f}; a batch's decision at n=1 takes"
            f" {found['vs_empty_call']:.1f} of it (aim {AIMS['vs_empty_call']:g}), by the reference"
            f" {found['vs_empty_call_reference']:.1f}"
        )
        yield ""
    if "scheduler" in report:
        yield "scheduler, schedule() + update_from_output(): us, median and p99"
        yield f"{'n':>6}{'base':>18}{'ours':>18}{'added':>9}{'share':>8}{'drafts of base, ours':>22}{'steps':>7}"
        for n, row in report["scheduler"].items():
            times = "".join(f"{row[name]['median_us']:>9.1f}{row[name]['p99_us']:>9.1f}" for name in ("base", "ours"))
            drafts = ", ".join(f"{row[name]['drafts_of_a_request']:.2f}" for name in ("base", "ours"))
            yield f"{n:>6}{times}{row['added_us']:>9.1f}{row['share']:>8.1%}{drafts:>22}{row['steps']:>7}"
        yield f"aims: {AIMS['scheduler_us_1']:g} us added at n=1, a share of {AIMS['scheduler_share_256']:.0%} at n=256"
        yield ""
    if "startup" in report:
        yield f"startup at max_num_seqs={STARTED}{'s':>8}{'MB':>8}"
        for name, row in report["startup"].items():
            yield f"{name:<27}{row['seconds']:>8.1f}{row['megabytes']:>8.0f}"
        yield f"aims: {AIMS['start_seconds']:g} s, {AIMS['start_megabytes']:g} MB"
        yield ""
    if "compilations" in found:
        yield f"compilations while serving: {found['compilations']} (aim 0)"
    if "different_choices" in found:
        yield f"choices of the reference other than the oracle's: {found['different_choices']}"


def main() -> None:
    """Measures the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    parser.add_argument("--quick", action="store_true", help="fewer numbers of requests, and a fifth of the steps")
    parser.add_argument("--sizes", type=int, nargs="*", help=f"requests of a decision (default: {SIZES})")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, help="of decision (default: all)")
    parser.add_argument("--seconds", type=float, help="for each number of requests, half of a scheduler's (default: 3)")
    options = parser.parse_args()
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"{', '.join(unknown)}: there are {', '.join(PARTS)}")
    options.sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    options.seconds = options.seconds or (0.6 if options.quick else 3.0)
    if min(options.sizes) < 1:
        parser.error("--sizes must be at least 1")
    report = {name: PARTS[name](options) for name in options.parts or PARTS}
    found = summary(report)
    if options.json:
        print(json.dumps({**found, "aims": AIMS, "raw": report}, indent=2))
        return
    for line in tables(report, found):
        print(line)


if __name__ == "__main__":
    main()
