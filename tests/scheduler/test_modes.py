"""Prose, code and tool calls, told apart by the tokens as they arrive."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akjax.scheduler.modes import ModeTracker, Vocabulary
from oracle import Modes

PROSE, CODE, TOOL = range(3)
OPEN, CLOSE = "<tool_call>", "</tool_call>"
PIECES = [
    "`",
    "``",
    "```",
    "````",
    "`````````",
    "`\n",
    "\n`",
    " ```",
    "```py",
    "`` `",
    "``` ```",
    "a",
    "\n",
    OPEN,
    CLOSE,
]
ID = {piece: token for token, piece in enumerate(PIECES)}


def tracker() -> ModeTracker:
    return ModeTracker(Vocabulary({ID[piece]: piece for piece in PIECES if "`" in piece}, ID[OPEN], ID[CLOSE]))


def scan(tracker: ModeTracker, *pieces: str, request_id: str = "r") -> int:
    return tracker.scan(request_id, [ID[piece] for piece in pieces])


def assert_mode(pieces: list[str], mode: int) -> None:
    """The mode after the pieces, read in one scan or one a scan."""
    assert scan(tracker(), *pieces) == mode
    one_a_scan = tracker()
    assert [scan(one_a_scan, piece) for piece in pieces][-1] == mode
    assert one_a_scan.of("r") == [mode]


@pytest.mark.parametrize("length", range(13))
def test_a_run_toggles_once_at_its_third_backtick(length: int) -> None:
    assert_mode(["a", *length * ["`"], "a"], CODE if length >= 3 else PROSE)


@pytest.mark.parametrize(
    "pieces", [["```"], ["````"], ["```", "```"], ["`````````"], ["``", "````"], ["`", "````", "````"]]
)
def test_a_run_of_3_4_6_or_9_opens_one_fence_however_it_is_cut(pieces: list[str]) -> None:
    assert_mode(pieces, CODE)


@pytest.mark.parametrize(
    ("pieces", "mode"),
    [
        (["``", "`\n"], CODE),
        (["`", "``"], CODE),
        (["`` `", "``"], CODE),
        (["``", "a", "`\n"], PROSE),
        (["``", "\n", "`"], PROSE),
        (["``", "\n`"], PROSE),
        (["`` `"], PROSE),
        (["`` `", "`"], PROSE),
        (["``", " ```"], CODE),
        (["```py", "`"], CODE),
        (["```py", "``"], CODE),
        (["```py", "```"], PROSE),
        (["``` ```"], PROSE),
        (["``` ```", "a", "```"], CODE),
        (["``` ```", "```"], PROSE),
        (["```", "a", "``", "a", "```"], PROSE),
        (["```", "a", "````", "a"], PROSE),
    ],
)
def test_any_other_character_or_token_ends_a_run(pieces: list[str], mode: int) -> None:
    assert_mode(pieces, mode)


@pytest.mark.parametrize("marker", [OPEN, CLOSE])
def test_a_marker_ends_a_run(marker: str) -> None:
    assert_mode(["``", marker, "`", CLOSE], PROSE)
    assert_mode(["``", marker, "```", CLOSE], CODE)


def test_a_tool_call_is_between_its_markers() -> None:
    assert_mode([OPEN], TOOL)
    assert_mode([OPEN, "a"], TOOL)
    assert_mode([OPEN, "a", CLOSE], PROSE)
    assert_mode([CLOSE], PROSE)
    assert_mode([CLOSE, OPEN], TOOL)


def test_one_close_ends_the_call_however_many_opens_came_before() -> None:
    assert_mode([OPEN, OPEN, "a", OPEN, CLOSE], PROSE)
    assert_mode([OPEN, OPEN, CLOSE, CLOSE, OPEN], TOOL)


def test_a_tool_call_goes_before_a_fence() -> None:
    assert_mode(["```", OPEN], TOOL)
    assert_mode([OPEN, "```"], TOOL)


def test_fences_are_tracked_inside_a_tool_call() -> None:
    assert_mode([OPEN, "```", CLOSE], CODE)
    assert_mode([OPEN, "```", "a", "```", CLOSE], PROSE)
    assert_mode(["```", OPEN, "```", CLOSE], PROSE)


def test_markers_do_not_touch_the_fence() -> None:
    assert_mode(["```", OPEN, "a", CLOSE], CODE)
    assert_mode(["```", CLOSE], CODE)


def test_a_model_without_the_markers_makes_no_tool_calls() -> None:
    tracker = ModeTracker(Vocabulary({0: "```"}))
    assert tracker.scan("r", [5, 6, 0, 5]) == CODE
    assert tracker.scan("r", [0]) == PROSE


def test_switches_are_counted_a_scan_at_a_time() -> None:
    modes = tracker()
    scan(modes, "```", "a", "```", "a")
    assert modes.switches == 0
    scan(modes, "```", "a")
    assert modes.switches == 1
    scan(modes)
    scan(modes, "a", "```", OPEN)
    assert modes.switches == 2
    scan(modes, CLOSE, "```", request_id="other")
    assert modes.switches == 3


def test_requests_do_not_see_each_other() -> None:
    modes = tracker()
    scan(modes, "``", request_id="a")
    assert scan(modes, "`", request_id="b") == PROSE
    assert scan(modes, "`", request_id="a") == CODE
    assert modes.of("b") == [PROSE]


def test_a_request_not_yet_scanned_writes_prose() -> None:
    modes = tracker()
    assert modes.of("r") == [PROSE]
    modes.forget("r")


def test_a_forgotten_request_starts_anew() -> None:
    modes = tracker()
    for pieces in (["```", "a"], [OPEN], ["``"]):
        scan(modes, *pieces)
        modes.forget("r")
        assert modes.of("r") == [PROSE]
        assert scan(modes, "`") == PROSE
        modes.forget("r")
    assert modes.switches == 2


@given(st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.sampled_from(PIECES), max_size=4)))))
def test_reading_a_steps_tokens_is_scanning_each_requests(steps: list[list[tuple[str, list[str]]]]) -> None:
    read, scanned = tracker(), tracker()
    for step in steps:
        read.read([(request_id, [ID[piece] for piece in pieces]) for request_id, pieces in step])
        for request_id, pieces in step:
            scan(scanned, *pieces, request_id=request_id)
        assert read.of("abcd") == scanned.of("abcd")
    assert read.switches == scanned.switches


def test_nothing_is_kept_of_a_request_that_writes_prose() -> None:
    modes = tracker()
    modes.read([("r", [ID["a"]]), ("code", [ID["```"]]), ("call", [ID[OPEN]]), ("tick", [ID["`"]])])
    assert set(modes._texts) == {"code", "call", "tick"}
    modes.read([("code", [ID["a"], ID["```"], ID["a"]]), ("call", [ID[CLOSE]]), ("tick", [ID["a"]])])
    assert not modes._texts


TEXT = st.text(alphabet="``` \na", max_size=7)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(TEXT, min_size=1, max_size=6),
    operations=st.lists(
        st.tuples(st.sampled_from("ab"), st.none() | st.lists(st.integers(-2, 7), max_size=6)), max_size=20
    ),
)
def test_modes_and_switches_are_the_oracles(pieces: list[str], operations: list[tuple[str, list[int] | None]]) -> None:
    """Random pieces, the markers at -2 and -1, and tokens that no vocabulary knows; None forgets the request."""
    backticks = {token: piece for token, piece in enumerate(pieces) if "`" in piece}
    modes, oracle = ModeTracker(Vocabulary(backticks, -2, -1)), Modes(backticks, -2, -1)
    for request_id, tokens in operations:
        if tokens is None:
            modes.forget(request_id)
            oracle.drop(request_id)
        else:
            oracle.scan(request_id, tokens)
            assert modes.scan(request_id, tokens) == oracle.of(request_id)
        assert modes.of("ab") == [oracle.of(r) for r in "ab"]
        assert modes.switches == oracle.switches
