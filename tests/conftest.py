"""How every test runs: float64, no silent promotion of dtypes or ranks, and the same random cases in each CI run."""

import os
from collections.abc import Iterator

import hypothesis
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

hypothesis.settings.register_profile("akjax", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("akjax")


@pytest.fixture(autouse=True, scope="session")
def _strict_jax() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="session")
def _compiled_once(_strict_jax: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A program that one test has compiled serves the others: most tests make controllers, and many the same."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # Whether there is a cache is looked up once, at the first compilation.
    compilation_cache.reset_cache()


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_code() -> Iterator[None]:
    """Gives up each module's compiled functions, which hold some ten memory maps each.

    The whole suite's are more than the 65,530 that Linux gives a process, and past them XLA waits forever.
    """
    yield
    jax.clear_caches()
