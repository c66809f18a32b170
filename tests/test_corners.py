"""The page on what can go wrong names tests that there are."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "corners.md").read_text()


def test_every_test_that_it_names_is_there() -> None:
    there = {
        name for file in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 50
    assert named <= there, f"not there: {sorted(named - there)}"


def test_every_world_that_it_names_is_in_the_bank() -> None:
    bank = (ROOT / "akjax" / "simulate" / "bank.py").read_text()
    rows = [row for row in PAGE.splitlines() if "`scripts/bench_policy`, " in row]
    worlds = [world for row in rows for world in re.findall(r'"([^"]+)"', row.split("`scripts/bench_policy`, ")[1])]
    assert len(worlds) > 8
    for world in worlds:
        assert f'"{world}"' in bank, world
