"""The tokens that change a mode, from names in vocabularies to whole texts through real tokenizers."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from akjax.scheduler.modes import ModeTracker, Vocabulary
from akjax.scheduler.vocabulary import vocabulary_of

PROSE, CODE, TOOL = range(3)
MARKERS = ["<tool_call>", "</tool_call>"]
TINY_TARGET = Path(__file__).parents[2] / "scripts/tiny_pair/target"


def test_byte_level_names_keep_their_backticks() -> None:
    names = {"`": 1, "Ġ```": 2, "``ĊĊ": 3, "Ġa": 4, "Ċ": 5, "<tool_call>": 6, "</tool_call>": 7}
    assert vocabulary_of(names) == Vocabulary({1: "`", 2: "Ġ```", 3: "``ĊĊ"}, 6, 7)


def test_sentencepiece_names_keep_their_backticks() -> None:
    assert vocabulary_of({"▁```": 9, "▁a": 3, "```\n": 4}).backticks == {9: "▁```", 4: "```\n"}


def test_a_backtick_spelled_as_a_byte_is_one() -> None:
    names = {f"<0x{byte:02X}>": byte for byte in range(256)}
    assert vocabulary_of(names).backticks == {0x60: "`"}


def test_absent_markers_are_none() -> None:
    assert vocabulary_of({"a": 0, "tool_call": 1, "<tool_call": 2}) == Vocabulary({}, None, None)
    assert vocabulary_of({"<tool_call>": 0}) == Vocabulary({}, 0, None)
    assert vocabulary_of({}) == Vocabulary({}, None, None)


def tiny_target() -> Tokenizer:
    """The tokenizer of the tiny pair, as a served model's is loaded."""
    return AutoTokenizer.from_pretrained(TINY_TARGET, local_files_only=True).backend_tokenizer


def byte_level() -> Tokenizer:
    """Merged tokens of backticks with what stands around them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["```\n", " ```x", "`x` ``x``", "é```\n\n", "``````", "````"] * 10, trainer)
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    return tokenizer


def sentencepiece(backticks: list[str]) -> Tokenizer:
    """Spaces as ▁, and bytes for what the vocabulary does not have."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "x", *backticks]
    merges = [("`", "`"), ("``", "`"), ("▁", "```")] if backticks else []
    vocab = {name: token for token, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    return tokenizer


TOKENIZERS = {
    "tiny pair": tiny_target(),
    "byte-level": byte_level(),
    "sentencepiece": sentencepiece(["`", "``", "```", "▁```"]),
    "byte fallback": sentencepiece([]),
}


def test_the_tokenizers_differ_where_it_matters() -> None:
    names = {kind: tokenizer.encode("x ```\n").tokens for kind, tokenizer in TOKENIZERS.items()}
    assert names["tiny pair"] == ["x", "Ġ", "`", "`", "`", "Ċ"]
    assert "```Ċ" in names["byte-level"]
    assert "▁```" in names["sentencepiece"]
    assert names["byte fallback"].count("<0x60>") == 3


def test_the_tiny_pair_has_the_markers_and_one_backtick() -> None:
    assert vocabulary_of(TOKENIZERS["tiny pair"].get_vocab()) == Vocabulary({0x60: "`"}, 258, 259)


def mode_of_text(text: str) -> int:
    """What the text says by itself: fences are runs of three or more, in and outside of tool calls."""
    parts = re.split("|".join(MARKERS), text)
    fences = sum(len(re.findall("`{3,}", part)) for part in parts)
    markers = re.findall("|".join(MARKERS), text)
    if markers and markers[-1] == MARKERS[0]:
        return TOOL
    return CODE if fences % 2 else PROSE


TEXTS = st.lists(st.sampled_from(["`", "``", "```", " ", "\n", "x", "é", "<tool", *MARKERS]), max_size=16).map("".join)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_the_tokens_of_a_text_lead_to_its_mode(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    tracker = ModeTracker(vocabulary_of(tokenizer.get_vocab()))
    assert tracker.scan("r", tokenizer.encode(text).ids) == mode_of_text(text)
