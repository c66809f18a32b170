"""The file by which an operator, or a benchmark, forces a draft length or picks a policy while the engine serves."""

import re
import stat
from pathlib import Path
from typing import Literal, NamedTuple, cast

PolicyName = Literal["reference", "default"]

# A file that holds more than this is none of ours.
_MOST_BYTES = 4096
_LINE = re.compile(rb"\s*(?:force\s+(?P<length>\d+)|policy\s+(?P<policy>reference|default))\s*")


class Command(NamedTuple):
    """What the file says.

    Attributes:
        forced: the draft length that every step verifies; None to adapt.
        policy: the policy to adapt by; None for the one that the engine was started with.
    """

    forced: int | None
    policy: PolicyName | None


ADAPT = Command(None, None)


class ControlFile:
    """Reads one line, `force N` or `policy NAME`, from a file, again whenever the file changes."""

    def __init__(self, path: Path | None, draft_limit: int, least: int = 1) -> None:
        """`path` need not exist, now or ever; without one it says to adapt.

        A forced length is clamped to `least`..`draft_limit`; `least` is 0 where vLLM may skip drafting, else 1.
        """
        self._path = path
        self._draft_limit = draft_limit
        self._least = least
        self._signature: tuple[int, ...] | None = None
        self._command = ADAPT

    def read(self) -> Command:
        """What the file says now. Anything but such a line, no file, or one that cannot be read means to adapt.

        Never raises OSError.
        """
        if self._path is None:
            return ADAPT
        try:
            status = self._path.stat()
            # The inode tells a file that was replaced within the clock's resolution, the change time one that was
            # rewritten in place and given its old modification time.
            signature = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
            if signature != self._signature:
                # A pipe would be waited for.
                self._command = self._parse(self._path) if stat.S_ISREG(status.st_mode) else ADAPT
                self._signature = signature
        except (OSError, ValueError):  # ValueError: a path that no file can have
            self._signature, self._command = None, ADAPT
        return self._command

    def _parse(self, path: Path) -> Command:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        found = _LINE.fullmatch(content) if len(content) <= _MOST_BYTES else None
        if found is None:
            return ADAPT
        if found["length"] is not None:
            return Command(min(max(int(found["length"]), self._least), self._draft_limit), None)
        return Command(None, cast(PolicyName, found["policy"].decode()))
