"""Whether a request's text is prose, code or a tool call, read off its output tokens as they arrive."""

from collections.abc import Iterable, Mapping, Sequence
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

    scanned: int = 0
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
    inside a tool call as well, and the markers leave the fence as it is.

    Attributes:
        switches: scans that ended in another mode than they began in.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Before any request."""
        self.switches = 0
        self._vocabulary = vocabulary
        self._texts: dict[str, _Text] = {}

    def follow(self, request_id: str, output: Sequence[int]) -> int:
        """The mode after all of the request's output so far, of which only the tokens not yet read are scanned."""
        text = self._texts.setdefault(request_id, _Text())
        if len(output) < text.scanned:
            # A streaming session that was given more input begins its output anew.
            text.scanned = 0
        return self.scan(request_id, output[text.scanned :])

    def scan(self, request_id: str, tokens: Iterable[int]) -> int:
        """The mode after the request's next output tokens."""
        text = self._texts.setdefault(request_id, _Text())
        before = text.mode
        for token in tokens:
            text.scanned += 1
            self._read(text, token)
        after = text.mode
        self.switches += before != after
        return after

    def mode(self, request_id: str) -> int:
        """The mode as of the last scan."""
        text = self._texts.get(request_id)
        return USUAL if text is None else text.mode

    def forget(self, request_id: str) -> None:
        """Drops the request."""
        self._texts.pop(request_id, None)

    def _read(self, text: _Text, token: int) -> None:
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
