"""The oracle against the recorded runs, and against cases worked by hand that no recording holds."""

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose
from numpy.typing import ArrayLike

from oracle import (
    CODE,
    PROSE,
    TOOL,
    Acceptance,
    Array,
    CostFilter,
    CostTable,
    Modes,
    Output,
    Serve,
    Settings,
    Step,
    choose_batch,
    choose_per_request,
)
from recordings import scenarios

SERVE = ("serve_batch", "serve_per_request", "serve_gated", "serve_code")


def golden(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("scenario", [param for kind in kinds for param in scenarios(kind)])


def close(got: Any, want: Any, rtol: float = 1e-9, atol: float = 0.0) -> None:
    assert_allclose(got, want, rtol=rtol, atol=atol)


def survivals(rates: list[list[float]]) -> list[Array]:
    return [np.cumprod(row) for row in rates]


def fitted(scenario: dict[str, Any]) -> CostFilter:
    cost = CostFilter(Settings(**scenario["settings"]))
    cost.x = np.array(scenario["x"])
    return cost


# --- the recordings -----------------------------------------------------------------------------------


@golden("acceptance")
def test_acceptance(scenario: dict[str, Any]) -> None:
    acceptance = Acceptance(Settings(**scenario["settings"]), scenario["num_spec_tokens"])
    for event in scenario["events"]:
        acceptance.observe(event["req"], event["drafted"], event["accepted"])
        close(acceptance.of(event["req"]), event["c"], atol=1e-12)
        close(acceptance.g, event["g"], atol=1e-12)


@golden("cost_filter")
def test_cost_filter(scenario: dict[str, Any]) -> None:
    cost = CostFilter(Settings(**scenario["settings"], model=scenario["theta"]))
    for event in scenario["events"]:
        close(cost.predicted(event["tokens"]), event["predicted"])
        cost.update(event["tokens"], event["ms"])
        close(cost.x, event["x"])
        close(cost.P, event["P"], rtol=1e-7)
        close(cost.err, event["err"])
    tokens, ms = zip(*scenario["curve"], strict=True)
    close(cost.predicted(tokens), ms)


@golden("cost_table")
def test_cost_table(scenario: dict[str, Any]) -> None:
    tokens, ms = zip(*scenario["curve"], strict=True)
    close(CostTable(scenario["spec"]).predicted(tokens), ms)


@golden("choose_batch")
def test_choose_batch(scenario: dict[str, Any]) -> None:
    k = choose_batch(
        survivals(scenario["rates"]),
        fitted(scenario).predicted,
        scenario["levels"],
        scenario["current_k"],
        scenario["settings"]["margin"],
    )
    assert k == scenario["k"]


@golden("choose_per_request")
def test_choose_per_request(scenario: dict[str, Any]) -> None:
    assert choose_per_request(survivals(scenario["rates"]), fitted(scenario).predicted) == scenario["k"]


@golden("modes")
def test_modes(scenario: dict[str, Any]) -> None:
    names = {PROSE: "prose", CODE: "code", TOOL: "tool"}
    backticks = {token: text for token, text in enumerate(scenario["pieces"]) if "`" in text}
    modes = Modes(backticks, scenario["tool_open"], scenario["tool_close"])
    for event in scenario["events"]:
        modes.scan("r", event["new"])
        assert names[modes.of("r")] == event["mode"]
        assert modes.switches == event["switches"]


@golden(*SERVE)
def test_serve(scenario: dict[str, Any]) -> None:
    mode = scenario["mode"]
    settings = Settings(
        **scenario["settings"],
        per_request=mode == "per_request",
        code_mode={"gated": "gated", "code": "1"}.get(mode, "0"),
    )
    backticks = {int(token): text for token, text in scenario["backticks"].items()}
    modes = Modes(backticks, scenario["tool_open"], scenario["tool_close"])
    serve = Serve(settings, scenario["num_spec_tokens"], scenario["levels"], modes)
    assert isinstance(serve.cost, CostFilter)
    for row in scenario["steps"]:
        step = Step(row["scheduled"], row["drafted"])
        assert serve.scheduled(step) == (row["k"], row["k_per_request"])
        assert {req: modes.of(req) for req in step.scheduled} == row["modes"]
        serve.output(step, row["ms"], Output(row["accepted"], row["new"], row["finished"]))
        assert serve.cost.n == row["n"]
        close(serve.cost.x, row["x"])
        close(serve.usual.g, row["g"], atol=1e-12)
        for of_mode, g in (row["mode_g"] or {}).items():
            close(serve.acceptance[int(of_mode)].g, g, atol=1e-12)


# --- by hand ------------------------------------------------------------------------------------------


class Prices:
    """A cost of a step that says exactly what each number of tokens costs, to make ties exact."""

    def __init__(self, **ms: float) -> None:
        self.ms = {int(tokens[1:]): value for tokens, value in ms.items()}

    def __call__(self, tokens: ArrayLike) -> Array:
        return np.array([self.ms.get(int(t), 1e6) for t in np.atleast_1d(tokens)])


def run(modes: Modes | None = None, levels: tuple[int, ...] = (1, 2), **settings: Any) -> Serve:
    return Serve(Settings(**settings), 2, levels, modes or Modes({0: "```"}, 1, 2))


def decode(*reqs: str, accepted: int = 2, new: tuple[int, ...] = (), finished: tuple[str, ...] = ()) -> Any:
    step = Step(dict.fromkeys(reqs, 3), dict.fromkeys(reqs, 2))
    return step, Output(dict.fromkeys(reqs, accepted), dict.fromkeys(reqs, new), finished)


def play(serve: Serve, *reqs: str, ms: float = 40.0, **output: Any) -> tuple[int, dict[str, int] | None]:
    step, out = decode(*reqs, **output)
    choice = serve.scheduled(step)
    serve.output(step, ms, out)
    return choice


class TestChooseBatch:
    sure = survivals([[1.0, 1.0, 1.0]])  # each k gives k + 1 tokens

    def test_of_equal_scores_the_first_is_best(self) -> None:
        assert choose_batch(self.sure, Prices(t2=1.0, t3=1.5, t4=3.0), [1, 2, 3], 9, 0.0) == 1

    def test_current_stays_on_a_tie(self) -> None:
        assert choose_batch(self.sure, Prices(t2=1.0, t3=1.5, t4=2.0), [1, 2, 3], 2, 0.0) == 2

    def test_a_gain_of_just_the_margin_is_not_enough(self) -> None:
        prices = Prices(t2=1.0, t3=1.0)  # scores 2 and 3
        assert choose_batch(self.sure, prices, [1, 2], 1, 0.5) == 1
        assert choose_batch(self.sure, prices, [1, 2], 1, 0.49) == 2

    def test_current_that_is_no_level_goes_whatever_the_margin(self) -> None:
        assert choose_batch(self.sure, Prices(t2=1.0, t3=1.0), [1, 2], 3, 100.0) == 2

    def test_nothing_decoding(self) -> None:
        assert choose_batch([], Prices(), [1, 2], 3, 0.03) == 3


class TestChoosePerRequest:
    even = survivals([[0.5, 1.0], [0.5, 1.0]])  # four slots of the same score

    def test_of_equal_slots_the_earlier_request_is_first(self) -> None:
        assert choose_per_request(self.even, Prices(t4=1.0)) == [2, 1]
        assert choose_per_request(self.even, Prices(t6=1.0)) == [2, 2]

    def test_of_equal_values_the_smallest_budget(self) -> None:
        assert choose_per_request(self.even, Prices(t2=2.0, t4=3.0)) == [1, 1]

    def test_no_slot_at_all_can_be_best(self) -> None:
        assert choose_per_request(self.even, Prices(t2=1.0, t4=2.0)) == [1, 1]

    def test_one_request(self) -> None:
        assert choose_per_request(survivals([[0.5, 0.5, 0.5]]), Prices(t3=1.0)) == [2]


class TestCostTable:
    def test_one_point(self) -> None:
        close(CostTable("4:50").predicted([1, 4, 9]), [50.0, 50.0, 50.0])

    def test_last_point_twice(self) -> None:
        close(CostTable("4:50,2:40,4:50").predicted([1, 3, 4, 9]), [40.0, 45.0, 50.0, 50.0])

    def test_other_point_twice(self) -> None:
        close(CostTable("2:40,2:40,4:50").predicted([1, 2, 3, 6]), [40.0, 40.0, 45.0, 60.0])


class TestCostFilter:
    @pytest.mark.parametrize("topk", [2, 16])
    def test_gradient_is_the_slope(self, topk: int) -> None:
        cost, h = CostFilter(Settings(experts=16, topk=topk)), 1e-6
        slope = []
        for i in range(4):
            ends = []
            for side in (h, -h):
                cost.x = np.array([27.0, 0.6, 0.5, 0.7])
                cost.x[i] += side
                ends.append(cost.raw(5.0))
            slope.append((ends[0] - ends[1]) / (2 * h))
        cost.x = np.array([27.0, 0.6, 0.5, 0.7])
        close(cost.gradient(5.0), slope, rtol=1e-6, atol=1e-6)

    def test_one_step(self) -> None:
        cost = CostFilter(Settings(experts=2, topk=1, model=(10.0, 4.0, 2.0)))
        close(cost.predicted(1), 16.0)  # 10 + 4 * (2 * 0.5) + 2
        cost.update(1, 20.0)
        d_slope = 4.0 * 2.0 * 0.5 * np.log(2.0)
        P = np.array([25.0, 4e-4, 4e-3, 0.102])
        H = np.array([1.0, 1.0, 1.0, d_slope])
        gain = P * H / (P @ H**2 + 0.64)
        close(cost.x, [10.0, 4.0, 2.0, 1.0] + gain * 4.0)
        close(cost.P, np.diag(P) - np.outer(gain, P * H))
        close(cost.err, 0.05 * 0.25)


class TestModes:
    @pytest.mark.parametrize(
        ("tokens", "mode"),
        [
            ([0, 0, 0], CODE),
            ([0, 0, 3, 0], PROSE),
            ([0, 0, 1, 0], TOOL),
            ([0, 0, 1, 2, 0], PROSE),
            ([0] * 6, CODE),
            ([0] * 3 + [3] + [0] * 3, PROSE),
            ([1, 1, 2], PROSE),
            ([2], PROSE),
            ([1, 0, 0, 0, 2], CODE),
        ],
    )
    def test_reading(self, tokens: list[int], mode: int) -> None:
        whole, single = Modes({0: "`"}, 1, 2), Modes({0: "`"}, 1, 2)
        whole.scan("r", tokens)
        for token in tokens:
            single.scan("r", [token])
        assert whole.of("r") == single.of("r") == mode
        assert whole.switches == (mode != PROSE)


class TestServe:
    def test_first_output_has_no_time(self) -> None:
        serve = run()
        play(serve, "a")
        assert isinstance(serve.cost, CostFilter)
        assert serve.cost.n == 0
        play(serve, "a")
        assert serve.cost.n == 1

    def test_gate_excludes_its_ends(self) -> None:
        serve = run(model=(40.0, 0.0, 0.0))
        assert isinstance(serve.cost, CostFilter)
        for ms in (40.0, 20.0, 100.0):
            play(serve, "a", ms=ms)
        assert serve.cost.n == 0

    def test_steps_of_prefill_or_nothing_do_not_teach(self) -> None:
        serve = run()
        play(serve, "a")
        assert isinstance(serve.cost, CostFilter)
        for step in (Step({}, {}), Step({"a": 3, "b": 2}, {"a": 2})):
            assert serve.scheduled(step)[0] in serve.levels
            serve.output(step, float(serve.cost.predicted(step.tokens)), Output({}))
        assert serve.cost.n == 0

    def test_fixed_table_stays(self) -> None:
        serve = run(online=False, cost_ms="2:10,4:10")
        for _ in range(3):
            play(serve, "a", ms=100.0)
        assert serve.k == 2  # drafts are free
        assert isinstance(serve.cost, CostTable)
        close(serve.cost.predicted([1, 9]), [10.0, 10.0])

    def test_undecided_requests_get_the_largest(self) -> None:
        serve = run(per_request=True, levels=(2,), model=(1.0, 0.0, 1.0))
        for _ in range(20):
            play(serve, "a", "b", accepted=0)
        step = Step({"new": 7, "a": 3, "b": 3}, {"a": 2, "b": 2})
        assert serve.scheduled(step) == (1, {"new": 1, "a": 1, "b": 1})
        assert serve.k == 2

    def test_finished_request_is_forgotten_after_its_last_observation(self) -> None:
        serve = run()
        play(serve, "a", new=(1,))
        play(serve, "a", accepted=0, new=(2,), finished=("a",))
        assert serve.acceptance[TOOL].g[0] < 0.8
        assert serve.modes.switches == 1  # what ended the request is never read
        assert serve.modes.of("a") == PROSE
        play(serve, "a")
        assert serve.modes.of("a") == PROSE
        assert not any("a" in serve.acceptance[mode].rates for mode in (CODE, TOOL))

    def test_aborted_request_is_forgotten(self) -> None:
        serve = run()
        play(serve, "a", new=(1,))
        serve.drop("a")
        assert "a" not in serve.usual.rates
        serve.scheduled(decode("a")[0])
        assert serve.modes.of("a") == PROSE

    def test_code_mode_off_tracks_nothing(self) -> None:
        serve = run(code_mode="0")
        for _ in range(3):
            play(serve, "a", new=(1,))
        assert serve.modes.of("a") == PROSE
        assert serve.modes.switches == 0

    def test_gate_needs_one_mode_of_all_that_decode(self) -> None:
        serve = run(model=(1.0, 0.0, 1.0), margin=0.0)
        for _ in range(30):  # usual rates fall, those of tool calls have not been seen
            play(serve, "a", "b", accepted=0)
        serve.acceptance[TOOL].g[:] = 1.0
        serve.k = 1
        serve.modes.scan("a", [1])
        assert serve.scheduled(decode("a", "b")[0])[0] == 1
        assert "a" not in serve.acceptance[TOOL].rates  # not used, so not made
        serve.modes.scan("b", [1])
        assert serve.scheduled(Step({"a": 3, "b": 3, "new": 9}, {"a": 2, "b": 2}))[0] == 2
        assert set(serve.acceptance[TOOL].rates) == {"a", "b"}

    def test_per_request_choice_leaves_the_mode_aside(self) -> None:
        serve = run(per_request=True, code_mode="1", model=(1.0, 0.0, 1.0))
        for _ in range(30):
            play(serve, "a", "b", accepted=0, new=(1,))
        serve.acceptance[TOOL].rates["a"][:] = 1.0
        assert serve.scheduled(decode("a", "b")[0])[1] == {"a": 1, "b": 1}
