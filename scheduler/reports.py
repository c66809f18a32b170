"""The lines that a serving engine's log shows."""

from collections import Counter
from collections.abc import Callable

import jax
import numpy as np

from akjax.compiled_controller import CompiledController

from .modes import ModeTracker

CHANGE_SECONDS = 5.0
MODEL_SECONDS = 30.0
# So many step times, none of which taught, are no chance.
STEPS_BEFORE_WARNING = 100


class Reports:
    """Says when k changed, and what the cost model has learned, each at most every so often."""

    def __init__(self, log: Callable[[str], object]) -> None:
        """`log` takes a whole line."""
        self._log = log
        self._steps: Counter[int] = Counter()
        self._said: int | None = None
        self._changes_from = self._model_from = float("-inf")
        self._taught = 0
        self._step_times = 0
        self._last_ms = 0.0
        self._warned = False

    def step_time(self, ms: float) -> None:
        """Counts a time that was a step's own, whether or not it was near enough to the prediction to teach."""
        self._step_times += 1
        self._last_ms = ms

    def step(self, draft_length: int, now: float, controller: CompiledController, modes: ModeTracker | None) -> None:
        """Counts a step planned at `draft_length`, at `now` monotonic seconds, and logs what is due."""
        self._steps[draft_length] += 1
        if self._said is None:
            self._said = draft_length
        if draft_length != self._said and now >= self._changes_from:
            steps = ", ".join(f"{k}: {count}" for k, count in sorted(self._steps.items()))
            self._log(f"k {self._said} -> {draft_length} (steps at each k: {steps})")
            self._said, self._changes_from = draft_length, now + CHANGE_SECONDS
        if now >= self._model_from:
            self._model_from = now + MODEL_SECONDS
            self._model(controller, modes)

    def restart(self) -> None:
        """What was learned is gone: no step has taught, and none was near enough to."""
        self._taught = self._step_times = 0

    def _model(self, controller: CompiledController, modes: ModeTracker | None) -> None:
        state = controller.settle()
        taught = int(state.cost.taught)
        if taught == self._taught:
            self._warn_if_nothing_teaches(controller)
            return
        self._taught = taught
        self._step_times = 0
        self._log(describe_cost(controller) + ("" if modes is None else f", {modes.switches} mode switches"))

    def _warn_if_nothing_teaches(self, controller: CompiledController) -> None:
        # A learner of exact times starts again by itself where no time fits.
        if self._warned or not controller.learns_cost or controller.expects_exact_times:
            return
        if self._step_times < STEPS_BEFORE_WARNING:
            return
        self._warned = True
        self._log(
            f"none of the last {self._step_times} step times taught the cost model: each was below half or above"
            f" twice its prediction plus 20 ms (the last was {self._last_ms:.3g} ms); set MODEL near this engine's own"
            f" times. {describe_cost(controller)}"
        )


def describe_cost(controller: CompiledController) -> str:
    """What the cost model has learned, in a line."""
    state = controller.settle()
    model = state.cost.belief.model
    leaves = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(model)])
    values = zip(model.parameters(), leaves, strict=True)
    learned = ", ".join(
        f"{parameter.name} {float(value):.4g}{'' if parameter.unit == '1' else ' ' + parameter.unit}"
        for parameter, value in values
    )
    return f"cost model: {learned}; {int(state.cost.taught)} steps taught, mean error {float(state.cost.error):.1%}"
