"""What a decision takes, beside the NumPy oracle in the same run: a machine may be slow or busy, both are then."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Two to three times what was measured: a guard against doing much more than now, no aim.
LIMITS = {"reference": {"1": 1.4, "64": 0.16}, "default": {"1": 2.1, "64": 0.24}}


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Of `scripts/bench_step`, in a process without the type checks that tests run with."""
    measured = ("decision", "--kinds", "batch", "--sizes", "1", "64", "--seconds", "0.6")
    command = [sys.executable, "scripts/bench_step.py", *measured, "--json"]
    environment = {**os.environ, "PYTHONPATH": ".", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("requests", ["1", "64"])
@pytest.mark.parametrize("policy", LIMITS.keys())
def test_a_decision_takes_no_more_than_it_did_beside_numpy(report: dict[str, Any], policy: str, requests: str) -> None:
    ratio = report["batch" if policy == "reference" else "default_batch"][requests]
    assert ratio < LIMITS[policy][requests]


def test_the_bench_compares_like_with_like(report: dict[str, Any]) -> None:
    assert report["different_choices"] == 0


def test_the_bench_compiles_nothing_while_it_serves(report: dict[str, Any]) -> None:
    assert report["compilations"] == 0
