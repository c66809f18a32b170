"""What may stand in the control file, sense and nonsense; None for no file."""

from pathlib import Path

LINES = (
    None,
    b"",
    b"policy reference",
    b"policy default",
    b"force x",
    b"\xff\x00",
    b"force 0",
    b"force 3",
    b"force 99",
)


def put_line(control: Path, line: bytes | None) -> None:
    """Writes a line to the control file, or removes it."""
    if line is None:
        control.unlink(missing_ok=True)
    else:
        control.write_bytes(line)
