"""What was learned is kept from one start to the next, and whatever becomes of the file, vLLM serves on."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from threading import Event
from typing import Any

import pytest

from adaptive_engine import Build, pilot_of
from akjax import CompiledController, DraftOutcomes, StepMeasures, default_controller
from akjax.cost import serving_cost
from akjax.scheduler import state_keeper
from akjax.scheduler.assembly import form_name
from akjax.scheduler.control_file import PolicyName
from akjax.scheduler.served_engine import header_of, identity_of
from akjax.scheduler.settings import load_settings
from akjax.scheduler.state_keeper import INTERVAL_SECONDS, StateKeeper
from akjax.state_file import MOST_BYTES, KeptState, decoded_state, differences, encoded_state
from harness import FakeEngine, make_config

ENGINE = {"model": "m", "device": "cpu", "levels": [0, 2, 4]}


# Controllers and a file.


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "kept"
    folder.mkdir()
    return folder / "state.json"


def compiled(base: float = 27.0) -> CompiledController:
    cost = serving_cost(base, 0.635, 0.542, lengths=(0, 2, 4), experts=64, top_k=4, sizes=())
    return CompiledController(default_controller(draft_limit=4, levels=(0, 2, 4)), cost, 1)


@pytest.fixture(scope="module")
def shared_controller() -> CompiledController:
    return compiled()


@pytest.fixture
def controller(shared_controller: CompiledController) -> CompiledController:
    shared_controller.restart()
    return shared_controller


class Keeping:
    """A keeper, what it said, and steps that it is told of."""

    def __init__(
        self,
        path: Path,
        controller: CompiledController,
        *,
        engine: Mapping[str, Any] = ENGINE,
        form: str = "serving",
        policy: PolicyName = "default",
    ) -> None:
        self.said: list[str] = []
        self.now = 100.0
        self.controller = controller
        controllers: dict[PolicyName, CompiledController] = {policy: controller}
        self.keeper = StateKeeper(
            path, engine, lambda _: form, controllers, {"akjax": "0"}, self.said.append, clock=lambda: 5.0
        )
        self.keeper.resume()

    def step(self, seconds: float = 0.0) -> None:
        """One that teaches, so long after the last."""
        self.now += seconds
        outcomes = DraftOutcomes(["r"], [4], [2], [0])
        self.controller.observe(step=StepMeasures(5, 1, 4), ms=40.0, teaches=True, outcomes=outcomes)
        self.controller.decide(["r"], [0])
        self.keeper.step(self.now)

    def written(self) -> None:
        """Waits for a write that is under way."""
        if self.keeper._thread is not None:
            self.keeper._thread.join()

    def end(self) -> dict[str, list[float]]:
        """Serves a little and ends; what was learned by then."""
        for _ in range(10):
            self.step()
        self.keeper.close()
        return numbers(self.controller)


def numbers(controller: CompiledController) -> dict[str, list[float]]:
    return {name: array.ravel().tolist() for name, array in controller.learned().items()}


def test_the_next_start_goes_on_with_every_number(path: Path, controller: CompiledController) -> None:
    first = Keeping(path, controller)
    assert first.said == [f"state: {path} is not there yet; what is learned is kept there"]
    learned = first.end()
    assert decoded_state(path.read_bytes()).policies["default"].numbers == learned
    controller.restart()
    second = Keeping(path, controller)
    assert numbers(controller) == learned
    assert second.said == [f"state: goes on with what 10 steps taught, as kept in {path}"]
    assert first.said[1:] == []


def test_where_no_step_was_served_nothing_is_written(path: Path, controller: CompiledController) -> None:
    Keeping(path, controller).keeper.close()
    assert not path.exists()


def test_it_is_saved_every_few_minutes_of_steps(path: Path, controller: CompiledController) -> None:
    keeping = Keeping(path, controller)
    keeping.step()
    keeping.step(INTERVAL_SECONDS - 1.0)
    keeping.written()
    assert not path.exists()
    keeping.step(1.0)
    keeping.written()
    first = decoded_state(path.read_bytes())
    assert first.policies["default"].numbers["cost.taught"] == [3.0]
    keeping.step(INTERVAL_SECONDS - 1.0)
    keeping.written()
    assert decoded_state(path.read_bytes()) == first
    keeping.step(1.0)
    keeping.written()
    assert decoded_state(path.read_bytes()).policies["default"].numbers["cost.taught"] == [5.0]


def test_it_is_for_its_owner_alone_and_nothing_is_left_beside_it(path: Path, controller: CompiledController) -> None:
    umask = os.umask(0)
    try:
        Keeping(path, controller).end()
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == [path.name]


def edited(**engine: Any) -> Callable[[KeptState, bytes], bytes]:
    """As another engine would have written it."""

    def edit(state: KeptState, _: bytes) -> bytes:
        return encoded_state(KeptState(engine=state.engine | engine, policies=state.policies))

    return edit


def spoiled(state: KeptState, _: bytes) -> bytes:
    """By someone who can seal it again."""
    state.policies["default"].numbers["cost.belief.covariance"][0] = -1.0
    return encoded_state(state)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda state, content: content[: len(content) // 2], "it is no learned state"),
        (lambda state, content: b"", "it is no learned state"),
        (lambda state, content: content.replace(b'"saved"', b'"shaved"'), "it is not as it was written"),
        (lambda state, content: content.replace(b'"version":1', b'"version":0'), "it is of version 0; 1 is needed"),
        (lambda state, content: bytes(MOST_BYTES + 2), "it is longer than"),
        (edited(model="other"), "it is of another engine: model was 'other' and is 'm'"),
        (edited(device="NVIDIA H200"), "it is of another engine: device was 'NVIDIA H200' and is 'cpu'"),
        (spoiled, "policy default cannot have learned that: cost.belief.covariance is none"),
    ],
)
def test_a_file_that_cannot_be_used_is_kept_aside_and_learning_starts_from_the_settings(
    path: Path, controller: CompiledController, spoil: Callable[[KeptState, bytes], bytes], reason: str
) -> None:
    prior = numbers(controller)
    Keeping(path, controller).end()
    content = spoil(decoded_state(path.read_bytes()), path.read_bytes())
    path.write_bytes(content)
    controller.restart()
    second = Keeping(path, controller)
    assert numbers(controller) == prior
    aside = path.with_name("state.json.refused")
    (line,) = second.said
    assert f"{aside} is refused, for {reason}" in line
    assert aside.read_bytes() == content
    assert second.end() == decoded_state(path.read_bytes()).policies["default"].numbers != prior


def test_what_was_learned_of_another_form_or_from_another_start_is_refused(
    path: Path, controller: CompiledController
) -> None:
    Keeping(path, controller).end()
    content = path.read_bytes()
    controller.restart()
    assert "had learned the cost model serving, and has line" in Keeping(path, controller, form="line").said[0]
    path.write_bytes(content)
    other = compiled(base=20.0)
    assert "policy default had begun to learn from another start" in Keeping(path, other).said[0]
    assert other.taught == controller.taught == 0


def test_another_policy_starts_from_the_settings_and_nothing_is_refused(
    path: Path, controller: CompiledController
) -> None:
    Keeping(path, controller).end()
    controller.restart()
    Keeping(path, controller, policy="reference")
    assert controller.taught == 0
    assert path.exists()


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_neither_waited_for_nor_replaced(
    path: Path, controller: CompiledController, make: Callable[[Path], None]
) -> None:
    make(path)
    kind = path.stat().st_mode
    keeping = Keeping(path, controller)
    keeping.end()
    (line,) = keeping.said
    assert f"{path} cannot be read: " in line
    assert path.stat().st_mode == kind
    assert os.listdir(path.parent) == [path.name]


def test_what_cannot_be_written_is_said_once_and_tried_again(path: Path, controller: CompiledController) -> None:
    keeping = Keeping(path, controller)
    path.parent.rmdir()
    for _ in range(3):
        keeping.step(INTERVAL_SECONDS)
        keeping.step(INTERVAL_SECONDS)
        keeping.written()
    assert ["cannot be written" in line for line in keeping.said] == [False, True]
    path.parent.mkdir()
    assert keeping.end() == decoded_state(path.read_bytes()).policies["default"].numbers


def test_a_disk_that_stands_still_keeps_neither_a_step_nor_the_end_waiting(
    path: Path, controller: CompiledController, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves, writes = Event(), []

    def stands_still(*_: Any) -> None:
        writes.append(1)
        moves.wait()

    monkeypatch.setattr(state_keeper, "_put", stands_still)
    monkeypatch.setattr(state_keeper, "CLOSE_SECONDS", 0.01)
    keeping = Keeping(path, controller)
    for _ in range(4):
        keeping.step(INTERVAL_SECONDS)
    keeping.keeper.close()
    assert writes == [1]
    assert "is yet to be written; not waited for" in keeping.said[-1]
    moves.set()


# What an engine is told apart by.


def test_an_engine_is_told_from_others_by_what_costs_and_acceptance_depend_on() -> None:
    def identity(**config: Any) -> dict[str, Any]:
        vllm_config = make_config(**config)
        header = header_of(vllm_config, "default", (1, 2), None, (8, 16))
        return identity_of(vllm_config, header)

    def others(**config: Any) -> set[str]:
        # Each config has its models in a folder of its own.
        words = differences(identity(), identity(**config))
        return {line.split(" ", 1)[0] for line in words} - {"model", "drafter"}

    assert others(max_num_seqs=4, max_model_len=512) == set()
    assert others(num_speculative_tokens=2) == {"draft_limit"}
    assert others(dtype="float32") == {"dtype"}
    assert others(method="ngram") == {"method"}


@pytest.mark.parametrize(
    ("policy", "section", "form"),
    [
        ("default", {}, "serving"),
        ("reference", {}, "reference"),
        ("default", {"form": "line"}, "line"),
        ("default", {"online": 0}, "COST_MS"),
        ("default", {"model": "qwen3-32b-b300"}, "serving"),
    ],
)
def test_a_policys_form_is_the_settings_or_the_fits_or_its_own(
    policy: PolicyName, section: dict[str, Any], form: str
) -> None:
    assert form_name(load_settings({"adaptive_k": section}), policy) == form


# In the engine's loop.


@pytest.fixture
def start(build: Build, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeEngine]:
    """Starts an engine that keeps its state; all serve the models of one folder, as engines do that start again."""

    @contextmanager
    def folder() -> Iterator[str]:
        models = tmp_path / "models"
        models.mkdir()
        yield str(models)
        rmtree(models)

    monkeypatch.setattr("harness.TemporaryDirectory", folder)
    return lambda **settings: build(True, {"state": str(path), "code_mode": 0, **settings})


def served(engine: FakeEngine) -> KeptState:
    """What an engine keeps that has served, and was shut down."""
    for _ in range(3):
        engine.add(8, 60)
    engine.drain()
    engine.scheduler.shutdown()
    state = pilot_of(engine)._state
    assert state is not None
    return decoded_state(state.path.read_bytes())


def test_an_engine_that_starts_again_goes_on_where_the_last_one_ended(
    start: Callable[..., FakeEngine], log: pytest.LogCaptureFixture
) -> None:
    first = start()
    state = served(first)
    second = start()
    of_first, of_second = pilot_of(first).controller, pilot_of(second).controller
    assert numbers(of_second) == state.policies["default"].numbers == numbers(of_first)
    assert of_second.taught > 10
    assert f"goes on with what {of_second.taught} steps taught" in log.text
    # A fault throws away what was learned; what was saved before it stays until something was learned anew.
    pilot_of(second).restart([])
    assert of_second.taught == 0
    second.scheduler.shutdown()
    third = start()
    assert pilot_of(third).controller.taught == of_first.taught
    served(third)


def test_each_policy_goes_on_with_its_own(start: Callable[..., FakeEngine], tmp_path: Path) -> None:
    control = tmp_path / "control"
    control.write_text("policy reference")
    state = served(start(control=str(control)))
    taught = {policy: kept.numbers["cost.taught"] for policy, kept in state.policies.items()}
    assert taught["default"] == [0.0] < taught["reference"]
    second = start(control=str(control))
    second.add(8, 1)
    second.drain()
    assert [float(pilot_of(second).controller.taught)] >= taught["reference"]


def test_an_engine_that_is_never_shut_down_is_saved_as_python_ends(path: Path) -> None:
    """In a process of its own, as such an engine is in the user's own."""
    program = f"""
import pytest
from adaptive_engine import builder
engine = builder(pytest.MonkeyPatch())(True, {{"state": {str(path)!r}, "code_mode": 0}}, {{"max_num_seqs": 1}})
engine.add(8, 60)
engine.drain()
"""
    paths = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": paths})
    assert decoded_state(path.read_bytes()).policies["default"].numbers["cost.taught"] > [3.0]
