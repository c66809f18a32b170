"""What importing akjax does to a process that may be vLLM's."""

import subprocess
import sys

import pytest

MODEL = "akjax.Controller(draft_limit=4, levels=(2, 4)); akjax.reference_cost(27.0, 0.6, 0.5, experts=64, top_k=4)"


@pytest.mark.parametrize("code", ["import akjax", f"import akjax; {MODEL}"])
def test_importing_and_describing_models_touches_no_backend_and_no_heavy_package(code: str) -> None:
    check = (
        f"{code}\nimport sys\nfrom jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized(), 'a JAX backend is up'\n"
        "heavy = {'vllm', 'torch', 'polars', 'matplotlib', 'optax'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_scheduler_touches_no_backend() -> None:
    check = (
        "import akjax.scheduler\nfrom jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized(), 'a JAX backend is up'\n"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
