"""The real engine, in a process for each job."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

TESTS = Path(__file__).parent


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """What `engine/offline.py` reports of a job."""
    with TemporaryDirectory() as folder:
        job_path, report_path = Path(folder, "job.json"), Path(folder, "report.json")
        job_path.write_text(json.dumps(job))
        command = [sys.executable, str(TESTS / "engine" / "offline.py"), str(job_path), str(report_path)]
        path = os.pathsep.join(map(str, (TESTS, TESTS.parent / "scripts")))
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return json.loads(report_path.read_text())


def tokens_of(phase: dict[str, Any]) -> list[list[int]]:
    """The first completion of each request of a phase."""
    return [request["completions"][0]["tokens"] for request in phase["requests"]]
