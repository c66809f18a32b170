"""How long it takes to log steps, and to get from logs to models, and how much memory.

Each part is measured in a process of its own, which imports what it needs before the clock starts; its peak of memory
is that of the whole process, imports included.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import zstandard

from akjax.step_log import LogHeader, StepRecord
from measuring import apart, peak_megabytes, say

# Different steps of a made-up log, which are repeated until there are enough.
DIFFERENT = 20_000


def write_log(path: Path, steps: int, requests: int) -> None:
    """A made-up log: requests of some 100 steps each, all with drafts in every step."""
    rng = np.random.default_rng(0)
    encoder = msgspec.json.Encoder()
    lines = []
    for number in range(min(steps, DIFFERENT)):
        drafted = rng.integers(1, 7, requests)
        ms = float(rng.gamma(50.0, 0.8))
        record = StepRecord(
            time=1.79e9 + number * 0.04,
            gap_ms=ms,
            untaught="" if rng.random() < 0.95 else "idle",
            tokens=int(requests + drafted.sum()),
            requests=requests,
            prefill=0,
            context=int(rng.integers(1000, 100_000)),
            drafts=int(drafted.sum()),
            drafting=6,
            uneven=True,
            k=6,
            forced=False,
            predicted_ms=float(ms * rng.normal(1.0, 0.02)),
            request=[number // 100 * requests + each for each in range(requests)],
            drafted=drafted.tolist(),
            accepted=rng.integers(0, drafted + 1).tolist(),
            cut=[0] * requests,
            mode=rng.integers(0, 3, requests).tolist(),
        )
        lines.append(encoder.encode(record) + b"\n")
    with path.open("wb") as file:
        file.write(encoder.encode(LogHeader(time=1.79e9, run="made up", levels=[0, 1, 2, 4, 6])) + b"\n")
        for _ in range(steps // len(lines)):
            file.writelines(lines)
        file.writelines(lines[: steps % len(lines)])


def read(paths: list[str], out: str) -> dict[str, float]:
    """Reads, makes arrays and, if `out` names a file, converts: seconds of each, and the peak of memory."""
    from akjax.fits.reading import acceptance_sequences, convert, cost_steps, read_log

    started = time.perf_counter()
    log = convert(paths, out) if out else read_log(paths)
    was_read, peak = time.perf_counter(), peak_megabytes()
    taken = len(cost_steps(log).ms)
    cost = time.perf_counter()
    acceptance_sequences(log)
    sequences = time.perf_counter()
    return {
        "steps": len(log.steps),
        "seconds": was_read - started,
        "peak_mb": peak,
        "cost_steps": taken,
        "cost_steps_seconds": cost - was_read,
        "sequences_seconds": sequences - cost,
        "peak_mb_with_arrays": peak_megabytes(),
    }


def reading(options: argparse.Namespace) -> dict[str, Any]:
    """Reads a log of many steps as JSON Lines, compressed by zstd, and converted to Parquet."""
    with TemporaryDirectory() as folder:
        plain, packed, parquet = (Path(folder, name) for name in ("log.jsonl", "log.jsonl.zst", "log.parquet"))
        say(f"Writing {options.steps:,} steps of {options.requests} requests ...")
        write_log(plain, options.steps, options.requests)
        with plain.open("rb") as source, packed.open("wb") as target:
            zstandard.ZstdCompressor().copy_stream(source, target)
        report: dict[str, Any] = {"requests": options.requests, "megabytes": plain.stat().st_size / 1e6}
        for name, path, out in (
            ("lines", plain, ""),
            ("zstd", packed, ""),
            ("convert", plain, str(parquet)),
            ("parquet", parquet, ""),
        ):
            report[name] = apart(read, [str(path)], out)
            say(f"{name}: {report[name]['seconds']:.2f} s, peak {report[name]['peak_mb']:.0f} MB")
        report["parquet_megabytes"] = parquet.stat().st_size / 1e6
    return report


def fit(rows: int, times: int) -> dict[str, Any]:
    """Fits the reference form to made-up steps by either loss, cold and warm, and scipy beside it."""
    import scipy.optimize

    from akjax import StepFeatures, reference_cost
    from akjax.fits import fit_cost
    from akjax.fits.loss import SCALE_OF_NORMAL

    rng = np.random.default_rng(0)
    requests = rng.integers(1, 33, rows).astype(np.float64)
    tokens = requests * (1.0 + rng.integers(0, 9, rows))

    def cost(x: Any) -> Any:
        return x[0] - x[1] * 288 * np.expm1(x[2] * tokens * np.log1p(-8 / 288)) + x[3] * tokens

    ms = cost([20.0, 0.4, 0.7, 0.3]) * np.exp(0.05 * rng.standard_normal(rows))
    ms = np.where(rng.random(rows) < 0.02, 3.0 * ms, ms)
    steps = StepFeatures(tokens=tokens, requests=requests)
    start = reference_cost(27.0, 0.635, 0.542, experts=288, top_k=8)
    report: dict[str, Any] = {"rows": rows}
    for loss in ("robust", "squares"):
        seconds = []
        for _ in range(times + 1):
            began = time.perf_counter()
            fitted = fit_cost(start, steps, ms, loss=loss)
            seconds.append(time.perf_counter() - began)
        warm = sorted(seconds[1:])[times // 2]
        noise = fitted.noise
        residuals = (lambda x: np.log(ms / cost(x))) if loss == "robust" else (lambda x: (cost(x) - ms) / ms)
        options = {"loss": "cauchy", "f_scale": 2.0 * SCALE_OF_NORMAL * noise} if loss == "robust" else {}
        of_scipies = []
        for _ in range(times):
            began = time.perf_counter()
            by_scipy = scipy.optimize.least_squares(
                residuals, [27.0, 0.635, 1.0, 0.542], x_scale=[5.0, 0.02, 0.3, 0.06], **options
            )
            of_scipies.append(time.perf_counter() - began)
        of_scipy = sorted(of_scipies)[times // 2]
        report[loss] = {
            "cold_seconds": seconds[0],
            "warm_seconds": warm,
            "scipy_seconds": of_scipy,
            "scipy_by_warm": of_scipy / warm,
            "parameters": fitted.values.tolist(),
            "scipy_parameters": by_scipy.x.tolist(),
        }
    return report


def fitting(options: argparse.Namespace) -> dict[str, Any]:
    """Fits a cost model of four parameters to many steps in memory."""
    say(f"Fitting {options.steps:,} steps, and again by scipy ...")
    return apart(fit, options.steps, 5)


def awake(seconds: float) -> None:
    """Keeps the thread at work in Python, its caches warm: the least that logging can cost."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def log_steps(folder: str, requests: int, steps: int, pause: Callable[[float], object]) -> dict[str, float]:
    """Microseconds that logging takes of the scheduler's thread for each step, the log's own thread writing beside."""
    from akjax import CompiledController, DraftOutcomes, StepMeasures, reference_controller, reference_cost
    from akjax.scheduler.step_log import LogFiles, LogWriter, StepLog

    controller = CompiledController(
        reference_controller(draft_limit=4, levels=(1, 2, 4)), reference_cost(27.0, 0.6, 0.5, experts=64, top_k=4), 1
    )
    files = LogFiles(Path(folder, f"{requests}.jsonl"), LogHeader(time=0.0, run="made up"), most_bytes=10**9)
    log = StepLog(LogWriter(files, lambda line: None))
    numbers = range(requests)
    outcomes = DraftOutcomes(
        [f"request-{number}" for number in numbers], [4] * requests, [number % 5 for number in numbers], [0] * requests
    )
    measures = StepMeasures(5 * requests, requests, 4, 300 * requests)
    micros = []
    for number in range(steps):
        pause(0.003)
        began = time.perf_counter()
        log.output(controller, measures, outcomes, {}, number / 100, gap_ms=10.0, teaches=True, k=4)
        log.settle()
        micros.append(1e6 * (time.perf_counter() - began))
    log.close()
    return {"median_us": float(np.median(micros)), "p99_us": float(np.quantile(micros, 0.99))}


def logging(options: argparse.Namespace) -> dict[str, Any]:
    """Logs steps of 1 to 256 requests, 3 ms apart, in which the thread works, or sleeps and wakes to cold caches."""
    report = {}
    with TemporaryDirectory() as folder:
        for name, pause in (("awake", awake), ("asleep", time.sleep)):
            for requests in (1, 8, 64, 256):
                figures = apart(log_steps, folder, requests, 2000, pause)
                report[f"{name}, {requests} requests"] = figures
                say(f"logging, {name}, {requests} requests: {figures['median_us']:.1f} us a step")
    return report


PARTS = {"reading": reading, "fitting": fitting, "logging": logging}


def main() -> None:
    """Measures the parts that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--steps", type=int, default=1_000_000, help="of the log (default: 1,000,000)")
    parser.add_argument("--requests", type=int, default=8, help="of each step (default: 8)")
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    options = parser.parse_args()
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"{', '.join(unknown)}: there are {', '.join(PARTS)}")
    if options.steps < 1 or options.requests < 1:
        parser.error("--steps and --requests must be at least 1")
    report = {name: PARTS[name](options) for name in options.parts or PARTS}
    if options.json:
        print(json.dumps(report, indent=2))
        return
    for part, figures in report.items():
        print(part)
        for name, value in figures.items():
            print(f"  {name}: {json.dumps(value)}")


if __name__ == "__main__":
    main()
