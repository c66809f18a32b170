"""Small functions compiled into a single kernel of XLA's CPU backend."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import primitives
from jax.typing import ArrayLike
from jaxtyping import Array

# XLA runs a function as a list of kernels, which it hands to a pool of threads. Where they are small, waking those
# costs more than all that they compute. A call with the first attribute is emitted as one kernel, and the second keeps
# XLA from inlining the call before it gets there.
_ONE_KERNEL = {"xla_cpu_small_call": "true", "inlineable": "false"}

# Sums over many terms would be calls of a library, which no kernel can make.
_NO_LIBRARY: dict[str, str | bool] = {"xla_cpu_experimental_ynn_fusion_type": ""}

_INLINED = frozenset({"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"})

# What XLA emits as plain loops. Anything else may be a call that compiles into a kernel and fails when it runs.
# fmt: off
_EMITTED = frozenset({
    "abs", "add", "add_any", "and", "argmax", "argmin", "atan2", "broadcast_in_dim", "ceil", "clamp", "concatenate",
    "cond", "convert_element_type", "copy", "copy_p", "cos", "cummax", "cummin", "cumprod", "cumsum", "div",
    "dynamic_slice", "dynamic_update_slice", "eq", "erf", "erfc", "exp", "exp2", "expm1", "floor", "gather", "ge",
    "gt", "integer_pow", "iota", "is_finite", "jit", "le", "le_to", "log", "log1p", "logistic", "lt", "lt_to",
    "max", "min", "mul", "ne", "neg", "not", "optimization_barrier", "or", "pad", "pjit", "platform_index", "pow",
    "reduce", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum", "rem", "reshape",
    "rev", "round", "rsqrt", "scan", "select_n", "sign", "sin", "slice", "split", "sqrt", "square", "squeeze",
    "stack", "stop_gradient", "sub", "tan", "tanh", "transpose", "while", "xor",
})
# fmt: on


def compiled_for_cpu(function: Callable[[Array], Array], argument: jax.ShapeDtypeStruct) -> jax.stages.Compiled:
    """The function compiled into one kernel if XLA can, else as XLA usually does.

    Meant for small functions: a kernel runs on the caller's thread alone, and products of matrices are summed term by
    term. Results are the usual ones up to rounding.

    Args:
        function: pure, of one array.
        argument: the shape, dtype and device of that array.
    """
    kernel = one_kernel(function, argument)
    if kernel is not None:
        try:
            return jax.jit(kernel).lower(argument).compile(compiler_options=_NO_LIBRARY)
        except jax.errors.JaxRuntimeError:
            pass  # Another XLA than this was written with may refuse, and nothing but time is lost.
    return jax.jit(function).lower(argument).compile()


def one_kernel(function: Callable[[Array], Array], argument: jax.ShapeDtypeStruct) -> Callable[[Array], Array] | None:
    """The function rewritten for one kernel; None if it does what a kernel cannot, such as sort or solve."""
    rewritten = jax.make_jaxpr(_rewritten(jax.make_jaxpr(function)(argument)))(argument)
    if not _is_emitted(rewritten.jaxpr):
        return None
    body = jax.jit(jex.jaxpr_as_fun(rewritten))

    def call(array: Array) -> Array:
        with set_xla_metadata(**_ONE_KERNEL):
            return body(array)[0]

    return call


def _is_emitted(jaxpr: jex.Jaxpr) -> bool:
    return all(
        equation.primitive.name in _EMITTED and all(_is_emitted(part.jaxpr) for part in _parts(equation.params))
        for equation in jaxpr.eqns
    )


def _is_part(value: object) -> bool:
    return isinstance(value, jex.ClosedJaxpr)


def _parts(params: Mapping[str, Any]) -> list[jex.ClosedJaxpr]:
    """The functions that an operation is made of, such as a loop's body."""
    return [value for value in jax.tree.leaves(dict(params), is_leaf=_is_part) if _is_part(value)]


def _rewritten(closed: jex.ClosedJaxpr) -> Callable[..., list[ArrayLike]]:
    """The function that `closed` is, doing in loops what XLA would call a library for."""

    def function(*arguments: ArrayLike) -> list[ArrayLike]:
        values: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        values.update(zip(closed.jaxpr.invars, arguments, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, jex.Literal) else values[atom]

        for equation in closed.jaxpr.eqns:
            results = _evaluated(equation, [read(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in closed.jaxpr.outvars]

    return function


def _evaluated(equation: jex.JaxprEqn, operands: Sequence[ArrayLike]) -> Sequence[ArrayLike]:
    primitive, params = equation.primitive, equation.params
    if primitive.name in _INLINED:
        return _rewritten(_parts(params)[0])(*operands)
    if primitive is primitives.dot_general_p:
        return [_sum_of_products(*map(jnp.asarray, operands), **params)]
    if primitive is primitives.scatter_p and _replaces_rows(**params):
        return [_rows_replaced(*map(jnp.asarray, operands))]
    params = jax.tree.map(lambda value: _traced(value) if _is_part(value) else value, params, is_leaf=_is_part)
    results = primitive.bind(*operands, **params)
    return results if primitive.multiple_results else [results]


def _traced(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    return jax.make_jaxpr(_rewritten(closed))(*closed.in_avals)


def _sum_of_products(a: Array, b: Array, *, dimension_numbers: Any, **_: Any) -> Array:
    """What `lax.dot_general` returns."""
    (summed_a, summed_b), (batch_a, batch_b) = dimension_numbers
    free_a = [axis for axis in range(a.ndim) if axis not in (*summed_a, *batch_a)]
    free_b = [axis for axis in range(b.ndim) if axis not in (*summed_b, *batch_b)]
    batch, end_a, end_b = len(batch_a), len(batch_a) + len(free_a), len(batch_a) + len(free_a) + len(free_b)
    summed = range(end_b, end_b + len(summed_a))
    shape = [a.shape[axis] for axis in (*batch_a, *free_a)] + [b.shape[axis] for axis in (*free_b, *summed_b)]
    a = lax.transpose(a, (*batch_a, *free_a, *summed_a))
    b = lax.transpose(b, (*batch_b, *free_b, *summed_b))
    a = lax.broadcast_in_dim(a, shape, (*range(end_a), *summed))
    b = lax.broadcast_in_dim(b, shape, (*range(batch), *range(end_a, end_b), *summed))
    return lax.reduce(lax.mul(a, b), np.zeros((), a.dtype), lax.add, tuple(summed))


def _replaces_rows(dimension_numbers: lax.ScatterDimensionNumbers, mode: lax.GatherScatterMode, **_: Any) -> bool:
    """Whether a scatter's indices name rows of the first axis, each replaced as a whole or, past the end, dropped."""
    return (
        dimension_numbers.scatter_dims_to_operand_dims == dimension_numbers.inserted_window_dims == (0,)
        and not dimension_numbers.operand_batching_dims
        and mode is lax.GatherScatterMode.FILL_OR_DROP
    )


def _rows_replaced(table: Array, index: Array, rows: Array) -> Array:
    """What such a `lax.scatter` returns."""

    def replaced(i: Array, table: Array) -> Array:
        at = lax.dynamic_index_in_dim(index, i, keepdims=False)[0]
        old, new = lax.dynamic_index_in_dim(table, at), lax.dynamic_index_in_dim(rows, i)
        inside = (at >= 0) & (at < len(table))
        return lax.dynamic_update_index_in_dim(table, lax.select(lax.broadcast(inside, new.shape), new, old), at, 0)

    return lax.fori_loop(0, len(index), replaced, table)
