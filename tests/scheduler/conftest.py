"""Every scheduler under test compiles its controllers; a program that one test has compiled serves the others."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(autouse=True, scope="session")
def _compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # Whether there is a cache is looked up once, at the first compilation.
    compilation_cache.reset_cache()
