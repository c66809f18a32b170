"""JAX as a guest: which platforms it may bring up, each case in a process of its own."""

import os
import subprocess
import sys

import pytest

CHECK = """
import jax
from akjax.scheduler.jax_process import keep_to_cpu, run_on_the_callers_thread
{before}
keep_to_cpu()
run_on_the_callers_thread()
print(jax.config.jax_platforms, jax.config._read("jax_cpu_enable_async_dispatch"))
"""


# An accelerator that JAX would take before the CPU, as a jax that can use one has it.
ACCELERATOR = """
from jax.extend.backend import backends, register_backend_factory
def take():
    print("taken")
    raise RuntimeError("no such device")
register_backend_factory("accelerator", take, priority=1000)
"""

ASSEMBLE = """
import numpy as np
from akjax import LogitFilter, dense_cost
from akjax.compiled_controller import CompiledController
from akjax.controllers import default_controller
controller = CompiledController(default_controller(draft_limit=2, levels=(1, 2)), dense_cost(3.0, 0.1), 1)
controller.decide(["request"], [0])
print(*backends())
"""

CHOICES = {"JAX_PLATFORMS", "JAX_CPU_ENABLE_ASYNC_DISPATCH"}


def run(before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    given = {name: value for name, value in os.environ.items() if name not in CHOICES} | environment
    command = [sys.executable, "-c", CHECK.format(before=before)]
    return subprocess.run(command, env=given, capture_output=True, text=True, check=False)


def test_jax_is_kept_to_the_cpu_if_nobody_chose() -> None:
    assert run().stdout.split()[0] == "cpu"


def test_a_choice_of_the_users_stands() -> None:
    assert run(JAX_PLATFORMS="cuda,cpu").stdout.split()[0] == "cuda,cpu"


def test_a_backend_that_is_up_is_used_and_not_changed() -> None:
    assert run(before="jax.devices()").stdout.split() in (["True"], ["None", "True"])


def test_an_accelerator_that_jax_could_use_is_never_brought_up() -> None:
    command = [sys.executable, "-c", ACCELERATOR + CHECK.format(before="") + ASSEMBLE]
    given = {name: value for name, value in os.environ.items() if name not in CHOICES}
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    assert "taken" not in done.stdout, "an accelerator's memory would be gone"
    assert done.stdout.split()[-1] == "cpu", done.stderr


def test_calls_run_on_the_callers_thread_if_nobody_chose() -> None:
    assert run().stdout.split()[1] == "False"
    assert run(JAX_CPU_ENABLE_ASYNC_DISPATCH="1").stdout.split()[1] == "True"


@pytest.mark.parametrize("platforms", ["cuda", "tpu", "rocm,cuda"])
def test_a_choice_without_the_cpu_is_refused_in_words(platforms: str) -> None:
    done = run(JAX_PLATFORMS=platforms)
    assert f"ValueError: JAX_PLATFORMS={platforms} leaves out the CPU" in done.stderr
    assert f"set JAX_PLATFORMS={platforms},cpu" in done.stderr
