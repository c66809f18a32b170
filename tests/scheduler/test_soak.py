"""The long runs, in short: that they run, and that what goes wrong in them is told."""

from pathlib import Path

import pytest

import soak_fuzz
import soak_load
from akjax.scheduler.pilot import Pilot
from measuring import apart
from soak_service import END_OF_TEXT, Asked, faults_in


@pytest.fixture(autouse=True)
def _garbage_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    # The process goes on with other tests.
    monkeypatch.setattr(soak_load, "settle_garbage", lambda: None)


def test_under_load_what_breaks_an_invariant_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = Pilot._outcomes
    monkeypatch.setattr(Pilot, "_outcomes", lambda self, verified: outcomes(self, verified)._replace(accepted=[0] * 99))
    report = soak_load.serve("without a schedule", 100, seed=0)
    assert report["fault"] is not None
    assert report["steps"] < 100


def test_a_reader_is_given_what_it_should_not_be_given() -> None:
    report = apart(soak_fuzz.fuzz_one, "table of costs", 60, 0)
    assert report["fault"] is None
    assert report["inputs"] >= 60
    assert 0 < report["taken"] < report["inputs"]


def test_an_error_that_a_reader_does_not_document_is_a_fault(tmp_path: Path) -> None:
    def wrong(content: bytes, folder: Path) -> None:
        raise KeyError(content)

    reader = soak_fuzz.Reader(wrong, [b"x"], (ValueError,))
    with pytest.raises(soak_fuzz.FaultError, match="KeyError"):
        soak_fuzz.checked(reader, b"x", tmp_path)


WITHOUT = [1, 2, END_OF_TEXT, 4, 5]


@pytest.mark.parametrize(
    ("max_tokens", "past_the_end", "end", "tokens", "same"),
    [
        (5, True, "completed", WITHOUT, True),
        (4, True, "completed", WITHOUT[:4], True),
        (4, True, "completed", WITHOUT[:3], False),
        (4, True, "completed", WITHOUT, False),
        (5, False, "completed", WITHOUT[:3], True),
        (5, False, "completed", WITHOUT, False),
        (5, False, "completed", [1, 3, END_OF_TEXT], False),
        (5, True, "left", [], True),
        (5, True, "left", [1, 2], True),
        (5, True, "cut off", [1, 3], False),
    ],
)
def test_output_is_compared_with_that_without_speculation(
    max_tokens: int, past_the_end: bool, end: str, tokens: list[int], same: bool
) -> None:
    asked = Asked("", max_tokens, past_the_end, None, tokens, end)  # pyright: ignore[reportArgumentType]
    assert asked.matches(WITHOUT) == same


def test_faults_are_found_in_a_servers_log() -> None:
    package = Path(__file__).parents[2] / "scheduler"
    until = ["INFO all is well", "adaptive k: fault 1 of its own", "ERROR: Exception", "Traceback (most"]
    after = ["[shutdown] API server", "ERROR: vLLM's own", f'  File "{package}/pilot.py"', "adaptive k: fault 2"]
    assert [*faults_in("\n".join([*until, *after]))] == [*until[1:], *after[2:]]
