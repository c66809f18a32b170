"""What a file with a learned state holds: all that an engine that starts again need not learn again."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

VERSION = 1
"""Of the file's format."""

MOST_BYTES = 1 << 23
"""More than any state is long: what is longer is none, and need not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPolicy:
    """What one policy had learned.

    Attributes:
        form: of the cost model, by name.
        start: SHA-256 of the numbers that it started with, since what is learned depends on them.
        numbers: those of each array, flat, as `CompiledController.learned` names them.
    """

    form: str
    start: str
    numbers: dict[str, list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptState:
    """What was learned, and on which engine.

    Attributes:
        engine: what has to be the same for it to be of use, by name.
        policies: by name.
        saved: Unix seconds.
        versions: of akjax and what it ran on.
    """

    engine: dict[str, str | int | bool | list[int] | None]
    policies: dict[str, KeptPolicy]
    saved: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sealed:
    """A `KeptState` as it is written, with the SHA-256 of its bytes."""

    kind: Literal["learned state"]
    version: int
    sha256: str
    content: msgspec.Raw


def encoded_state(state: KeptState) -> bytes:
    """The file's content: one JSON object on one line."""
    content = msgspec.json.encode(state)
    digest = hashlib.sha256(content).hexdigest()
    sealed = _Sealed(kind="learned state", version=VERSION, sha256=digest, content=msgspec.Raw(content))
    return msgspec.json.encode(sealed) + b"\n"


def decoded_state(content: bytes) -> KeptState:
    """The state that a file's content holds; of the file itself at most `MOST_BYTES + 1` need be read.

    Raises:
        ValueError: it is none, or not as it was written; the message says why.
    """
    if len(content) > MOST_BYTES:
        raise ValueError(f"it is longer than {MOST_BYTES} bytes, so it is no learned state")
    try:
        sealed = msgspec.json.decode(content, type=_Sealed)
        if sealed.version != VERSION:
            raise ValueError(f"it is of version {sealed.version}; {VERSION} is needed")
        if hashlib.sha256(sealed.content).hexdigest() != sealed.sha256:
            raise ValueError("it is not as it was written: its SHA-256 is another")
        return msgspec.json.decode(sealed.content, type=KeptState)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is no learned state: {error}") from None


def differences(kept: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """What two engines do not have in common, a few words each; empty if nothing."""
    return [
        f"{name} was {kept.get(name)!r} and is {own.get(name)!r}"
        for name in sorted(kept.keys() | own.keys())
        if name not in kept or name not in own or kept[name] != own[name]
    ]
