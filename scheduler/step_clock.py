"""Which times between outputs are step times."""

from collections.abc import Mapping, Sequence


class StepClock:
    """Measures the gap between one step's output and the next one's."""

    def __init__(self) -> None:
        """Before any output."""
        self._last_output: float | None = None

    def gap_ms(self, now: float) -> float | None:
        """Milliseconds since the previous output, None at the first; `now` is monotonic, in seconds."""
        last, self._last_output = self._last_output, now
        return None if last is None else (now - last) * 1e3


def only_decodes(scheduled: Mapping[str, int], drafts: Mapping[str, Sequence[int]]) -> bool:
    """Whether a step had tokens, and no request of it more than 1 + its drafts: nothing else than decoding ran."""
    return bool(scheduled) and all(
        tokens <= 1 + len(drafts.get(request_id, ())) for request_id, tokens in scheduled.items()
    )
