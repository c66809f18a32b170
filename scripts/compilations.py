"""Whether JAX compiles while serving."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np


class Compilations:
    """Counts what JAX traces, lowers and compiles from here on."""

    def __init__(self) -> None:
        """Begins to count."""
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count += event.startswith("/jax/core/compile/")

    @contextmanager
    def told(self, report: dict[str, Any]) -> Iterator[None]:
        """Writes into `report` how many there were inside, and makes sure that one would have been heard."""
        before = self.count
        yield
        report["compilations"] = self.count - before
        before = self.count
        jax.jit(lambda x: x + 1)(np.ones(17)).block_until_ready()
        if self.count == before:
            raise RuntimeError("JAX compiled and nothing was heard of it: this version names its events otherwise")
