"""Which times between outputs are step times."""


class StepClock:
    """Measures the gap between one step's output and the next one's, where the gap is all the next step's.

    With two steps in flight a step is queued before the one ahead of it ends, and the gap is its own time on the
    device; with one it is a whole turn of the engine, scheduling included. Either is what a step costs. It is not
    where the engine waited in between, or where nothing ran: there the time at which the next step began is unknown.
    """

    def __init__(self) -> None:
        """Before any output."""
        self._last_output: float | None = None

    def idle(self) -> None:
        """The engine has had nothing to do since its last output: the gap up to the next one holds waiting."""
        self._last_output = None

    def gap_ms(self, now: float, *, ran: bool = True) -> float | None:
        """Milliseconds that the step took whose output came `now`; None where that cannot be told.

        It cannot at the first output, at the first after the engine was idle, at an output of a step without tokens
        and at the one after that: such a step ends when it likes, and the engine may sleep before the next.

        Args:
            now: monotonic, in seconds.
            ran: whether the step had tokens.
        """
        last, self._last_output = self._last_output, now if ran else None
        return None if last is None or not ran else (now - last) * 1e3
