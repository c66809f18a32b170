"""The step log: a record of every step, written to files by a thread of its own. No vLLM here.

A step costs the scheduler's thread a few microseconds: it puts what it saw into a queue. All the rest, making a
record of them, encoding and writing it, is the thread's. Whatever goes wrong there ends the log and nothing else.
"""

import atexit
import errno
import os
import re
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from io import FileIO
from itertools import count
from pathlib import Path
from threading import Event, Thread
from time import time

import msgspec

from akjax.compiled_controller import CompiledController, DraftOutcomes, StepMeasures
from akjax.step_log import LogHeader, StepRecord, Untaught

# Steps that wait to be written: at 100 steps a second a disk may stand still for 40 s before any is lost.
CAPACITY = 4096
# Between two looks at the queue. It is what a kill may lose; and a thread that encoded for longer at a time would hold
# Python's lock when a step needs it.
INTERVAL_SECONDS = 0.2
# For the last steps at shutdown. A disk that stands still may not keep the engine from ending.
CLOSE_SECONDS = 5.0


@dataclass(slots=True)
class SeenStep:
    """What the scheduler's thread knows of a step, as `StepRecord` has it but for its requests.

    Attributes:
        request: the number of each request in `outcomes`.
        outcomes: of the requests that had drafts.
        cut: drafts that a grammar cut, of the requests where it did.
    """

    time: float
    gap_ms: float | None
    untaught: Untaught
    measures: StepMeasures
    k: int
    forced: bool
    predicted_ms: float | None
    request: Sequence[int]
    outcomes: DraftOutcomes
    cut: Mapping[str, int]

    def record(self) -> StepRecord:
        """The record of the step."""
        measures, outcomes = self.measures, self.outcomes
        return StepRecord(
            time=self.time,
            gap_ms=self.gap_ms,
            untaught=self.untaught,
            tokens=measures.tokens,
            requests=measures.requests,
            prefill=measures.prefill,
            context=measures.context,
            drafts=measures.tokens - measures.requests,
            drafting=measures.drafting,
            uneven=measures.uneven,
            k=self.k,
            forced=self.forced,
            predicted_ms=self.predicted_ms,
            request=list(self.request),
            drafted=list(outcomes.drafted),
            accepted=list(outcomes.accepted),
            cut=[self.cut.get(request_id, 0) for request_id in outcomes.request_ids],
            mode=list(outcomes.modes),
        )


class LogFiles:
    """The files of a log: PATH, and after it PATH.00001, PATH.00002, ..., so that sorted by name they are in order.

    With a PATH that ends in .zst they are compressed, a Zstandard frame for each flush, so that what was flushed can
    be read.

    Each begins with the header. None is ever opened twice: what an earlier run wrote stays as it is, be its last line
    whole or torn, and two engines that were given one path do not mix.
    """

    def __init__(self, path: Path, header: LogHeader, most_bytes: int, clock: Callable[[], float] = time) -> None:
        """Touches no file yet.

        Args:
            path: of the first file.
            header: of each, but for the time.
            most_bytes: of a file. A record that would exceed it, if it were written as it is, begins the next one.
            clock: Unix seconds.
        """
        self.path = path
        self._first = path
        self._header = header
        self._most_bytes = most_bytes
        self._clock = clock
        self._encoder = msgspec.json.Encoder()
        self._packed = _packer() if path.suffix == ".zst" else bytes
        self._file: FileIO | None = None
        self._buffer = bytearray()
        self._size = 0  # of the file
        self._records = 0  # in the file

    def begin(self) -> None:
        """Makes the next file.

        Raises:
            OSError: it cannot be made or written.
        """
        if self._first.exists() and not self._first.is_file():
            raise OSError(errno.EINVAL, "not a file", str(self._first))
        numbered = re.compile(re.escape(self._first.name) + r"\.(\d{5,})")
        there = [0] if self._first.exists() else []
        there += [int(found[1]) for name in os.listdir(self._first.parent) if (found := numbered.fullmatch(name))]
        number = max(there, default=-1) + 1
        while True:
            self.path = self._first.with_name(f"{self._first.name}.{number:05}") if number else self._first
            try:
                self._file = FileIO(self.path, "x")
                break
            except FileExistsError:  # another engine was quicker
                number += 1
        self._size = self._records = 0
        self._add(self._encoder.encode(replace(self._header, time=self._clock())))
        self.flush()

    def append(self, record: StepRecord) -> None:
        """Adds a record, which is in the file only after `flush`.

        Raises:
            OSError: the file was full, and the next cannot be made.
        """
        line = self._encoder.encode(record)
        if self._records and self._size + len(self._buffer) + len(line) + 1 > self._most_bytes:
            self.close()
            self.begin()
        self._add(line)
        self._records += 1

    def flush(self) -> None:
        """Writes what was added.

        Raises:
            OSError: it cannot be written, or the file is no longer where it was.
        """
        if self._file is None or not self._buffer:
            return
        # What goes into a file without a name would be lost without a word.
        if not os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno())):
            raise OSError(errno.ESTALE, "another file has taken its place", str(self.path))
        rest = self._packed(self._buffer)
        self._buffer.clear()
        self._size += len(rest)
        while rest:
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        """Writes what was added, and ends the file.

        Raises:
            OSError: it cannot be written.
        """
        if self._file is None:
            return
        try:
            self.flush()
        finally:
            file, self._file = self._file, None
            file.close()

    def _add(self, line: bytes) -> None:
        self._buffer += line
        self._buffer += b"\n"


def _packer() -> Callable[[bytearray], bytes]:
    import zstandard

    return zstandard.ZstdCompressor().compress


class LogWriter:
    """Takes steps from the scheduler's thread, never making it wait, and writes them on a thread of its own.

    Attributes:
        dropped: steps that were not taken because the queue was full.
    """

    def __init__(
        self,
        files: LogFiles,
        log: Callable[[str], object],
        *,
        capacity: int = CAPACITY,
        interval: float = INTERVAL_SECONDS,
    ) -> None:
        """Starts the thread, which ends with the process, at the latest.

        Args:
            files: to write to.
            log: takes a line for the engine's log.
            capacity: steps that the queue holds.
            interval: seconds between two looks at it.
        """
        self.dropped = 0
        self._files = files
        self._log = log
        self._capacity = capacity
        self._interval = interval
        self._queue: deque[SeenStep] = deque()
        self._takes = True
        self._closing = Event()
        self._thread = Thread(target=self._run, name="akjax-step-log", daemon=True)
        self._thread.start()
        # vLLM does not always shut its scheduler down.
        atexit.register(self.close)

    def put(self, step: SeenStep) -> None:
        """Takes a step, if there is room for it."""
        if not self._takes:
            return
        if len(self._queue) < self._capacity:
            self._queue.append(step)
            return
        self.dropped += 1
        if self.dropped == 1:
            self._log(f"step log: {self._capacity} steps wait to be written to {self._files.path}; more are dropped")

    def close(self) -> None:
        """Writes what was taken, takes no more, and says how many were dropped."""
        if self._closing.is_set():
            return
        self._takes = False
        self._closing.set()
        self._thread.join(CLOSE_SECONDS)
        atexit.unregister(self.close)
        if self._thread.is_alive():
            self._log(f"step log: {len(self._queue)} steps are yet to be written to {self._files.path}; not waited for")
        if self.dropped:
            self._log(f"step log: {self.dropped} steps were dropped, for too many waited to be written")

    def _run(self) -> None:
        try:
            self._files.begin()
            self._log(f"step log: writes to {self._files.path}")
            closing = False
            while not closing:
                closing = self._closing.wait(self._interval)
                self._write()
            self._files.close()
        except Exception as fault:
            self._takes = False
            self._queue.clear()
            self._log(f"step log: stopped, it cannot be written: {fault}; the engine goes on without")
            with suppress(OSError):
                self._files.close()

    def _write(self) -> None:
        # At most what is there now: a queue that fills as quickly as it empties has to be written too.
        for _ in range(len(self._queue)):
            self._files.append(self._queue.popleft().record())
        self._files.flush()


class StepLog:
    """Makes of what the pilot sees a record for each step.

    Whether a step taught, and what it was predicted to take, is known once the controller has taken it in: with the
    next decision, or the next output if that comes first. Until then the step waits here.
    """

    def __init__(self, writer: LogWriter, clock: Callable[[], float] = time) -> None:
        """`clock` gives Unix seconds."""
        self._writer = writer
        self._clock = clock
        self._numbers: defaultdict[str, int] = defaultdict(count().__next__)
        self._last_output: float | None = None
        self._waited = False
        self._waiting: SeenStep | None = None
        self._controller: CompiledController | None = None
        self._taught = 0

    @property
    def request_ids(self) -> Set[str]:
        """The requests that have a number, as they are from now on."""
        return self._numbers.keys()

    def idle(self) -> None:
        """The engine has had nothing to do: the time up to the next output is not a step's."""
        self._waited = True

    def forget(self, request_id: str) -> None:
        """Drops the request's number; should its id come again, it is another request."""
        self._numbers.pop(request_id, None)

    def output(
        self,
        controller: CompiledController | None,
        measures: StepMeasures,
        outcomes: DraftOutcomes,
        cut: Mapping[str, int],
        now: float,
        *,
        gap_ms: float | None = None,
        teaches: bool = False,
        k: int = 0,
        forced: bool = False,
    ) -> None:
        """Takes a step's output, after the controller was told of it.

        Args:
            controller: that was told; None if the output is of no step that was seen scheduled.
            measures: of the step.
            outcomes: as the controller was told them.
            cut: drafts that a grammar cut, of the requests where it did.
            now: when the output arrived; monotonic, in seconds.
            gap_ms: that the controller was told; None if it was told none.
            teaches: whether it was offered to the cost learner.
            k: that was planned in the step.
            forced: whether that was forced.
        """
        # Told of this output, the controller has taken in the one before.
        self.settle()
        if not measures.requests:
            self._waited = True
            return
        last, self._last_output = self._last_output, now
        waited, self._waited = self._waited, False
        if controller is None:
            untaught: Untaught = "unknown"
        elif gap_ms is None or waited:
            untaught = "idle"
        elif not controller.learns_cost:
            untaught = "fixed"
        else:
            untaught = "surprise" if teaches else "prompts"
        if gap_ms is None and last is not None:
            gap_ms = (now - last) * 1e3
        numbers = self._numbers
        self._waiting = SeenStep(
            self._clock(),
            gap_ms,
            untaught,
            measures,
            k,
            forced,
            None,
            [numbers[request_id] for request_id in outcomes.request_ids],
            outcomes,
            cut,
        )
        self._controller = controller
        if controller is None:
            self.settle()
        else:
            self._taught = controller.taught

    def settle(self) -> None:
        """Hands over the last step, which the controller has taken in."""
        step, controller = self._waiting, self._controller
        if step is None:
            return
        self._waiting = None
        if controller is not None:
            step.predicted_ms = controller.predicted_ms
            if controller.taught != self._taught:
                step.untaught = ""
            elif step.untaught == "surprise" and not controller.admits(step.measures):
                step.untaught = "change"
        self._writer.put(step)

    def restart(self, living: Set[str]) -> None:
        """Hands over the last step with what is known of it; the controller no longer says what it made of it.

        Numbers are dropped of all requests but those that are `living`: not all that ended may have been forgotten.
        """
        for request_id in self._numbers.keys() - living:
            self.forget(request_id)
        if self._waiting is not None:
            self._waiting.untaught = "unknown"
        self._controller = None
        self.settle()

    def close(self) -> None:
        """Writes all that there is, the last step too, which the controller has to have taken in."""
        self.settle()
        self._writer.close()
