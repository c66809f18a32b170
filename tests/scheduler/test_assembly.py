"""What serving starts with, from the settings and the served model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import equinox as eqx
import pytest
from vllm.config import VllmConfig

from akjax import DraftOutcomes, StepMeasures
from akjax.cost import UNEVEN, dense_cost, parse_table, reference_cost, serving_cost
from akjax.forms import FORMS, Engine
from akjax.scheduler.assembly import assemble, controller_of, cost_start, routing_of_model
from akjax.scheduler.control_file import PolicyName
from akjax.scheduler.pilot import Pilot
from akjax.scheduler.served_model import Routing
from akjax.scheduler.settings import SettingsError, load_settings
from harness import make_config

TINY_TARGET = Path(__file__).parents[2] / "scripts/tiny_pair/target"


def cost(routing: Routing | None, policy: PolicyName = "reference", **section: Any) -> Any:
    settings = load_settings({"adaptive_k": section})
    return cost_start(policy, settings, routing_of_model(settings, routing), (0, 2), (8, 16)).model


def test_the_cost_starts_with_the_models_routing() -> None:
    expected = reference_cost(27.0, 0.635, 0.542, experts=64, top_k=6)
    assert eqx.tree_equal(cost(Routing(64, 6)), expected)


def test_the_cost_starts_with_the_coefficients_set() -> None:
    expected = reference_cost(10.0, 0.25, 0.5, experts=64, top_k=6)
    assert eqx.tree_equal(cost(Routing(64, 6), model=[10.0, 0.25, 0.5]), expected)


@pytest.mark.parametrize("routing", [None, Routing(128, 4)])
def test_experts_and_top_k_that_are_set_go_before_the_models(routing: Routing | None) -> None:
    expected = reference_cost(27.0, 0.635, 0.542, experts=64, top_k=6)
    assert eqx.tree_equal(cost(routing, experts=64, top_k=6), expected)


def test_one_of_experts_and_top_k_may_be_set_alone() -> None:
    expected = reference_cost(27.0, 0.635, 0.542, experts=64, top_k=2)
    assert eqx.tree_equal(cost(Routing(8, 2), experts=64), expected)
    assert eqx.tree_equal(cost(Routing(64, 4), top_k=2), expected)


@pytest.mark.parametrize(("given", "missing"), [("EXPERTS", "TOP_K"), ("TOP_K", "EXPERTS")])
def test_one_of_experts_and_top_k_alone_needs_a_model_that_says_the_other(given: str, missing: str) -> None:
    with pytest.raises(SettingsError, match=f"VLLM_ADAPTIVE_K_{given}=7: .*set VLLM_ADAPTIVE_K_{missing} too"):
        cost(None, **{given.lower(): 7})


def test_a_dense_model_has_no_experts_to_read() -> None:
    assert eqx.tree_equal(cost(None), dense_cost(27.0, 0.542))


@pytest.mark.parametrize("routing", [Routing(1, 1), Routing(8, 8), Routing(8, 9)])
def test_a_model_whose_every_expert_works_counts_as_dense(routing: Routing) -> None:
    assert eqx.tree_equal(cost(routing), dense_cost(27.0, 0.542))


def test_every_expert_by_the_settings_counts_as_dense() -> None:
    assert eqx.tree_equal(cost(Routing(64, 6), experts=8, top_k=8), dense_cost(27.0, 0.542))


@pytest.mark.parametrize("routing", [None, Routing(64, 6)])
def test_without_learning_the_table_is_used(routing: Routing | None) -> None:
    assert eqx.tree_equal(cost(routing, online=False), parse_table("2:47,4:53,8:65"))
    assert eqx.tree_equal(cost(routing, online=0, cost_ms="8:30,1:20"), parse_table("1:20,8:30"))


@pytest.mark.parametrize(("routing", "experts", "top_k"), [(Routing(64, 6), 64, 6), (None, None, None)])
def test_the_default_policys_cost_knows_lengths_and_captured_sizes(
    routing: Routing | None, experts: int | None, top_k: int | None
) -> None:
    expected = serving_cost(10.0, 0.25, 0.5, lengths=(0, 2), experts=experts, top_k=top_k, sizes=(8, 16))
    assert eqx.tree_equal(cost(routing, "default", model=[10.0, 0.25, 0.5]), expected)


def test_the_default_policys_cost_knows_uneven_steps_where_there_may_be_any() -> None:
    expected = serving_cost(27.0, 0.635, 0.542, lengths=(0, 2), experts=64, top_k=6, sizes=(8, 16), uneven=UNEVEN)
    assert eqx.tree_equal(cost(Routing(64, 6), "default", per_request=True), expected)


@pytest.mark.parametrize("policy", ["default", "reference"])
@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_served_by_its_name(form: str, policy: PolicyName) -> None:
    model = cost(Routing(64, 6), policy, form=form)
    assert eqx.tree_equal(model, FORMS[form](Engine(lengths=(0, 2), experts=64, top_k=6, sizes=(8, 16))))


def test_a_preset_of_the_defaults_coefficients_is_the_default() -> None:
    settings = load_settings({"adaptive_k": {"model": "default"}})
    start = cost_start("default", settings, Routing(64, 6), (0, 2), (8, 16))
    assert eqx.tree_equal(start.model, cost(Routing(64, 6), "default"))
    assert start.covariance is None


def test_a_preset_is_adapted_or_refused_as_any_other_fit() -> None:
    settings = load_settings({"adaptive_k": {"model": "qwen3.6-35b-a3b-b300"}})
    start = cost_start("default", settings, Routing(64, 6), (0, 2), ())
    assert start.unmatched == ("factor_at_0", "factor_at_2")
    assert start.covariance is not None
    dense = cost_start("default", settings, None, (0, 2), ())
    assert dense.unmatched == ("diversity", "factor_at_0", "factor_at_2", "per_expert")
    settings = load_settings({"adaptive_k": {"model": "qwen3.6-35b-a3b-b300", "form": "line"}})
    with pytest.raises(SettingsError, match=r"FORM=line: the fit of VLLM_ADAPTIVE_K_MODEL has serving"):
        cost_start("default", settings, None, (0, 2), ())


@pytest.mark.parametrize(("code_mode", "of_default"), [("0", "0"), ("1", "1"), ("gated", "1")])
def test_the_default_policy_gates_no_modes(code_mode: str, of_default: str) -> None:
    settings = load_settings({"adaptive_k": {"code_mode": code_mode}})
    assert controller_of("default", settings, 4, (2, 4)).code_mode == of_default
    assert controller_of("reference", settings, 4, (2, 4)).code_mode == code_mode


def test_the_default_policy_needs_a_base() -> None:
    with pytest.raises(SettingsError, match=r"VLLM_ADAPTIVE_K_MODEL=.*must be above 0"):
        cost(None, "default", model=[0.0, 0.25, 0.5])


def test_the_reference_knows_no_length_of_0() -> None:
    settings = load_settings({"adaptive_k": {}})
    assert controller_of("reference", settings, 4, (0, 2, 4)).policy.levels == (2, 4)
    assert controller_of("default", settings, 4, (0, 2, 4)).policy.levels == (0, 2, 4)


def assembled(
    config: VllmConfig, lookup: Sequence[int] | None = None, lines: list[str] | None = None, **section: Any
) -> Pilot:
    config.additional_config = {"adaptive_k": section}
    return assemble(config, lookup, ([] if lines is None else lines).append)


def test_an_engine_without_speculation_is_refused() -> None:
    with pytest.raises(ValueError, match="--speculative-config"):
        assembled(make_config(num_speculative_tokens=None))


def test_a_bad_setting_stops_the_engine_before_it_serves() -> None:
    with pytest.raises(ValueError, match=r"'alpha'\]=2"):
        assembled(make_config(), alpha=2)


@pytest.mark.parametrize(("policy", "chosen_from"), [("reference", "1, 4"), ("default", "0, 1, 4")])
def test_the_first_line_says_what_may_be_chosen_and_from_which_costs(policy: PolicyName, chosen_from: str) -> None:
    lines: list[str] = []
    config = make_config(schedule=[(1, 1, 4), (2, 2, 1), (3, 3, 0)], max_num_seqs=1)
    assembled(config, [0, 4, 1, 0], lines, code_mode=0, model=[10, 0.25, 0.5], policy=policy)
    (line,) = lines
    assert f"from {chosen_from} (K=4)" in line
    assert "base 10 ms, per_expert 0.25 ms/expert, diversity 1, per_token 0.5 ms/token" in line


def test_an_engine_with_a_fixed_table_starts() -> None:
    pilot = assembled(make_config(max_num_seqs=1), code_mode=0, online=False)
    model = pilot.controller.settle().cost.belief.model
    assert eqx.tree_equal(model, parse_table("2:47,4:53,8:65"), typematch=False)


@pytest.mark.parametrize("form", ["dispersion", "roofline", "table", "residual"])
def test_an_engine_compiles_a_form_and_learns_it(form: str) -> None:
    controller = assembled(make_config(max_num_seqs=1), code_mode=0, form=form).controller
    for _ in range(30):
        controller.observe(
            step=StepMeasures(tokens=5, requests=1, drafting=4), ms=80.0, teaches=True, outcomes=DraftOutcomes()
        )
        controller.decide([], [])
    assert controller.taught > 20
    assert controller.predicted_ms == pytest.approx(80.0, rel=0.02)


def test_nothing_of_jax_runs_before_it_is_kept_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # A GPU's backend would take most of its memory.
    called: list[str] = []

    def no_start(*_: object) -> NoReturn:
        called.append("start")
        raise ValueError("far enough")

    monkeypatch.setattr("akjax.scheduler.assembly.keep_to_cpu", lambda: called.append("cpu"))
    monkeypatch.setattr("akjax.scheduler.assembly.cost_start", no_start)
    with pytest.raises(ValueError, match="far enough"):
        assembled(make_config(max_num_seqs=1), code_mode=0)
    assert called == ["cpu", "start"]


def test_an_engine_without_a_tokenizer_starts_without_code_mode() -> None:
    lines: list[str] = []
    assert assembled(make_config(max_num_seqs=1), None, lines).modes is None
    assert any("no tokenizer" in line for line in lines)


def test_the_served_tokenizer_tells_code_from_prose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = make_config(max_num_seqs=1)
    config.model_config.tokenizer = str(TINY_TARGET)
    config.model_config.skip_tokenizer_init = False
    modes = assembled(config).modes
    assert modes is not None
    assert [modes.scan("r", tokens) for tokens in (b"a `", b"``\n", [258], [259], b"```")] == [0, 1, 2, 1, 0]
