"""The README says what is so."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from akjax.scheduler.settings import Settings

README = (Path(__file__).parents[1] / "README.md").read_text()
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", PYTHON_BLOCKS)
def test_its_code_runs(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Each ends by printing the parameters of its cost model.
    assert "per_expert" in done.stdout


def test_it_lists_every_setting_with_its_default() -> None:
    rows = dict(re.findall(r"^\| (`[A-Z_`, ]+`) \| (.*?) \|", README, re.MULTILINE))
    listed = {name: default for names, default in rows.items() for name in re.findall(r"`([A-Z_]+)`", names)}
    assert set(listed) == {name.upper() for name in Settings.model_fields}
    spelled = {
        "alpha": "0.25",
        "margin": "0.03",
        "per_request": "0",
        "code_mode": "gated",
        "online": "1",
        "model": "27.0,0.635,0.542",
        "cost_ms": "2:47,4:53,8:65",
    }
    for name, text in spelled.items():
        assert listed[name.upper()] == text
        assert Settings(**{name: text}) == Settings()  # pyright: ignore[reportArgumentType]
