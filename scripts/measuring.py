"""What scripts that measure have in common; it imports nothing that a measured process would not."""

import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
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


class DiedError(Exception):
    """A process that ended before it had done its work."""


def apart(work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work` returns, done in a fresh process, which ends with this one however that does.

    Raises:
        DiedError: the process died.
        RuntimeError: `work` raised; the message has the traceback.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    # Neither of multiprocessing's pools will do: one waits for ever for a process that died, and the other for one that
    # is still at work when this process is told to end.
    process = context.Process(target=_work, args=(sender, work, arguments))
    process.start()
    try:
        sender.close()
        result, fault = receiver.recv()
    except EOFError:
        process.join()
        raise DiedError(f"the process died, exit code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    if fault is not None:
        raise RuntimeError(fault)
    return result


def _work(sender: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    Thread(target=_end_with_the_parent, daemon=True).start()
    try:
        sender.send((work(*arguments), None))
    except Exception:
        sender.send((None, traceback.format_exc()))


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def resident_megabytes() -> float:
    """This process's memory by the kernel's count."""
    return _megabytes("VmRSS")


def peak_megabytes() -> float:
    """The most memory that this process ever had, by the kernel's count."""
    return _megabytes("VmHWM")


def _megabytes(name: str) -> float:
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) / 1024
