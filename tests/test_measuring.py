"""Work that scripts do in processes of their own."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from measuring import DiedError, apart

SCRIPTS = Path(__file__).parents[1] / "scripts"
SECONDS = 60


def test_work_done_apart_returns_what_it_returns() -> None:
    assert apart(max, 3, 7) == 7


def test_an_error_of_work_done_apart_is_told_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)Traceback.*invalid literal"):
        apart(int, "x")


def test_a_process_that_dies_at_its_work_is_not_waited_for() -> None:
    with pytest.raises(DiedError, match="exit code 7"):
        apart(os._exit, 7)


def children_of(process: int) -> list[int]:
    return [*map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda how: how.name)
def test_work_done_apart_ends_with_who_asked_for_it(how: signal.Signals) -> None:
    code = "import time; from measuring import apart; apart(time.sleep, 3600)"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=SCRIPTS, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + SECONDS
    # Multiprocessing has one of its own beside the one that works.
    while len(children := children_of(parent.pid)) < 2:
        assert time.monotonic() < deadline
    watched = [os.pidfd_open(child) for child in children]
    try:
        parent.send_signal(how)
        assert parent.wait(SECONDS) != 0
        for child in watched:
            assert select.select([child], [], [], SECONDS)[0], "a child lives on"
    finally:
        for child, file in zip(children, watched, strict=True):
            if not select.select([file], [], [], 0)[0]:
                os.kill(child, signal.SIGKILL)
            os.close(file)
