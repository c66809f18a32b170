"""A controller that goes on with what another had learned."""

from collections.abc import Callable

import numpy as np
import pytest

from akjax import CompiledController, DraftOutcomes, StepMeasures, default_controller, reference_controller
from akjax.cost import reference_cost, serving_cost

K, IDS = 4, ["a", "b", "c"]


def default(levels: tuple[int, ...] = (0, 2, 4)) -> CompiledController:
    cost = serving_cost(27.0, 0.635, 0.542, lengths=levels, experts=64, top_k=4, sizes=(4, 8))
    return CompiledController(default_controller(draft_limit=K, levels=levels), cost, len(IDS))


@pytest.fixture(scope="module")
def of_default() -> CompiledController:
    return default()


def reference() -> CompiledController:
    cost = reference_cost(27.0, 0.635, 0.542, experts=64, top_k=4)
    return CompiledController(reference_controller(draft_limit=K, levels=(1, 2)), cost, len(IDS))


def serve(controller: CompiledController, steps: int, seed: int) -> list[int]:
    """The lengths that were decided in steps at random."""
    rng, decided = np.random.default_rng(seed), []
    for _ in range(steps):
        accepted = rng.integers(K + 1, size=len(IDS)).tolist()
        outcomes = DraftOutcomes(IDS, [K] * len(IDS), accepted, [0, 1, 2])
        measures = StepMeasures((K + 1) * len(IDS), len(IDS), K)
        controller.observe(step=measures, ms=float(rng.uniform(30, 40)), teaches=True, outcomes=outcomes)
        decided.append(controller.decide(IDS, [0, 1, 2]).batch)
    return decided


def numbers(controller: CompiledController) -> dict[str, list[float]]:
    return {name: array.ravel().tolist() for name, array in controller.learned().items()}


@pytest.mark.parametrize("make", [default, reference])
def test_it_goes_on_with_every_number_and_with_none_of_its_own(make: Callable[[], CompiledController]) -> None:
    first, second = make(), make()
    serve(first, 50, seed=0)
    kept = numbers(first)
    assert kept != numbers(second)
    serve(second, 20, seed=1)
    second.resume(kept)
    assert numbers(second) == kept
    assert second.taught == first.taught > 0
    assert second.request_ids == set()


def test_what_is_learned_and_shared_has_names(of_default: CompiledController) -> None:
    names = of_default.learned().keys()
    assert {"cost.belief.covariance", "cost.taught", "pools.mean", "pools.covariance"} <= names
    assert {name.partition(".")[0] for name in names} == {"cost", "pools"}


def test_after_a_fault_it_begins_from_its_own_start(of_default: CompiledController) -> None:
    controller = of_default
    controller.restart()
    start = numbers(controller)
    serve(controller, 50, seed=0)
    kept = numbers(controller)
    controller.resume(kept)
    controller.restart()
    assert numbers(controller) == start


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"pools.mean": None}, "only one of the kept state and this controller has pools.mean"),
        ({"pools.means": [1.0]}, "only one of the kept state and this controller has pools.means"),
        ({"cost.taught": [1.0, 2.0]}, "cost.taught has 2 numbers, not 1"),
        ({"cost.taught": []}, "cost.taught has 0 numbers, not 1"),
        ({"cost.error": [-1.0]}, "the controller's state is not sound in cost"),
        ({"pools.steps": [1.0, -2.0, 0.0]}, "the controller's state is not sound in acceptance"),
        ({"pools.covariance": [1.0, 2.0, 2.0, 1.0] * 12}, "pools.covariance is none: a variance of some combination"),
        ({"pools.covariance": [1e300] * 48}, "the controller's state is not sound in acceptance"),
    ],
)
def test_what_no_such_controller_can_have_learned_is_refused(
    of_default: CompiledController, change: dict[str, list[float] | None], reason: str
) -> None:
    controller = of_default
    controller.restart()
    start = numbers(controller)
    decided = serve(controller, 5, seed=0)
    kept: dict[str, list[float]] = {
        name: value for name, value in (numbers(controller) | change).items() if value is not None
    }
    with pytest.raises(ValueError, match=reason):
        controller.resume(kept)
    assert numbers(controller) == start
    assert serve(controller, 5, seed=0) == decided


def test_another_engines_numbers_are_refused(of_default: CompiledController) -> None:
    kept = numbers(default(levels=(2, 4)))
    with pytest.raises(ValueError, match=r"cost\.belief.* has .* numbers, not"):
        of_default.resume(kept)
