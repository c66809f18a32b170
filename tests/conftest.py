"""How every test runs: float64, no silent promotion of dtypes or ranks, and the same random cases in each CI run."""

import os
from collections.abc import Iterator

import hypothesis
import jax
import pytest

hypothesis.settings.register_profile("akjax", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("akjax")


@pytest.fixture(autouse=True, scope="session")
def _strict_jax() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_code() -> Iterator[None]:
    """Gives up each module's compiled functions, which hold some ten memory maps each.

    The whole suite's are more than the 65,530 that Linux gives a process, and past them XLA waits forever.
    """
    yield
    jax.clear_caches()
