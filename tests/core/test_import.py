"""What importing akjax does to a process that may be vLLM's."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

MODEL = (
    "akjax.reference_controller(draft_limit=4, levels=(2, 4)); akjax.default_controller(draft_limit=4, levels=(0, 4));"
    " akjax.reference_cost(27.0, 0.6, 0.5, experts=64, top_k=4)"
)


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


ROOT = Path(__file__).parents[2]


def imports_of(folder: str) -> set[str]:
    """Every absolute module name that the files of a folder import."""
    nodes = [node for path in (ROOT / folder).rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {
        node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level
    }


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("akjax", ("akjax.scheduler", "akjax.fits", "vllm", "torch", "optax")),
        ("scheduler", ("akjax.fits", "optax")),
        ("fits", ("akjax.scheduler", "vllm", "torch")),
    ],
)
def test_imports_go_one_way(folder: str, forbidden: tuple[str, ...]) -> None:
    imported = imports_of(folder)
    assert imported
    assert not [name for name in imported for barred in forbidden if f"{name}.".startswith(f"{barred}.")]
