"""JAX as a guest in vLLM's process."""

import os

import jax
from jax._src import xla_bridge  # the only way to ask whether a backend is up that does not bring one up


def keep_to_cpu() -> None:
    """Keeps JAX off the accelerators, unless the process uses JAX already or the user has chosen its platforms.

    JAX takes three quarters of a GPU's memory with the first backend it brings up, wanted or not. It must come to
    this before any use of JAX in the process, and as late as the scheduler's constructor: a backend that is up does
    not survive a fork.

    Raises:
        ValueError: the user's choice leaves out the CPU.
    """
    chosen = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if not chosen and not xla_bridge.backends_are_initialized():
        jax.config.update("jax_platforms", "cpu")
    elif chosen and "cpu" not in chosen.split(","):
        raise ValueError(
            f"JAX_PLATFORMS={chosen} leaves out the CPU, on which akjax chooses k; set JAX_PLATFORMS={chosen},cpu"
        )


def run_on_the_callers_thread() -> None:
    """Lets calls on the CPU run where they are made, unless the process uses JAX already or the user has chosen.

    JAX hands calls on the CPU that it takes for long to a thread of its own, so that the caller can go on. Here it
    waits for each, and waking a thread takes longer than most decisions. Like `keep_to_cpu` it has to come first.
    """
    if "JAX_CPU_ENABLE_ASYNC_DISPATCH" not in os.environ and not xla_bridge.backends_are_initialized():
        jax.config.update("jax_cpu_enable_async_dispatch", False)
