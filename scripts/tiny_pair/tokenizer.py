"""The byte-level tokenizer that target and draft share: one token per byte, and four added tokens.

A byte-level vocabulary keeps the embeddings to some tens of kilobytes, and no text falls outside it.
"""

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS = "<|endoftext|>"
TOOL_OPEN = "<tool_call>"
TOOL_CLOSE = "</tool_call>"
# Not a word of the corpus: it keeps the vocabulary a multiple of four and gives padding an id of its own.
PAD = "<|pad|>"

EOS_ID, PAD_ID, TOOL_OPEN_ID, TOOL_CLOSE_ID = 256, 257, 258, 259
VOCAB_SIZE = 260

# The corpus has no roles: a request is a line of prose, and what follows answers it.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def byte_letters() -> list[str]:
    """Return the printable letter that the ByteLevel pre-tokenizer writes for each of the 256 byte values.

    It maps printable bytes to themselves and the others, in order, to the code points from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def build_tokenizer() -> Tokenizer:
    """Build the tokenizer: a BPE without merges, so that the id of a byte is its value."""
    vocab = {letter: byte for byte, letter in enumerate(byte_letters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True), AddedToken(PAD, special=True)])
    # Not special: the markers stay visible in decoded text, where tool-call parsers look for them.
    tokenizer.add_tokens([AddedToken(TOOL_OPEN, normalized=False), AddedToken(TOOL_CLOSE, normalized=False)])
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, as AutoTokenizer and vLLM read them."""
    build_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "eos_token": EOS,
        "pad_token": PAD,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def encode_documents(documents: list[str]) -> torch.Tensor:
    """Return one stream of token ids: the documents in order, each closed by the end-of-text token."""
    tokenizer = build_tokenizer()
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(documents):
        ids.extend(encoding.ids)
        ids.append(EOS_ID)
    return torch.tensor(ids, dtype=torch.int16)
