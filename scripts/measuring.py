"""What scripts that measure have in common; it imports nothing that a measured process would not."""

import gc
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

SECONDS_BETWEEN_LINES = 2.0


def say(text: str = "") -> None:
    """A line of progress, at once."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def working(text: str) -> Iterator[None]:
    """Says every other second what goes on inside, and for how long."""
    began, ended = time.perf_counter(), Event()

    def tell() -> None:
        say(f"{text} ...")
        while not ended.wait(SECONDS_BETWEEN_LINES):
            say(f"{text} ... {time.perf_counter() - began:.0f} s")

    teller = Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()


def settle_garbage() -> None:
    """Keeps the collector off all that is there by now, as vLLM's engine does when it has started."""
    gc.collect()
    gc.freeze()


def apart(work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work` returns, done in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def resident_megabytes() -> float:
    """This process's memory by the kernel's count."""
    return _megabytes("VmRSS")


def peak_megabytes() -> float:
    """The most memory that this process ever had, by the kernel's count."""
    return _megabytes("VmHWM")


def _megabytes(name: str) -> float:
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) / 1024
