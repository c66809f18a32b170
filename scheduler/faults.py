"""What becomes of adaptation after a fault of its own: it begins anew, but not again and again."""

import logging
from collections import deque
from collections.abc import Callable
from traceback import format_exception_only

# One fault may be a chance, such as a bit that flipped. More than these in an hour are none.
MOST_RESTARTS = 3
WINDOW_SECONDS = 3600.0


class Faults:
    """Counts faults, says each in the log, and decides whether adaptation may begin anew after it.

    Attributes:
        count: faults so far.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float]) -> None:
        """`logger` takes a record for each fault; `clock` gives monotonic seconds."""
        self.count = 0
        self._logger = logger
        self._clock = clock
        self._restarts: deque[float] = deque()
        self._kinds: set[tuple[type[Exception], str, int]] = set()

    def may_begin_anew(self, fault: Exception) -> bool:
        """Counts and logs a fault, with its traceback if it is the first of its kind; whether to begin anew.

        That is so `MOST_RESTARTS` times within any `WINDOW_SECONDS`, this one included.
        """
        self.count += 1
        now, restarts = self._clock(), self._restarts
        while restarts and now - restarts[0] >= WINDOW_SECONDS:
            restarts.popleft()
        anew = len(restarts) < MOST_RESTARTS
        if anew:
            restarts.append(now)
            course = f"what it learned is lost and it begins anew, time {len(restarts)} of {MOST_RESTARTS} in an hour"
        else:
            course = "it has stopped for good; the engine goes on with its static schedule"
        kind = _kind(fault)
        self._logger.error(
            "adaptive k: fault %d of its own, %s: %s",
            self.count,
            # An exception may not be able to say what it is.
            " ".join(format_exception_only(fault)[-1].split()),
            course,
            exc_info=None if kind in self._kinds else fault,
        )
        self._kinds.add(kind)
        return anew


def _kind(fault: Exception) -> tuple[type[Exception], str, int]:
    """What and where: the file and line that raised it, which tell faults apart better than their words."""
    traceback = fault.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return type(fault), "", 0
    return type(fault), traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
