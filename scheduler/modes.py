"""Whether a request's text is prose, code or a tool call, read off its output tokens as they arrive."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from akjax.controller import CODE, TOOL, USUAL

_FENCE = 3


@dataclass(frozen=True)
class Vocabulary:
    """The few tokens that change a request's mode.

    Attributes:
        backticks: the text of every token that holds a backtick, by id.
        tool_open: id of `<tool_call>`, None if the model has no such token.
        tool_close: id of `</tool_call>`, likewise.
    """

    backticks: Mapping[int, str]
    tool_open: int | None = None
    tool_close: int | None = None


@dataclass(slots=True)
class _Text:
    """Where in its text a request is."""

    in_tool_call: bool = False
    in_fence: bool = False
    run: int = 0  # backticks since the last other character

    @property
    def mode(self) -> int:
        if self.in_tool_call:
            return TOOL
        return CODE if self.in_fence else USUAL


class ModeTracker:
    """Follows every request's mode.

    A fence opens or closes at the third backtick of a run, and a run may span tokens and scans. Fences are tracked
    inside a tool call as well, and the markers leave the fence as it is. Of a request that writes prose, with no run
    open, nothing is kept.

    Attributes:
        switches: scans that ended in another mode than they began in.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Before any request."""
        self.switches = 0
        self._vocabulary = vocabulary
        self._special = frozenset({*vocabulary.backticks, vocabulary.tool_open, vocabulary.tool_close})
        self._texts: dict[str, _Text] = {}

    @property
    def request_ids(self) -> Set[str]:
        """The requests of which something is kept, as they are from now on."""
        return self._texts.keys()

    def read(self, new_tokens: Iterable[tuple[str, Sequence[int]]]) -> None:
        """Reads the next output tokens of each request."""
        is_ordinary, texts = self._special.isdisjoint, self._texts
        for request_id, tokens in new_tokens:
            if request_id in texts or not is_ordinary(tokens):
                self.scan(request_id, tokens)

    def scan(self, request_id: str, tokens: Sequence[int]) -> int:
        """The mode after the request's next output tokens."""
        text = self._texts.get(request_id) or _Text()
        before = text.mode
        if not self._special.isdisjoint(tokens):
            for token in tokens:
                self._take(text, token)
        elif tokens:
            text.run = 0
        after = text.mode
        self.switches += before != after
        if after == USUAL and not text.run:
            self._texts.pop(request_id, None)
        else:
            self._texts[request_id] = text
        return after

    def of(self, request_ids: Sequence[str]) -> list[int]:
        """The mode of each request as of its last tokens."""
        texts = self._texts
        if not texts:
            return [USUAL] * len(request_ids)
        return [texts[request_id].mode if request_id in texts else USUAL for request_id in request_ids]

    def forget(self, request_id: str) -> None:
        """Drops the request."""
        self._texts.pop(request_id, None)

    def restart(self) -> None:
        """Drops every request: the next tokens of each are its first."""
        self._texts.clear()

    def _take(self, text: _Text, token: int) -> None:
        piece = self._vocabulary.backticks.get(token)
        if piece is None:
            text.run = 0
            if token == self._vocabulary.tool_open:
                text.in_tool_call = True
            elif token == self._vocabulary.tool_close:
                text.in_tool_call = False
            return
        for character in piece:
            text.run = text.run + 1 if character == "`" else 0
            if text.run == _FENCE:
                text.in_fence = not text.in_fence
