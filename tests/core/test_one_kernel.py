"""One kernel does what the function does, and serving's functions become one."""

from collections.abc import Callable

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax
from jaxtyping import Array, Float

from akjax import per_request_draft_lengths, reference_cost
from akjax.one_kernel import compiled_for_cpu, one_kernel

Function = Callable[[Array], Array]


def argument(values: Float[np.ndarray, " n"]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(values.shape, values.dtype)


def both_ways(function: Function, values: Float[np.ndarray, " n"]) -> tuple[np.ndarray, np.ndarray]:
    """What the function returns as one kernel, which it has to become, and compiled as usual."""
    compiled = compiled_for_cpu(function, argument(values))
    assert is_one_kernel(compiled)
    return np.asarray(compiled(values)), np.asarray(jax.jit(function)(values))


def is_one_kernel(compiled: jax.stages.Compiled) -> bool:
    entry = (compiled.as_text() or "").partition("\nENTRY")[2]
    return entry.count(" call(") == 1 and "fusion(" not in entry


def contracted(values: Array) -> Array:
    """Products over one axis and two, with a batch axis and without, of vectors and of matrices."""
    a, b = values[:24].reshape(2, 3, 4), values[24:64].reshape(2, 4, 5)
    parts = [
        jnp.matmul(a, b),
        jnp.einsum("bij,bjk->ki", a, b),
        jnp.einsum("bij,bij->", a, a),
        a[0] @ a[1].T,
        b[0, 0] @ b[1, 0],
    ]
    return jnp.concatenate([jnp.ravel(part) for part in parts])


def looped(values: Array) -> Array:
    """A loop of given length, one that ends by itself, a running sum, and a choice, with products inside."""
    matrix = values[:9].reshape(3, 3) / 10.0
    powers, _ = lax.scan(lambda power, _: (jnp.tanh(power @ matrix), None), jnp.eye(3), None, length=4)
    _, halved = lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] / 2.0 + matrix @ c[1]), (0, values[:3]))
    chosen = lax.cond(values[0] > 0.0, lambda v: v @ matrix, lambda v: matrix @ v, values[3:6])
    return jnp.concatenate([jnp.ravel(powers), halved, chosen, jnp.cumsum(values), jnp.cumprod(values)])


def assorted(values: Array) -> Array:
    """Much of what is said to be emitted and that the serving steps happen not to need."""
    positive, share = jnp.abs(values) + 0.1, jnp.tanh(values)
    each = [
        jnp.arctan2(values, positive), jnp.ceil(values), jnp.floor(values), jnp.round(values), jnp.sign(values),
        lax.clamp(-0.5, values, 0.5), lax.cummax(values), lax.cummin(values), lax.erf(values), lax.erfc(values),
        jnp.exp2(share), jnp.expm1(share), jnp.log1p(positive), jax.nn.sigmoid(values), jnp.sin(values),
        jnp.cos(values), jnp.tan(share), values**3, positive**share, lax.rem(values, positive), values[::-1],
        lax.rsqrt(positive), jnp.sqrt(positive), values[jnp.arange(63, -1, -1)],
        jnp.where(jnp.isfinite(values) & ~(values > 1.0) ^ (values < -1.0), values, 0.0),
        jnp.pad(values[:60], (1, 3)), lax.dynamic_slice(values, (jnp.argmax(values[:9]),), (50,)),
        lax.dynamic_update_slice(values, share[:8], (jnp.argmin(values[:9]),)),
    ]  # fmt: skip
    sums = [values.min(), values.max(), share.prod(), jnp.all(values > -9.0), jnp.any(values > 2.0)]
    return jnp.concatenate([*each, jnp.stack([jnp.asarray(one, values.dtype) for one in sums])])


@pytest.mark.parametrize("function", [contracted, looped, assorted])
@settings(max_examples=3)
@given(seed=st.integers(0, 2**32 - 1))
def test_one_kernel_computes_what_the_function_does(function: Function, seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=64)
    one, usual = both_ways(function, values)
    np.testing.assert_allclose(one, usual, rtol=1e-12, atol=1e-12)


@settings(max_examples=5)
@given(rows=st.lists(st.integers(-6, 6), min_size=3, max_size=3))
def test_rows_are_replaced_in_order_and_those_elsewhere_dropped(rows: list[int]) -> None:
    def replaced(values: Array) -> Array:
        return values[:8].reshape(4, 2).at[values[8:11].astype(jnp.int32)].set(values[11:].reshape(3, 2), mode="drop")

    values = np.concatenate([np.arange(8.0), rows, np.arange(20.0, 26.0)])
    one, _ = both_ways(replaced, values)
    expected = values[:8].reshape(4, 2).copy()
    for row, new in zip(rows, values[11:].reshape(3, 2), strict=True):
        if -4 <= row < 4:  # below 0 it counts from the end
            expected[row] = new
    assert one.tolist() == expected.tolist()


def test_a_sum_of_many_terms_is_part_of_the_kernel() -> None:
    one, usual = both_ways(lambda values: jnp.sum(values.reshape(64, 1024), axis=1), np.linspace(0.0, 1.0, 65536))
    np.testing.assert_allclose(one, usual, rtol=1e-12)


@pytest.mark.parametrize("rows", [1, 4, 64])
def test_a_draft_length_for_each_request_is_chosen_in_the_kernel(rows: int) -> None:
    cost = reference_cost(5.0, 0.8, 0.4, experts=16, top_k=2)

    def lengths(values: Array) -> Array:
        survival = jnp.cumprod(values.reshape(rows, 6), axis=1)
        return per_request_draft_lengths(survival, jnp.arange(rows) != 1, cost).astype(values.dtype)

    one, usual = both_ways(lengths, np.random.default_rng(rows).random(rows * 6))
    np.testing.assert_array_equal(one, usual)


@pytest.mark.parametrize(
    "function",
    [
        lambda values: jnp.sort(values),
        lambda values: lax.fori_loop(0, 3, lambda _, v: jnp.sort(v), values),
        lambda values: jnp.linalg.cholesky(values.reshape(2, 2)),
        lambda values: values.at[jnp.zeros(2, jnp.int32)].add(1.0),
    ],
    ids=["sorts", "sorts in a loop", "factorises", "adds by index"],
)
def test_what_no_kernel_can_do_is_compiled_as_usual(function: Function) -> None:
    values = np.asarray([4.0, 1.0, 1.0, 3.0])
    assert one_kernel(function, argument(values)) is None
    compiled = compiled_for_cpu(function, argument(values))
    np.testing.assert_array_equal(np.asarray(compiled(values)), np.asarray(function(jnp.asarray(values))))
