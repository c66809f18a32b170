"""How well draft lengths are chosen, in a bank of simulated worlds: every fixed k, tuned, reference, default, oracle.

Prints, for each world, each policy's tokens per ms (per ms of a request's time where requests come on their own)
relative to the best fixed k of that world, the mean over seeds.
"""

import argparse
import csv
import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from akjax import Controller, default_controller, reference_controller, reference_cost
from akjax.cost import UNEVEN, AbstractCostModel, dense_cost, predicted_ms, serving_cost
from akjax.features import StepFeatures
from akjax.simulate import (
    AbstractSimPolicy,
    Controlled,
    FixedLength,
    OpenLoop,
    Oracle,
    Result,
    simulate,
    tune_by_batch,
)
from akjax.simulate.bank import DRAFT_LIMIT, LEVELS, Case, bank, foreign_prior, named
from measuring import say

MAX_STEPS = 40_000
# How many requests of the recorded arrivals are taken, and every how many-th: thinned to what one engine serves.
ARRIVALS, THINNING = 400, 8


def default_start(case: Case, uneven: float | None = None) -> AbstractCostModel:
    """The cost model that the default policy starts from."""
    return serving_cost(
        *case.prior, lengths=LEVELS, experts=case.experts, top_k=case.top_k, sizes=case.sizes, uneven=uneven
    )


def reference_start(case: Case) -> AbstractCostModel:
    """The cost model that the reference starts from."""
    base, per_expert, per_token = case.prior
    if case.experts is None or case.top_k is None:
        return dense_cost(base, per_token)
    return reference_cost(base, per_expert, per_token, experts=case.experts, top_k=case.top_k)


def controlled(controller: Controller, start: AbstractCostModel) -> Controlled:
    """The controller, told what the scheduler would tell it."""
    return Controlled(
        controller,
        start,
        counts_unobserved=controller.policy.counts_unobserved,
        prefill_teaches=controller.learner.expects_exact_times,
    )


def adaptive(case: Case) -> dict[str, AbstractSimPolicy]:
    """The policies that choose while they serve."""
    positive = LEVELS[1:]
    return {
        "reference": controlled(reference_controller(draft_limit=DRAFT_LIMIT, levels=positive), reference_start(case)),
        "default": controlled(default_controller(draft_limit=DRAFT_LIMIT, levels=LEVELS), default_start(case)),
        "per request": controlled(
            default_controller(draft_limit=DRAFT_LIMIT, levels=LEVELS, per_request=True),
            default_start(case, uneven=UNEVEN),
        ),
        "oracle": Oracle(LEVELS),
    }


def scores(case: Case, result: Result) -> Float[np.ndarray, "*lanes"]:
    """What a policy is judged by, of each run."""
    return result.tokens_per_request_ms if case.is_open_loop else result.tokens_per_ms


def recorded_arrivals(folder: Path) -> OpenLoop | None:
    """Every `THINNING`-th request of the Azure conversation trace of 2023, if the file is there."""
    path = folder / "azure_llm_2023" / "conv.csv"
    if not path.exists():
        return None
    with path.open() as file:
        rows = list(csv.DictReader(file))[: ARRIVALS * THINNING : THINNING]
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    return OpenLoop(
        (np.asarray(times) - times[0]) * 1e3,
        np.asarray([int(row["ContextTokens"]) for row in rows]),
        np.maximum([int(row["GeneratedTokens"]) for row in rows], 2),
    )


def batch_sizes(case: Case) -> list[int]:
    """The steady batch sizes that a list by batch size is tuned at."""
    return [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= case.scenario.slots]


class Bench:
    """Runs cases and keeps count of the simulated steps."""

    def __init__(self, seeds: int) -> None:
        """With that many seeds each."""
        self.seeds: Int[np.ndarray, " seeds"] = np.arange(seeds)
        self.steps = 0
        self.seconds = 0.0

    def run(self, case: Case, policy: AbstractSimPolicy, **options: Any) -> Result:
        """The policy in the case, once for each seed."""
        kept: dict[str, Any] = {"max_steps": MAX_STEPS, "threads": 2} | options
        simulate(case.scenario, policy, self.seeds, **(kept | {"max_steps": 1}))  # compiles
        started = time.perf_counter()
        result = simulate(case.scenario, policy, self.seeds, **kept)
        self.seconds += time.perf_counter() - started
        self.steps += int(result.steps.sum())
        if not result.finished.all():
            say(f"    {case.name}: a run of {type(policy).__name__} did not finish in {kept['max_steps']} steps")
        return result

    def row(self, case: Case) -> dict[str, Any]:
        """A case's row of the table."""
        fixed = scores(case, self.run(case, FixedLength(np.asarray(LEVELS)), stacked_policies=True))
        best = int(np.argmax(fixed.mean(1)))

        def relative(score: Float[np.ndarray, " seeds"]) -> float:
            return float(np.mean(score / fixed[best]))

        tuned = tune_by_batch(case.scenario, LEVELS, batch_sizes(case), self.seeds[:4], max_steps=400, threads=2)
        row: dict[str, Any] = {
            "case": case.name,
            "best_fixed": LEVELS[best],
            "fixed": {str(k): relative(score) for k, score in zip(LEVELS, fixed, strict=True)},
            "tuned": relative(scores(case, self.run(case, tuned))),
        }
        for name, policy in adaptive(case).items():
            result = self.run(case, policy)
            row[name] = relative(scores(case, result))
            if name == "default":
                ratio = scores(case, result) / fixed[best]
                row["default_standard_error"] = float(np.std(ratio, ddof=1) / np.sqrt(len(ratio)))
                row["steps"] = float(result.steps.mean())
                row["switches_per_50_steps"] = float(50 * np.mean(result.totals.switches / result.totals.busy_steps))
        return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that the table comes down to."""
    logs = {str(k): np.mean([np.log(row["fixed"][str(k)]) for row in rows]) for k in LEVELS}
    single = max(logs, key=lambda k: logs[k])

    def bank_of(name: str) -> float:
        return float(np.exp(np.mean([np.log(row[name] / row["fixed"][single]) for row in rows])))

    worst = min(rows, key=lambda row: row["default"])
    return {
        "worst_vs_best_fixed": worst["default"],
        "worst_case": worst["case"],
        "bank_vs_single_fixed": bank_of("default"),
        "single_fixed": int(single),
        "vs_oracle": float(np.mean([row["default"] / row["oracle"] for row in rows])),
        "reference": {
            "worst_vs_best_fixed": min(row["reference"] for row in rows),
            "bank_vs_single_fixed": bank_of("reference"),
            "vs_oracle": float(np.mean([row["reference"] / row["oracle"] for row in rows])),
        },
    }


def of_prior(bench: Bench, cases: tuple[Case, ...]) -> dict[str, Any]:
    """Foreign priors: the prediction after 70 steps, and the tokens lost against a right prior."""
    right = foreign_prior(1.0)
    found = {}
    known = scores(right, bench.run(right, adaptive(right)["default"]))
    for scale in (0.1, 0.3, 3.0, 10.0):
        case = named(f"prior x{scale:g}", cases)
        policy = adaptive(case)["default"]
        kept = scores(case, bench.run(case, policy)) / known
        short = bench.run(case, policy, max_steps=70)
        found[f"x{scale:g}"] = {
            "error_after_70_steps": float(
                np.mean([_steady_error(case, short, seed) for seed in range(len(bench.seeds))])
            ),
            "least_taught": int(short.learned.cost.taught.min()),
            "tokens_vs_right_prior": float(kept.mean()),
        }
    return found


def _steady_error(case: Case, result: Result, seed: int) -> float:
    """Relative error of the learned cost at the draft length that the run ended with, four requests decoding."""
    model = jax.tree.map(lambda leaf: leaf[seed], result.learned.cost.belief.model)
    length = float(result.totals.draft_length[seed])
    step = StepFeatures(*(np.float64(x) for x in (4 * (length + 1), 4, length, 4 * 400)), np.float64(0), np.float64(0))
    with jax.enable_x64(True):
        true, learned = (float(predicted_ms(m, step)) for m in (case.scenario.times.cost, model))
    return abs(learned / true - 1.0)


def of_collapse(bench: Bench, cases: tuple[Case, ...]) -> dict[str, float]:
    """Collapse of acceptance: steps until the least length is held, and after it until the goodput is back."""
    case = named("collapse and recovery", cases)
    result = bench.run(case, adaptive(case)["default"], max_steps=8000, traced=True)
    down, up = [], []
    trace = result.trace
    assert trace is not None
    for seed in range(len(bench.seeds)):
        real = trace.real[seed]
        progress = np.cumsum(trace.step.tokens[seed]) / case.scenario.work_tokens
        length = trace.draft_length[seed]
        start, end = (int(np.searchsorted(progress[real], edge)) for edge in (1 / 3, 0.5))
        before = float(np.mean(length[start - 200 : start]))
        down.append(_first(length[start:end] <= 0))
        # Back is where the mean of 20 steps is at least three quarters of what it was before.
        means = np.convolve(length[end : end + 2000], np.ones(20) / 20, mode="valid")
        up.append(_first(means >= 0.75 * before))
    return {
        "steps_to_lowest_median": float(np.median(down)),
        "steps_to_lowest_worst": float(np.max(down)),
        "steps_to_recover_median": float(np.median(up)),
        "steps_to_recover_worst": float(np.max(up)),
    }


def _first(found: Any) -> float:
    return float(np.argmax(found)) if np.any(found) else float("inf")


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for people."""
    names = ("tuned", "reference", "default", "per request", "oracle")
    lines = [f"{'relative to the best fixed k':<28}{'best k':>7}" + "".join(f"{name:>13}" for name in names)]
    lines += [
        f"{row['case']:<28}{row['best_fixed']:>7}" + "".join(f"{row[name]:>13.3f}" for name in names) for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Runs the bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of tables")
    parser.add_argument("--seeds", type=int, default=20, help="runs of each policy in each world")
    parser.add_argument("--cases", nargs="*", help="names of worlds, if not all")
    parser.add_argument(
        "--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data", help="folder of recorded arrivals"
    )
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error(f"--seeds must be at least 2, given {options.seeds}")
    bench = Bench(options.seeds)
    cases = bank(recorded_arrivals(options.data))
    chosen = cases if options.cases is None else tuple(named(name, cases) for name in options.cases)
    rows = []
    for number, case in enumerate(chosen, 1):
        started = time.perf_counter()
        rows.append(bench.row(case))
        row, seconds = rows[-1], time.perf_counter() - started
        figures = ", ".join(f"{name} {row[name]:.3f}" for name in ("default", "reference", "oracle"))
        say(f"{number:>3}/{len(chosen)} {case.name:<28} of k={row['best_fixed']}: {figures}  ({seconds:.0f} s)")
    report = summary(rows)
    if options.cases is None:
        report["priors"] = of_prior(bench, cases)
        report["collapse"] = of_collapse(bench, cases)
        hovering = next(row for row in rows if row["case"] == "hovering batch size")
        report["hovering_switches_per_50_steps"] = hovering["switches_per_50_steps"]
    report["steps"] = bench.steps
    report["steps_per_second"] = bench.steps / bench.seconds
    report["table"] = rows
    if options.json:
        print(json.dumps(report, indent=2))
        return
    print(table(rows))
    del report["table"]
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
