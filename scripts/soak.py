"""Whether akjax holds under load and bad input, for longer than tests may take.

load: requests of all sorts at random on vLLM's own AsyncScheduler without an engine, with all of akjax's features on.
Up to 512 at once join, end, stop amid accepted drafts, are aborted, preempted, paused, cut by grammars, use each
other's cached prompts and ids. Each step all invariants of tests/invariants.py are asserted, and memory is looked at.
In some of the runs parts of akjax are made to fail at random moments.

service: vLLM's server with the tiny pair on its CPU engine, and 64 clients at once of the openai library that stream,
leave midway, and are at work when the server is told to end, while the control file changes each second. What was
served is compared with what the engine makes of the same prompts without speculation.

fuzz: everything that akjax reads - settings, control file, step logs, fits, tables, arguments - given bytes that it
should not be given. It may refuse them by the errors that it documents, in a second and 200 MB each; for anything else
the smallest input that does it is printed.

Exits with 1 if there was a fault. What is random follows from --seed.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from tempfile import TemporaryDirectory
from typing import Any

import soak_fuzz
import soak_load
import soak_service

Report = dict[str, Any]

LOAD_COLUMNS = (
    "steps",
    "requests",
    "preemptions",
    "aborts",
    "cuts",
    "failed_loads",
    "resumed",
    "observations",
    "logged",
    "injected",
    "faults_logged",
)


def load(options: argparse.Namespace) -> Report:
    """The runs."""
    return soak_load.load(options.steps, options.seed)


def load_table(report: Report) -> Iterator[str]:
    """The runs, line by line."""
    heads = "".join(f"{name.replace('_', ' '):>13}" for name in LOAD_COLUMNS)
    yield f"{'load':<26}{heads}{'compiled':>10}{'MB':>9}{'MB/1000 steps':>15}"
    for name, run in report.items():
        numbers = "".join(f"{run.get(column, 0):>13,}" for column in LOAD_COLUMNS)
        memory = f"{(run['megabytes'] or [0.0])[-1]:>9.1f}{run['megabytes_each_1000_steps']:>15.3f}"
        yield f"{name:<26}{numbers}{run['compilations']:>10}{memory}"


def fuzz(options: argparse.Namespace) -> Report:
    """The readers."""
    return soak_fuzz.fuzz(options.inputs, options.seed)


def fuzz_table(report: Report) -> Iterator[str]:
    """The readers, line by line."""
    yield f"{'fuzz':<26}{'inputs':>10}{'taken':>10}{'slowest, s':>12}"
    for name, reader in report.items():
        yield f"{name:<26}{reader['inputs']:>10,}{reader['taken']:>10,}{reader['slowest_seconds']:>12.3f}"


def faults_of(report: Report) -> Iterator[str]:
    """A line for each thing that went wrong."""
    for part, runs in report.items():
        for name, run in runs.items():
            if run["fault"] is not None:
                yield f"{part}, {name}: {run['fault']}"


def service(options: argparse.Namespace) -> Report:
    """The server."""
    return soak_service.service(options.seconds, options.seed)


def service_table(report: Report) -> Iterator[str]:
    """What happened, line by line."""
    for name, run in report.items():
        yield f"service, {name}"
        for what, figure in run.items():
            if isinstance(figure, int | float) and not isinstance(figure, bool):
                yield f"  {what.replace('_', ' '):<24}{figure:>12,.0f}"


PARTS: dict[str, tuple[Callable[[argparse.Namespace], Report], Callable[[Report], Iterator[str]]]] = {
    "load": (load, load_table),
    "service": (service, service_table),
    "fuzz": (fuzz, fuzz_table),
}


def main() -> int:
    """Runs the parts that are asked for; the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--steps", type=int, default=100_000, help="of load, all runs together (default: 100,000)")
    parser.add_argument("--seconds", type=float, default=120.0, help="of service (default: 120)")
    parser.add_argument("--inputs", type=int, default=200_000, help="of fuzz, all readers together (default: 200,000)")
    options = parser.parse_args()
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"{', '.join(unknown)}: there are {', '.join(PARTS)}")
    least = 100 * len(soak_load.RUNS)
    if options.steps < least:
        parser.error(f"--steps must be at least {least}, given {options.steps}")
    # Told to end, it ends what it started, and all of them leave nothing behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        report = {name: PARTS[name][0](options) for name in options.parts or PARTS}
    faults = [*faults_of(report)]
    if options.json:
        print(json.dumps({"faults": faults, "raw": report}, indent=2))
    else:
        for name, part in report.items():
            print(*PARTS[name][1](part), "", sep="\n")
        print(*(faults or ["no faults"]), sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
