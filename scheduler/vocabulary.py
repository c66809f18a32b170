"""The tokens that change a request's mode, from the served model's tokenizer."""

from collections.abc import Mapping

from .modes import Vocabulary

# The name of the byte 0x60, the backtick, in vocabularies that fall back to bytes.
_BYTE_FALLBACK = "<0x60>"


def vocabulary_of(tokens: Mapping[str, int]) -> Vocabulary:
    """The vocabulary of a tokenizer's `get_vocab()`.

    A token's name serves as its text: byte-level and SentencePiece vocabularies spell the backtick as itself, and
    for all other characters it matters only that they are others. Decoding a lone token would not do: it may drop
    a leading space, which ends a run of backticks.
    """
    return Vocabulary(
        backticks={
            token: "`" if name == _BYTE_FALLBACK else name
            for name, token in tokens.items()
            if "`" in name or name == _BYTE_FALLBACK
        },
        tool_open=tokens.get("<tool_call>"),
        tool_close=tokens.get("</tool_call>"),
    )
