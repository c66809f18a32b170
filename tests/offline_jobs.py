"""What the engine serves offline, job by job, each in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

SCRIPT = Path(__file__).parent / "engine" / "offline.py"


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """The report on a job; what both hold is said in `engine/offline.py`."""
    with TemporaryDirectory() as folder:
        job_path, report_path = Path(folder, "job.json"), Path(folder, "report.json")
        job_path.write_text(json.dumps(job))
        command = [sys.executable, str(SCRIPT), str(job_path), str(report_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return json.loads(report_path.read_text())
