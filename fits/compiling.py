"""How the functions of a fit are compiled: they run a few times, so compiling is most of what a fit takes."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import equinox as eqx
import jax

P = ParamSpec("P")
T = TypeVar("T")

# XLA's older code generator for the CPU takes a third less for a fit, compiling included, and what it makes is about as
# fast.
_OLDER = {"xla_cpu_use_fusion_emitters": False}


@cache
def quick_options() -> dict[str, str | bool]:
    """Options for `jax.jit` with which XLA compiles quickly; none where it does not know them."""
    try:
        jax.jit(lambda: 0, compiler_options=dict(_OLDER))()
    except jax.errors.JaxRuntimeError:
        return {}
    return dict(_OLDER)


def quick_jit(function: Callable[P, T]) -> Callable[P, T]:
    """`eqx.filter_jit` with those options, which are looked at when it is first called."""
    compile_it: Any = eqx.filter_jit  # its type leaves out what it passes on to jax.jit
    compiled = cache(lambda: compile_it(function, compiler_options=quick_options()))

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return compiled()(*args, **kwargs)

    return call
