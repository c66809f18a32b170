"""Keeps what was learned in a file, from one start of the engine to the next. No vLLM here.

The scheduler's thread copies some hundred numbers every few minutes; encoding and writing them is a thread's. Whatever
goes wrong with the file, serving and learning go on.
"""

import atexit
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from time import time
from typing import Any, NamedTuple

import numpy as np

from akjax.compiled_controller import CompiledController
from akjax.state_file import MOST_BYTES, KeptPolicy, KeptState, decoded_state, differences, encoded_state

from .control_file import PolicyName

# What a kill may lose.
INTERVAL_SECONDS = 300.0
# For the last write at shutdown. A disk that stands still may not keep the engine from ending.
CLOSE_SECONDS = 5.0


class _Snapshot(NamedTuple):
    """What a policy had learned at some moment, in arrays of its own."""

    form: str
    start: str
    numbers: Mapping[str, np.ndarray]

    def kept(self) -> KeptPolicy:
        """The same for a file."""
        numbers = {name: array.ravel().tolist() for name, array in self.numbers.items()}
        return KeptPolicy(form=self.form, start=self.start, numbers=numbers)


class StateKeeper:
    """Loads what an engine like this one had learned, saves it every few minutes, and once more at the end.

    A file is written beside its place, for the owner's eyes only, and put there whole. One that cannot be used is
    moved to PATH.refused, so that it is neither lost nor overwritten.
    """

    def __init__(
        self,
        path: Path,
        engine: Mapping[str, Any],
        forms: Callable[[PolicyName], str],
        controllers: Mapping[PolicyName, CompiledController],
        versions: Mapping[str, str],
        log: Callable[[str], object],
        *,
        interval_seconds: float = INTERVAL_SECONDS,
        clock: Callable[[], float] = time,
    ) -> None:
        """Touches no file yet.

        Args:
            path: of the file.
            engine: what has to be the same for a kept state to be of use.
            forms: says the form of a policy's cost model.
            controllers: as they were made, by policy.
            versions: of what it runs on.
            log: takes a line, from any thread.
            interval_seconds: between two writes.
            clock: Unix seconds.
        """
        self.path = path
        self._engine = dict(engine)
        self._forms = {policy: forms(policy) for policy in controllers}
        self._controllers = controllers
        self._versions = dict(versions)
        self._log = log
        self._interval = interval_seconds
        self._clock = clock
        self._starts = {policy: _sum(_numbers(controller)) for policy, controller in controllers.items()}
        self._due: float | None = None
        self._changed = self._failed = False
        self._keeps = True
        self._thread: Thread | None = None
        # An engine that lives in the user's own process may end with that, never shut down.
        atexit.register(self._save_at_exit)

    def resume(self) -> None:
        """Hands every controller what one like it had learned, if the file has that; else it starts as it was made."""
        try:
            content = _content(self.path)
        except FileNotFoundError:
            self._log(f"state: {self.path} is not there yet; what is learned is kept there")
            return
        except OSError as error:
            self._keeps = False  # whatever it is, it is not to be replaced
            self._log(f"state: {self.path} cannot be read: {error.strerror}; starting without, and nothing is kept")
            return
        try:
            state = decoded_state(content)
            if others := differences(state.engine, self._engine):
                raise ValueError(f"it is of another engine: {'; '.join(others)}")
            taught = [self._resumed(policy, state.policies) for policy in self._controllers]
        except ValueError as reason:
            for controller in self._controllers.values():
                controller.restart()
            self._refuse(str(reason))
            return
        self._log(f"state: goes on with what {max(taught)} steps taught, as kept in {self.path}")

    def step(self, now: float) -> None:
        """A step was decided, at `now` monotonic seconds; what is learned is saved if that is due."""
        if not self._keeps:
            return
        self._changed = True
        if self._due is None:
            self._due = now + self._interval
        if now < self._due or (self._thread is not None and self._thread.is_alive()):
            return
        self._due = now + self._interval
        self._save()

    def close(self) -> None:
        """Saves what was learned since the last time, and waits for it."""
        atexit.unregister(self._save_at_exit)
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
        if self._changed and (self._thread is None or not self._thread.is_alive()):
            self._save()
        if self._thread is None:
            return
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._log(f"state: {self.path} is yet to be written; not waited for")

    def _resumed(self, policy: PolicyName, kept: Mapping[str, KeptPolicy]) -> int:
        """How many steps had taught the policy; 0 if the file does not have it, as where it was never in question."""
        controller, of_policy = self._controllers[policy], kept.get(policy)
        if of_policy is None:
            return 0
        if of_policy.form != self._forms[policy]:
            raise ValueError(
                f"policy {policy} had learned the cost model {of_policy.form}, and has {self._forms[policy]}"
            )
        if of_policy.start != self._starts[policy]:
            raise ValueError(
                f"policy {policy} had begun to learn from another start than it has: other settings, or another akjax"
            )
        try:
            controller.resume(of_policy.numbers)
        except ValueError as reason:
            raise ValueError(f"policy {policy} cannot have learned that: {reason}") from None
        return controller.taught

    def _refuse(self, reason: str) -> None:
        aside = self.path.with_name(self.path.name + ".refused")
        try:
            self.path.replace(aside)
        except OSError as error:
            aside = self.path
            self._keeps = False
            self._log(f"state: {self.path} cannot be moved: {error.strerror}; nothing is kept")
        self._log(f"state: {aside} is refused, for {reason}; learning starts from the settings")

    def _save(self) -> None:
        self._thread = Thread(target=self._write, args=(self._as_it_is(),), name="akjax state", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as fault:  # no more threads
            self._thread = None
            self._has_failed(fault)

    def _save_at_exit(self) -> None:
        """Without a thread: none can be started any more."""
        if self._changed and (self._thread is None or not self._thread.is_alive()):
            self._write(self._as_it_is())

    def _as_it_is(self) -> dict[PolicyName, _Snapshot]:
        self._changed = False
        return {
            policy: _Snapshot(self._forms[policy], self._starts[policy], _numbers(controller))
            for policy, controller in self._controllers.items()
        }

    def _write(self, policies: Mapping[PolicyName, _Snapshot]) -> None:
        state = KeptState(
            engine=self._engine,
            policies={policy: snapshot.kept() for policy, snapshot in policies.items()},
            saved=self._clock(),
            versions=self._versions,
        )
        try:
            _put(self.path, encoded_state(state))
            self._failed = False
        except Exception as fault:
            self._has_failed(fault)

    def _has_failed(self, fault: Exception) -> None:
        if not self._failed:
            self._log(f"state: {self.path} cannot be written: {fault}; it is tried again every few minutes")
        self._failed = True


def _numbers(controller: CompiledController) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in controller.learned().items()}


def _sum(numbers: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name, array in numbers.items():
        digest.update(f"{name} {array.shape}".encode() + array.astype("<f8").tobytes())
    return digest.hexdigest()


def _content(path: Path) -> bytes:
    """At most one byte more than a state is long.

    Raises:
        OSError: it cannot be read, or is no file: a pipe would be waited for.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(0, "it is no file")
        return file.read(MOST_BYTES + 1)


def _put(path: Path, content: bytes) -> None:
    """Replaces the file, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")  # for its owner alone
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
