"""The scheduler's parts against the recordings: modes, and whole runs."""

from typing import Any

import jax
import pytest

from akjax import CompiledController, RunningRates, reference_controller, reference_cost
from akjax.scheduler.control_file import ControlFile
from akjax.scheduler.modes import ModeTracker, Vocabulary
from akjax.scheduler.pilot import Pilot, ScheduledStep, VerifiedDrafts
from akjax.scheduler.reports import Reports
from recordings import assert_close, scenarios

MODE_NAMES = ["prose", "code", "tool"]


@pytest.mark.parametrize("scenario", scenarios("modes"))
def test_modes_follow_the_recording(scenario: dict[str, Any]) -> None:
    markers = scenario["tool_open"], scenario["tool_close"]
    pieces = {token: piece for token, piece in enumerate(scenario["pieces"]) if "`" in piece and token not in markers}
    tracker = ModeTracker(Vocabulary(pieces, *markers))
    for event in scenario["events"]:
        assert MODE_NAMES[tracker.scan("r", event["new"])] == event["mode"]
        assert tracker.switches == event["switches"]


def pilot_of(scenario: dict[str, Any]) -> Pilot:
    settings, mode = scenario["settings"], scenario["mode"]
    code_mode: Any = {"batch": "0", "per_request": "0", "gated": "gated", "code": "1"}[mode]
    controller = CompiledController(
        reference_controller(
            RunningRates(*(settings[name] for name in ("alpha", "global_alpha", "global_drift", "prior"))),
            draft_limit=scenario["num_spec_tokens"],
            levels=tuple(scenario["levels"]),
            margin=settings["margin"],
            per_request=mode == "per_request",
            code_mode=code_mode,
        ),
        reference_cost(27.0, 0.635, 0.542, experts=settings["experts"], top_k=settings["topk"]),
        max_requests=max(len(step["scheduled"]) for step in scenario["steps"]),
    )
    backticks = {int(token): piece for token, piece in scenario["backticks"].items()}
    vocabulary = Vocabulary(backticks, scenario["tool_open"], scenario["tool_close"])
    modes = None if code_mode == "0" else ModeTracker(vocabulary)
    return Pilot(
        {"reference": controller}, ControlFile(None, scenario["num_spec_tokens"]), modes, Reports(lambda _: None)
    )


@pytest.mark.parametrize(
    "scenario",
    [scenario for mode in ("batch", "per_request", "gated", "code") for scenario in scenarios(f"serve_{mode}")],
)
def test_whole_run_follows_the_recording(scenario: dict[str, Any]) -> None:
    pilot = pilot_of(scenario)
    finished: list[str] = []
    now = 0.0
    for step in scenario["steps"]:
        scheduled = step["scheduled"]
        plan = pilot.scheduled(list(scheduled), finished, now)
        if step["k_per_request"] is None:
            assert plan.draft_length == step["k"]
            assert not plan.each
        else:
            each = {request_id: plan.each.get(request_id, plan.draft_length) for request_id in scheduled}
            assert each == step["k_per_request"]
            assert plan.draft_length == max(each.values())

        now += step["ms"] * 1e-3
        modes = [0] * len(scheduled) if pilot.modes is None else pilot.modes.of([*scheduled])
        assert dict(zip(scheduled, modes, strict=True)) == step["modes"]
        pilot.output(
            ScheduledStep(scheduled, {request_id: [-1] * drafts for request_id, drafts in step["drafted"].items()}),
            VerifiedDrafts(
                [*step["accepted"]], [step["drafted"][r] for r in step["accepted"]], [*step["accepted"].values()], {}
            ),
            now,
        )
        pilot.read(step["new"].items())
        finished = step["finished"]

        state = pilot.controller.settle()
        model = state.cost.belief.model
        learned = {p.name: leaf for p, leaf in zip(model.parameters(), jax.tree.leaves(model), strict=True)}
        assert_close([learned[n] for n in ("base", "per_expert", "per_token", "diversity")], step["x"])
        assert int(state.cost.taught) == step["n"]
        assert_close(state.pools[0], step["g"])
        if step["mode_g"] is not None:
            assert_close(state.pools[1:], [step["mode_g"][mode] for mode in ("1", "2")])
