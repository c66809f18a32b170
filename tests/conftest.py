"""How every test runs: float64, and no silent promotion of dtypes or ranks."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="session")
def _strict_jax() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
