"""The file by which an operator, or a benchmark, forces a draft length while the engine serves."""

import re
import stat
from pathlib import Path

# A file that holds more than this is none of ours.
_MOST_BYTES = 4096
_FORCE = re.compile(rb"\s*force\s+(\d+)\s*")


class ControlFile:
    """Reads `force N` from a file, again whenever the file changes."""

    def __init__(self, path: Path | None, draft_limit: int) -> None:
        """`path` need not exist, now or ever; without one nothing is forced."""
        self._path = path
        self._draft_limit = draft_limit
        self._signature: tuple[int, ...] | None = None
        self._forced: int | None = None

    def forced(self) -> int | None:
        """The draft length that every step verifies, clamped to 1..K; None to adapt.

        Anything but `force N` in the file, no file, or one that cannot be read means None. Never raises OSError.
        """
        if self._path is None:
            return None
        try:
            status = self._path.stat()
            # The inode tells a file that was replaced within the clock's resolution, the change time one that was
            # rewritten in place and given its old modification time.
            signature = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
            if signature != self._signature:
                # A pipe would be waited for.
                self._forced = self._read(self._path) if stat.S_ISREG(status.st_mode) else None
                self._signature = signature
        except (OSError, ValueError):  # ValueError: a path that no file can have
            self._signature = self._forced = None
        return self._forced

    def _read(self, path: Path) -> int | None:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        found = _FORCE.fullmatch(content) if len(content) <= _MOST_BYTES else None
        return None if found is None else min(max(int(found[1]), 1), self._draft_limit)
