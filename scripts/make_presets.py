"""Makes the fits that come with akjax, from published figures, and says how each was obtained.

Three kinds:

- coefficients as they were published;
- fits to published tables of step times, too short to fit freely: the most likely parameters, given the default's
  proportions with the form's own spreads, any speed of the machine, and 2% of noise, all in logarithms. That is what
  serving would come to believe of such steps. A table's entries are means over unknown numbers of them, so no standard
  errors are given, and learning starts as unsure as from coefficients;
- a fit to thousands of steps (`akjax.fits.fit_cost`), with its errors.

All have the form that serving learns. What it says of each draft length cannot be told here from how it grows with
tokens, so its factors at draft lengths stay near 1 and out of the file.
"""

import argparse
import csv
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from bench_accuracy import DecodeSteps, captured_sizes, decode_steps
from jax.flatten_util import ravel_pytree
from jaxtyping import Float
from scipy.optimize import least_squares

from akjax import AbstractCostModel, StepFeatures
from akjax.fit_file import FitFile, FittedParameter
from akjax.fits import fit_cost
from akjax.fits.fit_file import fit_file_of, write_fit
from akjax.forms import FORMS, Engine

FORM = "serving"
# Of a table's entries about the form.
TABLE_NOISE = 0.02
THREADS = "published figures, collected from public threads on adaptive speculative decoding, November 2026"
LLAMA_CPP = (
    "github.com/ggml-org/llama.cpp, benches/dgx-spark.md at 4c7e9893 (build 6918, 2025-11-02, MIT): llama-batched-bench"
    " on GB10, {model}, batches of 1 to 32 at prompts of 512, 4096 and 8192"
)
VLLM_STEPS = (
    "github.com/ai-dynamo/aiconfigurator, branch simonec/layerwise-moe at f4c378da (2026-06, Apache-2.0),"
    " fpm_golden_runs: {model} on a B300, vLLM 0.20.1, TP 1, decode steps of 1 to 32 requests whose neighbours are"
    " decodes of the same batch"
)
# Of tables that no machine is known of.
UNKNOWN = "; the machine is not said"


class Table(NamedTuple):
    """Step times as they were published.

    Attributes:
        experts: routed experts of a layer; None for a dense model.
        top_k: experts a token picks.
        steps: what each entry is of.
        ms: at each.
        source: of the figures.
    """

    experts: int | None
    top_k: int | None
    steps: StepFeatures
    ms: tuple[float, ...]
    source: str


def one_request(experts: int, top_k: int, ms: dict[int, float], source: str) -> Table:
    """Of a single request, by its verified tokens."""
    tokens = np.asarray([*ms], np.float64)
    return Table(experts, top_k, StepFeatures(tokens, np.ones_like(tokens)), tuple(ms.values()), source)


def by_batch(ms: dict[int, tuple[float, ...]], drafts: tuple[int, ...], source: str) -> Table:
    """Of a dense model, by batch and the drafts of each request, as many as are made for the next step."""
    cells = [(batch, draft) for batch in ms for draft in drafts]
    requests, drafting = np.asarray(cells, np.float64).T
    steps = StepFeatures(requests * (1 + drafting), requests, drafting)
    return Table(None, None, steps, tuple(value for row in ms.values() for value in row), source)


TABLES = {
    "glm-5.3-flash-gb10-tp4": one_request(
        288, 8, {2: 29.7, 3: 33.1, 4: 36.5, 5: 39.8, 6: 43.1, 7: 46.0, 8: 48.9}, f"GLM-5.3-Flash, TP 4, GB10: {THREADS}"
    ),
    "nemotron-30b-a3b-m5-max": one_request(
        128, 6, {1: 8.47, 2: 13.49, 3: 15.64, 5: 20.67, 8: 28.13}, f"Nemotron 30B-A3B on an M5 Max: {THREADS}"
    ),
    "glm-4.5-air": one_request(
        128, 8, {1: 5.88, 2: 17.93, 3: 20.58, 4: 22.89, 6: 27.05, 8: 30.07}, f"GLM-4.5-Air: {THREADS}{UNKNOWN}"
    ),
    "llama-8b-eagle": by_batch(
        {
            1: (6.52, 7.37, 8.84, 10.33),
            4: (6.60, 7.47, 8.98, 10.40),
            16: (6.90, 7.85, 9.52, 11.20),
            64: (7.77, 9.66, 13.50, 16.83),
            256: (14.49, 27.14, 41.85, 57.40),
        },
        (0, 1, 3, 5),
        f"Llama 8B with EAGLE: {THREADS}{UNKNOWN}",
    ),
}
"""The published tables that are short enough to stand here."""

# The names of llama.cpp's models in its table.
GB10 = {
    "gpt-oss-20b-gb10": "gpt-oss-20b-MXFP4",
    "gpt-oss-120b-gb10": "gpt-oss-120b-MXFP4",
    "qwen3-coder-30b-a3b-gb10": "Qwen3-Coder-30B-A3B-Q8_0",
}
# The models of vLLM's steps: their rows, their table, experts and top_k.
B300 = {
    "qwen3.6-35b-a3b-b300": ("Qwen3.6-35B-A3B", "qwen36_moe.csv", 256, 8),
    "qwen3-32b-b300": ("Qwen3-32B", "qwen32_dense.csv", None, None),
}


def gb10_tables(folder: Path) -> dict[str, Table]:
    """Of llama.cpp on GB10: each step of a batch reads its prompts, and half of the 32 tokens that come after."""
    with (folder / "batched_bench.csv").open() as file:
        rows = list(csv.DictReader(file))
    tables = {}
    for name, model in GB10.items():
        own = [row for row in rows if row["model"] == model]
        batch = np.asarray([float(row["batch"]) for row in own])
        context = batch * (np.asarray([float(row["prompt_per_seq"]) for row in own]) + 16.0)
        tables[name] = Table(
            int(own[0]["num_experts"]),
            int(own[0]["topk"]),
            StepFeatures(batch, batch, context=context),
            tuple(float(row["step_ms"]) for row in own),
            LLAMA_CPP.format(model=model),
        )
    return tables


def from_coefficients() -> FitFile:
    """The coefficients that serving starts with by default."""
    engine = Engine(lengths=(0,), experts=288, top_k=8)
    values = {"base": engine.base, "per_expert": engine.per_expert, "diversity": 1.0, "per_token": engine.per_token}
    source = "the reference algorithm's coefficients, fitted by its author on GLM-5.3-Flash, TP 4, GB10"
    parameters = tuple(FORMS[FORM](engine).parameters())
    units = {parameter.name: parameter.unit for parameter in parameters}
    return FitFile(
        form=FORM,
        engine=_as_file(engine),
        parameters=[_unsure(name, units[name], value) for name, value in values.items()],
        covariance=np.zeros((len(values), len(values))).tolist(),
        noise=0.0,
        error_percent=0.0,
        rows=0,
        logs=[source],
        findings=["published coefficients: no errors are known of them"],
        created=time.time(),
        versions={"akjax": version("akjax")},
    )


def from_table(table: Table) -> FitFile:
    """A fit to a published table."""
    start, engine = _start(table.ms, table.experts, table.top_k)
    ms = np.asarray(table.ms)
    values, predicted = _most_likely(start, table.steps, ms)
    kept = [
        _unsure(parameter.name, parameter.unit, float(value))
        for parameter, value in zip(start.parameters(), values, strict=True)
        if not parameter.name.startswith("factor_at_")
    ]
    told = {"per_draft": np.any(table.steps.drafting), "per_kv_token": np.any(table.steps.context)}
    untold = [name for name in ("per_draft", "per_kv_token", "per_prefill_token") if not told.get(name)]
    return FitFile(
        form=FORM,
        engine=_as_file(engine),
        parameters=kept,
        covariance=np.zeros((len(kept), len(kept))).tolist(),
        noise=float(np.sqrt(np.mean((predicted / ms - 1) ** 2))),
        error_percent=float(100 * np.mean(np.abs(predicted / ms - 1))),
        rows=len(ms),
        logs=[table.source],
        findings=[
            "means from a table: no errors are known of them",
            f"{', '.join(untold)}: in none of its entries, so a usual share of the base",
        ],
        created=time.time(),
        versions={"akjax": version("akjax"), "jax": version("jax")},
    )


def _most_likely(
    start: AbstractCostModel, steps: StepFeatures, ms: Float[np.ndarray, " entries"]
) -> tuple[Float[np.ndarray, " p"], Float[np.ndarray, " entries"]]:
    """The parameters, all of them positive, and what they predict."""
    parameters = start.parameters()
    is_time = np.asarray([parameter.is_time for parameter in parameters])
    spreads = np.asarray([parameter.spread for parameter in parameters], np.float64)
    with jax.enable_x64(True):
        first, unravel = ravel_pytree(jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), start))
        predicted = jax.jit(lambda values: unravel(values)(steps))
        first = np.asarray(first)

        def values_at(x: Float[np.ndarray, " q"]) -> Float[np.ndarray, " p"]:
            return first * np.exp(x[0] * is_time + spreads * x[1:])

        def strains(x: Float[np.ndarray, " q"]) -> Float[np.ndarray, " r"]:
            return np.concatenate([np.log(np.asarray(predicted(values_at(x))) / ms) / TABLE_NOISE, x[1:]])

        values = values_at(least_squares(strains, np.zeros(1 + len(first)), xtol=1e-12, ftol=1e-12).x)
        return values, np.asarray(predicted(values))


def from_steps(steps: DecodeSteps, experts: int | None, top_k: int | None, source: str) -> FitFile:
    """A fit to measured steps."""
    start, engine = _start(steps.ms, experts, top_k, captured_sizes(steps))
    fit = fit_cost(start, steps.features, steps.ms)
    if not fit.converged:
        raise ValueError(f"the fit has not converged: {source}")
    return _without_factors(fit_file_of(fit, FORM, engine, steps.features, steps.ms, [source]))


def _start(
    ms: Sequence[float] | Float[np.ndarray, " steps"],
    experts: int | None,
    top_k: int | None,
    sizes: tuple[int, ...] = (),
) -> tuple[AbstractCostModel, Engine]:
    """Where a search begins: coefficients in the proportions of the default's, at the speed of the quickest step."""
    default, base = Engine(), 0.8 * float(min(ms))
    share = base / default.base
    engine = Engine(base, share * default.per_expert, share * default.per_token, (0,), experts, top_k, sizes)
    return FORMS[FORM](engine), engine


def _without_factors(fit: FitFile) -> FitFile:
    """Without what a fit to steps of no drafts says of drafting none: on the engine served it may be otherwise."""
    kept = [at for at, parameter in enumerate(fit.parameters) if not parameter.name.startswith("factor_at_")]
    covariance = np.asarray(fit.covariance)[np.ix_(kept, kept)]
    findings = [finding for finding in fit.findings if "factor_at_" not in finding]
    return FitFile(
        form=fit.form,
        engine=fit.engine,
        parameters=[fit.parameters[at] for at in kept],
        covariance=covariance.tolist(),
        noise=fit.noise,
        error_percent=fit.error_percent,
        rows=fit.rows,
        logs=fit.logs,
        findings=findings,
        created=fit.created,
        versions=fit.versions,
    )


def _unsure(name: str, unit: str, value: float) -> FittedParameter:
    return FittedParameter(name=name, unit=unit, value=value, standard_error=None, determined=False)


def _as_file(engine: Engine) -> dict[str, float | int | list[int] | None]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in engine._asdict().items()}


def presets(data: Path) -> Iterator[tuple[str, FitFile]]:
    """Every preset, with its name."""
    yield "default", from_coefficients()
    for name, table in (TABLES | gb10_tables(data / "llamacpp_dgx_spark")).items():
        yield name, from_table(table)
    for name, (model, file, experts, top_k) in B300.items():
        steps = decode_steps(data / "aic_fpm_steps", model, file)
        yield name, from_steps(steps, experts, top_k, VLLM_STEPS.format(model=model))


def main() -> None:
    """Makes all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data", help="folder of the measurements"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parents[1] / "akjax" / "preset_fits",
        help="folder of the fits",
    )
    options = parser.parse_args()
    needed = [
        options.data / "llamacpp_dgx_spark" / "batched_bench.csv",
        *(options.data / "aic_fpm_steps" / file for file in ("runs.csv", "qwen36_moe.csv", "qwen32_dense.csv")),
    ]
    if missing := [str(path) for path in needed if not path.exists()]:
        parser.error(f"the measurements are not there: {', '.join(missing)}; say with --data which folder holds them")
    options.out.mkdir(exist_ok=True)
    for name, fit in presets(options.data):
        write_fit(options.out / f"{name}.json", fit)
        values = ", ".join(f"{parameter.name} {parameter.value:.4g}" for parameter in fit.parameters)
        how = f"{fit.rows:,} times, mean error {fit.error_percent:.1f}%" if fit.rows else "as published"
        print(f"{name}: {how}\n  {fit.logs[0]}\n  {values}", flush=True)


if __name__ == "__main__":
    main()
