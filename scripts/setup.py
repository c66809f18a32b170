"""Makes `.venv` and installs akjax, vLLM's CPU engine and the tools into it; does nothing if that is done already.

Runs on the system's Python, with the standard library alone. `scripts/test` and `scripts/demo` call it first.
"""

import hashlib
import os
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "akjax-setup"
LOG = VENV / "akjax-setup.log"

TORCH = "torch==2.13.0+cpu"
# Where PyTorch itself publishes its CPU builds, for a pip whose index has none.
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# vLLM's CPU build requires them, and beside a CPU torch their builds break the import of transformers' models.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")

SECONDS_BETWEEN_LINES = 2.0


def main() -> int:
    """Sets up; returns the process's exit code."""
    if sys.version_info < (3, 11):  # noqa: UP036  # whatever python3 the machine has runs this file
        return fail(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}", "run it with a newer python3")
    wanted = fingerprint()
    if STAMP.exists() and STAMP.read_text() == wanted:
        return 0
    print("Setting up .venv (a few minutes the first time)", flush=True)
    if not PYTHON.exists():
        venv.create(VENV, with_pip=True)
    code, output = pip("install", "--editable", ".[scheduler,fits,engine,dev]")
    if code and f"No matching distribution found for {TORCH}" in output:
        print(f"  pip's index has no {TORCH}; trying PyTorch's own", flush=True)
        code, output = pip("install", "--extra-index-url", TORCH_INDEX, "--editable", ".[scheduler,fits,engine,dev]")
    if code:
        print("\n".join(output.splitlines()[-20:]), file=sys.stderr)
        return fail(
            "pip could not install akjax and its engine", f"read {LOG}, and check that pip reaches its package index"
        )
    code, output = pip("uninstall", "--yes", *UNWANTED)
    if code:
        return fail(f"pip could not remove {', '.join(UNWANTED)}", f"see {LOG}")
    STAMP.write_text(wanted)
    return 0


def fingerprint() -> str:
    """What the installed packages depend on: change it, and the set-up runs again."""
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def pip(*arguments: str) -> tuple[int, str]:
    """Runs pip, showing where it is every few seconds; its exit code and all that it printed."""
    started = last_line = time.monotonic()
    lines: list[str] = []
    command = [str(PYTHON), "-m", "pip", *arguments, "--disable-pip-version-check", "--no-input"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with (
        LOG.open("a") as log,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            log.write(line)
            now = time.monotonic()
            if now - last_line >= SECONDS_BETWEEN_LINES and not line.startswith("WARNING"):
                print(f"  {now - started:4.0f} s  {line.strip()[:100]}", flush=True)
                last_line = now
    return process.returncode, "".join(lines)


def fail(what: str, remedy: str) -> int:
    """Says what failed and what to do about it."""
    print(f"Set-up failed: {what}.\nWhat to do: {remedy}.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
