"""How well each cost form predicts public measurements that its fit has not seen.

Every form is fitted by least squares of (predicted - measured) / measured, and judged by the mean of
|predicted - measured| / measured, in percent, over what was left out:

- whole steps of Qwen3.6-35B-A3B on one B300 (vLLM 0.20.1, 256 experts, top 8), one batch size left out at a time;
- single MoE operators on five accelerators in three frameworks, one token count left out at a time;
- distinct experts that neighbouring tokens of real text touch, where all counts are fitted: they are too few.
"""

import argparse
import csv
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import numpy as np
from jaxtyping import Float, Int

from akjax import (
    AbstractCostModel,
    AbstractExpertUnion,
    Constant,
    Context,
    DispersedPower,
    DispersedTokens,
    DiverseTokens,
    ExpertReads,
    IndependentTokens,
    Padded,
    Parameter,
    PerToken,
    PowerTokens,
    StepFeatures,
    Sum,
    Unfilled,
    as_parameter,
    dense_cost,
    reference_cost,
)
from akjax.arrays import Array
from akjax.fits.many import fit_many
from measuring import say

# The model of the whole steps, as its maker says.
QWEN_EXPERTS, QWEN_TOP_K = 256, 8
MOST_REQUESTS = 32
# The MoE operators are a draw of those with all token counts up to this one.
MOST_TOKENS = 512
# The relative noise of a time that the reference's filter assumes.
NOISE = 0.05
FRAMEWORKS = ("sglang", "trtllm", "vllm")

# Distinct experts of a layer of 128 with top 6 that 1, 2, 4, 9 and 17 neighbouring tokens touch together: of one
# request's code, of one request's prose, and of tokens drawn independently. Published figures, as collected for this
# project from public threads on adaptive speculative decoding (November 2026).
DISTINCT_LAYER = (128, 6)
DISTINCT_TOKENS = (1.0, 2.0, 4.0, 9.0, 17.0)
DISTINCT = {
    "code": (6.0, 10.25, 17.46, 31.75, 48.04),
    "prose": (6.0, 10.11, 17.05, 30.64, 46.56),
    "independent tokens": (6.0, 11.30, 20.60, 38.80, 58.97),
}


class SaturatingTokens(AbstractExpertUnion):
    """`E * x / (1 + x**a)**(1/a)` with `x = top_k * tokens / E`: a rule of no derivation, to compare with.

    Attributes:
        sharpness: a.
        experts: routed experts of a layer (E).
        top_k: experts a token picks.
    """

    sharpness: Float[Array, ""] = eqx.field(converter=as_parameter)
    experts: int = eqx.field(static=True)
    top_k: int = eqx.field(static=True)

    def __call__(self, step: StepFeatures) -> Float[Array, "*steps"]:
        """The union."""
        x = self.top_k * step.tokens / self.experts
        return self.experts * x / (1 + x**self.sharpness) ** (1 / self.sharpness)

    def parameters(self) -> tuple[Parameter, ...]:
        """The sharpness."""
        return (Parameter("sharpness", "1", variance=1.0, lower=0.3, upper=8.0),)


Union = Callable[[int, int], AbstractExpertUnion]

UNIONS: Mapping[str, Union] = {
    "independent tokens": IndependentTokens,
    "diversity (the reference's)": lambda experts, top_k: DiverseTokens(1.0, experts, top_k),
    "power": lambda experts, top_k: PowerTokens(0.9, experts, top_k),
    "dispersion": lambda experts, top_k: DispersedTokens(0.2, experts, top_k),
    "dispersion and power": lambda experts, top_k: DispersedPower(0.2, 0.95, experts, top_k),
    "saturating": lambda experts, top_k: SaturatingTokens(1.5, experts, top_k),
}


# Whole steps.


class DecodeSteps(NamedTuple):
    """Steps that only decode, one token for each request.

    Attributes:
        requests: decoding in each.
        context: KV tokens that each reads.
        ms: that each took.
    """

    requests: Int[np.ndarray, " steps"]
    context: Float[np.ndarray, " steps"]
    ms: Float[np.ndarray, " steps"]

    def where(self, kept: np.ndarray) -> "DecodeSteps":
        """Those of them."""
        return DecodeSteps(self.requests[kept], self.context[kept], self.ms[kept])

    @property
    def features(self) -> StepFeatures:
        """What a cost form may know of them."""
        tokens = self.requests.astype(np.float64)
        return StepFeatures(tokens=tokens, requests=tokens, context=self.context)


def decode_steps(folder: Path, model: str, table: str) -> DecodeSteps:
    """The steps of a model's run on one GPU whose neighbours are pure decodes of the same batch.

    A step next to another kind of step is not timed alone: the engine schedules ahead of the one that runs.
    """
    with (folder / "runs.csv").open() as file:
        (run,) = [row["run_id"] for row in csv.DictReader(file) if row["model"] == model and row["tp"] == "1"]
    with (folder / table).open() as file:
        rows = [row for row in csv.DictReader(file) if row["run_id"] == run]

    def kind(row: dict[str, str]) -> tuple[str, str]:
        return row["phase"], row["decode_reqs"]

    kept = [
        (int(row["decode_reqs"]), float(row["decode_kv"]), float(row["latency_ms"]))
        for before, row, after in zip(rows, rows[1:], rows[2:], strict=False)
        if row["phase"] == "decode"
        and kind(before) == kind(row) == kind(after)
        and int(row["decode_reqs"]) <= MOST_REQUESTS
    ]
    requests, context, ms = (np.asarray(column) for column in zip(*kept, strict=True))
    return DecodeSteps(requests, context, ms)


def captured_sizes(steps: DecodeSteps) -> tuple[int, ...]:
    """The sizes that steps seem to be padded to, from where the time jumps between one size and the next.

    Of each size the median time is taken, less what its context costs by the slope within the sizes. The rises from one
    size to the next (of the logarithm) are parted into two groups that vary least within (Otsu, IEEE Trans. Systems,
    Man and Cybernetics 9, 1979): the upper group are jumps. If a size between the two was not seen, the roundest number
    that fits is the captured one, that with the most factors of 2. What follows the last jump ends at an unknown size:
    the first that continues the distance of the two before it. A single token is always captured.
    """
    sizes = np.unique(steps.requests)
    at = np.searchsorted(sizes, steps.requests)
    counts = np.bincount(at)
    context, ms = (x - (np.bincount(at, x) / counts)[at] for x in (steps.context, steps.ms))
    slope = np.sum(context * ms / steps.ms**2) / np.sum(context**2 / steps.ms**2)
    rest = steps.ms - slope * steps.context
    rises = np.diff(np.log([np.median(rest[at == number]) for number in range(len(sizes))]))
    ordered = np.sort(rises)
    within = [
        part * np.var(ordered[:part]) + np.var(ordered[part:]) * (len(ordered) - part)
        for part in range(1, len(ordered))
    ]
    jump = ordered[1 + int(np.argmin(within))]
    found = {1} | {
        max(range(low, high), key=_roundness)
        for low, high, rise in zip(sizes, sizes[1:], rises, strict=False)
        if rise >= jump
    }
    last = max(found)
    distance = last - max(found - {last}, default=0)
    while last < sizes[-1]:
        last += distance
    return tuple(sorted(found | {last}))


def _roundness(number: int) -> int:
    return number & -number


def qwen_forms(sizes: tuple[int, ...]) -> dict[str, AbstractCostModel]:
    """The forms for whole steps, given the captured sizes."""
    layer = {"experts": QWEN_EXPERTS, "top_k": QWEN_TOP_K}

    def reference() -> AbstractCostModel:
        return reference_cost(3.0, 0.03, 0.02, **layer)

    def reads(union: Union) -> AbstractCostModel:
        return Constant(3.0) + ExpertReads(0.03, union(QWEN_EXPERTS, QWEN_TOP_K)) + PerToken(0.02)

    def whole(model: AbstractCostModel) -> AbstractCostModel:
        return Unfilled(Padded(model, sizes), 1.03, sizes) + Context(5e-6)

    return {
        "straight line": dense_cost(3.0, 0.02),
        "reference": reference(),
        "reference, padded": Padded(reference(), sizes),
        "reference, padded, context": Padded(reference(), sizes) + Context(5e-6),
        "power, padded, context": Padded(reads(UNIONS["power"]), sizes) + Context(5e-6),
        "reference, padded, unfilled, context": whole(reference()),
        "independent, padded, unfilled, context": whole(reads(UNIONS["independent tokens"])),
        "dispersion, padded, unfilled, context": whole(reads(UNIONS["dispersion"])),
        "power, padded, unfilled, context": whole(reads(UNIONS["power"])),
    }


def by_size(steps: DecodeSteps, predicted: Float[np.ndarray, " steps"]) -> dict[int, float]:
    """Mean absolute error of each batch size, in percent."""
    errors = 100 * np.abs(predicted / steps.ms - 1)
    return {int(size): float(np.mean(errors[steps.requests == size])) for size in np.unique(steps.requests)}


def of_qwen(folder: Path) -> dict[str, Any]:
    """Errors at batch sizes left out, by form and size, and the errors of each size's own median."""
    steps = decode_steps(folder, "Qwen3.6-35B-A3B", "qwen36_moe.csv")
    all_sizes = [int(size) for size in np.unique(steps.requests)]
    say(f"{len(steps.ms):,} decode steps of {len(all_sizes)} batch sizes")
    # Folds with the same captured sizes are fitted together.
    folds: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for left_out in all_sizes:
        folds[captured_sizes(steps.where(steps.requests != left_out))].append(left_out)
    for sizes, left_out in folds.items():
        say(f"  captured sizes found with one batch size left out, {len(left_out)} of {len(all_sizes)} times: {sizes}")
    errors: dict[str, dict[int, float]] = {}
    for name in qwen_forms((1,)):
        started = time.perf_counter()
        errors[name] = {}
        for sizes, left_out in folds.items():
            weights = (steps.requests != np.asarray(left_out)[:, None]).astype(np.float64)
            ms = np.broadcast_to(steps.ms, weights.shape)
            fits = fit_many(qwen_forms(sizes)[name], steps.features, ms, weights, searches=2)
            for size, predicted in zip(left_out, fits.predicted(steps.features, ms.shape), strict=True):
                errors[name][size] = by_size(steps, predicted)[size]
        say(f"  {name}: {_mean(errors[name]):.2f}%  ({time.perf_counter() - started:.0f} s)")
    medians = np.asarray([np.median(steps.ms[steps.requests == size]) for size in all_sizes])
    floor = by_size(steps, medians[np.searchsorted(all_sizes, steps.requests)])
    return {
        "steps": len(steps.ms),
        "errors": errors,
        "floor": floor,
    }


def _mean(errors: dict[int, float]) -> float:
    return float(np.mean(list(errors.values())))


# MoE operators.


class Series(NamedTuple):
    """Microseconds of one MoE operator by the number of its tokens.

    Attributes:
        layer: its experts, and the top_k of a token.
        tokens: ascending.
        us: at each.
    """

    layer: tuple[int, int]
    tokens: tuple[float, ...]
    us: tuple[float, ...]


def moe_series(folder: Path) -> list[Series]:
    """Those that were measured at every one of the token counts up to the limit."""
    found = []
    for framework in FRAMEWORKS:
        with (folder / f"{framework}.csv").open() as file:
            rows = list(csv.DictReader(file))
        columns = {name: int(name[1:]) for name in rows[0] if name[0] == "t" and name[1:].isdigit()}
        columns = {name: tokens for name, tokens in columns.items() if tokens <= MOST_TOKENS}
        found += [
            Series(
                (int(row["num_experts"]), int(row["topk"])),
                tuple(float(tokens) for tokens in columns.values()),
                tuple(float(row[name]) for name in columns),
            )
            for row in rows
            if all(row[name] for name in columns)
        ]
    return found


def left_out_errors(
    series: list[Series], union: Union | None, noise: float = 0.0
) -> Float[np.ndarray, "series points"]:
    """Absolute errors in percent at each interior token count, by a fit to the others.

    Args:
        series: to fit, one by one.
        union: the rule of the distinct experts, None for a straight line.
        noise: that holds the rule's parameters to their priors, 0 for none that are held.
    """
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, one in enumerate(series):
        groups[one.layer].append(number)
    interior = np.arange(1, len(series[0].tokens) - 1)
    errors = np.empty((len(series), len(interior)))
    for layer, numbers in groups.items():
        us = np.repeat([series[number].us for number in numbers], len(interior), axis=0)
        weights = np.ones(us.shape)
        left_out = np.arange(len(us)), np.tile(interior, len(numbers))
        weights[left_out] = 0.0
        reads = () if union is None else (ExpertReads(3.0, union(*layer)),)
        model = Sum((Constant(30.0), *reads, PerToken(0.3)))
        tokens = np.asarray(series[numbers[0]].tokens)
        steps = StepFeatures(tokens=tokens, requests=np.ones_like(tokens))
        fits = fit_many(model, steps, us, weights, noise=noise, searches=3)
        predicted = fits.predicted(steps, us.shape)[left_out]
        errors[numbers] = 100 * np.abs(predicted / us[left_out] - 1).reshape(len(numbers), -1)
    return errors


def between_neighbours(series: list[Series]) -> Float[np.ndarray, "series points"]:
    """The same of a straight line between the two token counts beside the one left out, which knows no union."""
    tokens, us = np.asarray([one.tokens for one in series]), np.asarray([one.us for one in series])
    share = (tokens[:, 1:-1] - tokens[:, :-2]) / (tokens[:, 2:] - tokens[:, :-2])
    return 100 * np.abs((us[:, :-2] + share * (us[:, 2:] - us[:, :-2])) / us[:, 1:-1] - 1)


def of_moe(folder: Path, draws: int, seed: int) -> dict[str, dict[str, float]]:
    """By rule of the union, the median and the mean over series of the mean error at token counts left out."""
    every = moe_series(folder)
    chosen = np.random.default_rng(seed).choice(len(every), min(draws, len(every)), replace=False)
    series = [every[number] for number in chosen]
    say(f"{len(series)} of {len(every):,} MoE operators, {len(series[0].tokens) - 2} token counts left out of each")
    rules: dict[str, tuple[Union | None, float]] = {"straight line": (None, 0.0)}
    rules |= {name: (union, 0.0) for name, union in UNIONS.items()}
    # Five parameters for sixteen times: held to their priors, about the starts above, as if the times had that noise.
    rules["dispersion and power, held to priors"] = UNIONS["dispersion and power"], NOISE
    found = {}
    for name, (union, noise) in rules.items():
        started = time.perf_counter()
        found[name] = left_out_errors(series, union, noise)
        say(f"  {name}: {np.median(found[name].mean(1)):.2f}%  ({time.perf_counter() - started:.0f} s)")
    found["between neighbours, no form"] = between_neighbours(series)
    return {
        name: {"median": float(np.median(errors.mean(1))), "mean": float(np.mean(errors))}
        for name, errors in found.items()
    }


# Distinct experts.


def of_distinct() -> dict[str, dict[str, float]]:
    """By rule of the union and kind of tokens, the mean error; and over all kinds."""
    counts = np.asarray(list(DISTINCT.values()))
    steps = StepFeatures(tokens=np.asarray(DISTINCT_TOKENS), requests=np.ones(len(DISTINCT_TOKENS)))
    found = {}
    for name, union in UNIONS.items():
        predicted = _fitted_unions(union, steps, counts)
        errors = 100 * np.abs(predicted / counts - 1)
        found[name] = dict(zip(DISTINCT, errors.mean(1).tolist(), strict=True))
        found[name] |= {"mean": float(errors.mean()), "worst": float(errors.max())}
    return found


class Touched(AbstractCostModel):
    """A union as if each expert cost one millisecond, so that nothing but the union is fitted."""

    union: AbstractExpertUnion

    def __call__(self, step: StepFeatures) -> Float[Array, "*steps"]:
        """The union."""
        return self.union(step)

    def parameters(self) -> tuple[Parameter, ...]:
        """The union's."""
        return self.union.parameters()


def _fitted_unions(union: Union, steps: StepFeatures, counts: Float[np.ndarray, "kinds tokens"]) -> Any:
    model = Touched(union(*DISTINCT_LAYER))
    if not model.parameters():
        return np.broadcast_to(np.asarray(model(steps)), counts.shape)
    return fit_many(model, steps, counts, np.ones(counts.shape)).predicted(steps, counts.shape)


def tables(report: dict[str, Any]) -> str:
    """The report for people."""
    qwen = report["qwen"]
    lines = [
        f"whole steps, {qwen['steps']:,} of them: error at the batch size left out, %",
        f"{'':<42}{'mean':>7}{'median':>8}{'worst':>7}  of the sizes",
    ]
    for name, errors in [*qwen["errors"].items(), ("floor: each size's own median", qwen["floor"])]:
        of_sizes = list(errors.values())
        lines.append(f"{name:<42}{np.mean(of_sizes):>7.2f}{np.median(of_sizes):>8.2f}{np.max(of_sizes):>7.1f}")
    lines += [
        "",
        f"MoE operators: error at the token count left out, %\n{'':<42}{'median':>7}{'mean':>8}  of the series",
    ]
    lines += [f"{name:<42}{row['median']:>7.2f}{row['mean']:>8.2f}" for name, row in report["moe"].items()]
    kinds = [*DISTINCT, "mean", "worst"]
    lines += [
        "",
        "distinct experts, all counts fitted: mean error, %",
        f"{'':<30}" + "".join(f"{kind:>20}" for kind in kinds),
    ]
    lines += [
        f"{name:<30}" + "".join(f"{row[kind]:>20.2f}" for kind in kinds) for name, row in report["distinct"].items()
    ]
    return "\n".join(lines)


def main() -> None:
    """Runs the bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of tables")
    parser.add_argument("--series", type=int, default=160, help="MoE operators to draw")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument(
        "--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data", help="folder of the measurements"
    )
    options = parser.parse_args()
    if options.series < 1:
        parser.error(f"--series must be at least 1, given {options.series}")
    steps, operators = options.data / "aic_fpm_steps", options.data / "aic_moe_op"
    needed = [steps / "runs.csv", steps / "qwen36_moe.csv", *(operators / f"{name}.csv" for name in FRAMEWORKS)]
    missing = [str(path) for path in needed if not path.exists()]
    if missing:
        parser.error(f"the measurements are not there: {', '.join(missing)}; say with --data which folder holds them")
    report = {
        "qwen": of_qwen(steps),
        "moe": of_moe(operators, options.series, options.seed),
        "distinct": of_distinct(),
    }
    if options.json:
        print(json.dumps(figures(report), indent=2))
        return
    print(tables(report))


def figures(report: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The report by the names of its figures, each by form."""
    return {
        "qwen_cv_percent": {name: _mean(errors) for name, errors in report["qwen"]["errors"].items()},
        "qwen_floor_percent": {"each size's own median": _mean(report["qwen"]["floor"])},
        "moe_op_loo_percent": {name: row["median"] for name, row in report["moe"].items()},
        "distinct_experts_percent": {name: row["mean"] for name, row in report["distinct"].items()},
    }


if __name__ == "__main__":
    main()
