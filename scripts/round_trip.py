"""From serving to a fit and back: serves with a step log, fits it, and serves again from the fit, in new processes.

Compares how well the first steps were predicted: those of the start that akjax comes with, and those of the fit.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from measuring import say

ROOT = Path(__file__).parent.parent
SCHEDULE = [(1, 1, 10), (2, 2, 8), (3, 4, 6), (5, 8, 4), (9, 12, 2), (13, 16, 1)]
FIRST = 50
KINDS = ("code", "prose", "tool")


def serve(seconds: float) -> None:
    """Serves every kind of text at 1, 4 and 16 requests, `seconds` each; what is logged the settings say."""
    from tiny_pair.prompts import PROMPTS
    from tiny_pair.serving import Engine

    with TemporaryDirectory() as folder:
        engine = Engine(Path(folder, "control"), SCHEDULE, max_requests=16)
        for concurrency in (1, 4, 16):
            for kind in KINDS:
                engine.serve(PROMPTS[kind], concurrency, seconds, "")
        engine.scheduler.shutdown()


def first_error_percent(log: str) -> float:
    """Mean of |predicted - measured| / measured over the first steps whose time was their own, in percent."""
    from akjax.fits.reading import read_log

    steps = read_log(log).steps
    own = ~steps["untaught"].is_in(["idle", "unknown", "change"]) & steps["gap_ms"].is_not_null()
    first = steps.filter(own).head(FIRST)
    ms, predicted = first["gap_ms"].to_numpy(), first["predicted_ms"].to_numpy()
    return float(100.0 * np.mean(np.abs(predicted - ms) / ms))


def child(seconds: float, **settings: str) -> None:
    """Serves in a process of its own, with these settings."""
    environment = os.environ | {f"VLLM_ADAPTIVE_K_{name.upper()}": value for name, value in settings.items()}
    command = [sys.executable, str(Path(__file__)), "--serve", str(seconds)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"serving failed:\n{done.stderr[-3000:]}")


def main() -> None:
    """Runs the round trip."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each of the nine cells (default: 3.0)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.serve)
        return
    with TemporaryDirectory() as folder:
        before, after, fit = (str(Path(folder, name)) for name in ("before.jsonl", "after.jsonl", "fit.json"))
        say("Serving from the default start, with a log ...")
        child(arguments.seconds, step_log=before)
        say("Fitting ...")
        akjax = [sys.executable, "-m", "akjax.fits.command", "fit", "cost", f"{before}*", "--out", fit]
        fitted = subprocess.run(akjax, capture_output=True, text=True, check=False)
        print(fitted.stdout, file=sys.stderr)
        if fitted.returncode not in (0, 3):
            sys.exit(f"akjax fit cost failed: {fitted.stderr}")
        say("Serving from the fit ...")
        child(arguments.seconds, step_log=after, model=fit)
        errors = {
            "first_steps": FIRST,
            "default_start_percent": first_error_percent(f"{before}*"),
            "fit_percent": first_error_percent(f"{after}*"),
        }
    errors["ratio"] = errors["fit_percent"] / errors["default_start_percent"]
    if arguments.json:
        print(json.dumps(errors, indent=2))
    else:
        print(
            f"Mean error of the first {FIRST} steps: {errors['default_start_percent']:.1f}% from the default start,"
            f" {errors['fit_percent']:.1f}% from the fit ({errors['ratio']:.2f} of it)"
        )


if __name__ == "__main__":
    main()
