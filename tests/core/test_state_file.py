"""A learned state in a file: it is what was learned, and what is none is refused, with a reason."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from akjax.state_file import MOST_BYTES, KeptPolicy, KeptState, decoded_state, differences, encoded_state

STATE = KeptState(
    engine={"model": "m", "levels": [0, 2, 4], "top_k": None, "expert_parallel": False},
    policies={
        "default": KeptPolicy(form="serving", start="ab", numbers={"cost.error": [0.25], "pools.mean": [1.0, 2]})
    },
    saved=1.7e9,
    versions={"akjax": "0.1.0"},
)


@given(numbers=st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=20))
def test_a_state_reads_back_to_the_last_bit(numbers: list[float]) -> None:
    policy = KeptPolicy(form="serving", start="ab", numbers={"cost.error": numbers})
    state = dataclasses.replace(STATE, policies={"default": policy})
    read = decoded_state(encoded_state(state))
    assert read == state
    assert np.array_equal(np.signbit(read.policies["default"].numbers["cost.error"]), np.signbit(numbers))


def test_a_number_that_is_none_is_refused() -> None:
    policy = KeptPolicy(form="serving", start="ab", numbers={"cost.error": [float("nan")]})
    with pytest.raises(ValueError, match="Expected `float`, got `null`"):
        decoded_state(encoded_state(dataclasses.replace(STATE, policies={"default": policy})))


@given(at=st.integers(0, len(encoded_state(STATE)) - 2), bit=st.integers(0, 7))
def test_no_bit_can_be_another(at: int, bit: int) -> None:
    content = bytearray(encoded_state(STATE))
    content[at] ^= 1 << bit
    with pytest.raises(ValueError, match="it is"):
        decoded_state(bytes(content))


@given(end=st.integers(0, len(encoded_state(STATE)) - 2))
def test_half_a_file_is_refused(end: int) -> None:
    with pytest.raises(ValueError, match="it is no learned state"):
        decoded_state(encoded_state(STATE)[:end])


def resealed(change: Callable[[Any], None]) -> bytes:
    """A file whose content was changed by someone who knows how it is sealed."""
    outer = json.loads(encoded_state(STATE))
    change(outer["content"])
    content = json.dumps(outer["content"]).encode()
    return msgspec.json.encode(
        {**outer, "sha256": hashlib.sha256(content).hexdigest(), "content": msgspec.Raw(content)}
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is no learned state: Input data was truncated"),
        (b"{}", "missing required field `kind`"),
        (b"\xff\xfe", "it is no learned state"),
        (b"[" * 100_000, "it is no learned state"),
        (b" " * (MOST_BYTES + 1), f"it is longer than {MOST_BYTES} bytes"),
        (encoded_state(STATE).replace(b'"version":1', b'"version":2'), "it is of version 2; 1 is needed"),
        (encoded_state(STATE).replace(b"learned state", b"cost fit"), "Invalid enum value 'cost fit'"),
        (encoded_state(STATE).replace(b"0.25", b"0.26"), "its SHA-256 is another"),
        (resealed(lambda state: state.pop("engine")), "missing required field `engine`"),
        (
            resealed(lambda state: state["policies"]["default"]["numbers"].update(x=["1"])),
            "Expected `float`, got `str`",
        ),
        (resealed(lambda state: state["policies"]["default"]["numbers"].update(x=1)), "Expected `array`, got `int`"),
    ],
)
def test_what_is_no_state_is_refused_with_a_reason(content: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason.replace("[", r"\[")):
        decoded_state(content)


def test_a_content_that_was_changed_and_sealed_again_is_read_as_it_says() -> None:
    assert decoded_state(resealed(lambda state: state.update(saved=5.0))).saved == 5.0


def test_engines_differ_by_what_only_one_has_and_by_what_is_another() -> None:
    assert differences({"model": "a", "top_k": None}, {"model": "a", "top_k": None}) == []
    assert differences({"model": "a", "levels": [1], "old": None}, {"model": "b", "levels": [1], "new": 3}) == [
        "model was 'a' and is 'b'",
        "new was None and is 3",
        "old was None and is None",
    ]
