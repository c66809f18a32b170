"""The random numbers of a step."""

import jax
import jax.numpy as jnp
from jax.scipy.special import ndtri
from jaxtyping import Float, Int, PRNGKeyArray

from akjax.arrays import Array


def uniforms(key: PRNGKeyArray, step: Int[Array, ""], count: int) -> Float[Array, " count"]:
    """`count` float32 numbers in the open interval (0, 1), which depend on the key and the step alone.

    Drawn at once, since a call for each purpose costs more than the numbers do.
    """
    bits = jax.random.bits(jax.random.fold_in(key, step), (count,), jnp.uint32)
    # 23 bits and a half are exact in float32, so neither 0 nor 1 can come out.
    return ((bits >> 9).astype(jnp.float32) + jnp.float32(0.5)) * jnp.float32(2.0**-23)


def normals(uniform: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Standard normal numbers, by the inverse of their distribution."""
    return ndtri(uniform)
