"""A model's routing, read off the configs that the served models really have."""

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from akjax.scheduler.served_model import Routing, routing_of


def config(**fields: Any) -> Any:
    return SimpleNamespace(**fields)


@pytest.mark.parametrize("experts", ["num_experts", "n_routed_experts", "num_local_experts"])
def test_each_name_for_the_experts(experts: str) -> None:
    assert routing_of(config(**{experts: 64, "num_experts_per_tok": 6})) == Routing(64, 6)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("qwen3_moe", {"num_experts": 12, "num_experts_per_tok": 2}),
        ("qwen3_next", {"num_experts": 12, "num_experts_per_tok": 2}),
        ("mixtral", {"num_local_experts": 12, "num_experts_per_tok": 2}),
        ("gpt_oss", {"num_local_experts": 12, "num_experts_per_tok": 2}),
        ("deepseek_v3", {"n_routed_experts": 12, "num_experts_per_tok": 2}),
        ("glm4_moe", {"n_routed_experts": 12, "num_experts_per_tok": 2}),
        ("ernie4_5_moe", {"moe_num_experts": 12, "moe_k": 2}),
        ("hunyuan_v1_moe", {"num_experts": 12, "moe_topk": 2}),
        ("gemma4_text", {"num_experts": 12, "top_k_experts": 2}),
    ],
)
def test_configs_of_transformers(model_type: str, fields: dict[str, int]) -> None:
    assert routing_of(AutoConfig.for_model(model_type, **fields)) == Routing(12, 2)


def test_the_names_for_top_k_that_vllm_knows_too() -> None:
    for name in ("num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts"):
        assert routing_of(config(num_experts=64, **{name: 6})) == Routing(64, 6), name


@pytest.mark.parametrize("model_type", ["qwen3", "llama", "gemma3_text"])
def test_a_dense_model_has_none(model_type: str) -> None:
    assert routing_of(AutoConfig.for_model(model_type)) is None


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_experts": 0, "num_experts_per_tok": 2},
        {"num_experts": None, "num_experts_per_tok": None},
        {"num_experts": 64},
        {"num_experts_per_tok": 6},
        {"num_experts": [], "num_experts_per_tok": 6},
        {"num_experts": [0, 0], "num_experts_per_tok": 6},
        {"num_experts": "64", "num_experts_per_tok": 6},
        {"text_config": None},
    ],
)
def test_half_a_routing_is_none(fields: dict[str, Any]) -> None:
    assert routing_of(config(**fields)) is None


def test_a_nested_text_config_is_read() -> None:
    text = config(n_routed_experts=288, num_experts_per_tok=8)
    assert routing_of(config(text_config=text, vision_config=config())) == Routing(288, 8)
    assert routing_of(AutoConfig.for_model("llama4", text_config={"num_local_experts": 16})) == Routing(16, 1)


def test_the_outer_config_goes_before_a_nested_one() -> None:
    nested = config(num_experts=8, num_experts_per_tok=2)
    assert routing_of(config(num_experts=64, num_experts_per_tok=6, text_config=nested)) == Routing(64, 6)


def test_the_two_numbers_come_from_one_config() -> None:
    nested = config(num_experts=8, num_experts_per_tok=2)
    assert routing_of(config(num_experts_per_tok=6, text_config=nested)) == Routing(8, 2)


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_number_for_each_layer_gives_the_largest(kind: type) -> None:
    fields = {"num_experts": kind([0, 64, 64]), "num_experts_per_tok": kind([0, 6, 6])}
    assert routing_of(config(**fields)) == Routing(64, 6)


def test_an_unused_name_does_not_hide_the_used_one() -> None:
    assert routing_of(config(num_experts=None, n_routed_experts=64, num_experts_per_tok=6)) == Routing(64, 6)


def test_a_layer_whose_every_expert_works_has_a_routing() -> None:
    assert routing_of(config(num_experts=4, num_experts_per_tok=4)) == Routing(4, 4)


@pytest.mark.parametrize("nested", ["text_config", "llm_config", "language_config"])
def test_a_nested_text_config_is_looked_into(nested: str) -> None:
    config = SimpleNamespace(**{nested: SimpleNamespace(num_experts=64, num_experts_per_tok=6)})
    assert routing_of(config) == Routing(64, 6)


def test_a_list_for_each_layer_may_have_layers_without_experts() -> None:
    assert routing_of(SimpleNamespace(num_experts=[None, 64], num_experts_per_tok=[None, 6])) == Routing(64, 6)
