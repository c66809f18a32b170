"""The core's functions, each against the recordings of its kind."""

from typing import Any

import jax
import numpy as np
import pytest

from akjax import (
    AbstractCostModel,
    Constant,
    DiverseTokens,
    ExpertReads,
    PerToken,
    RunningRates,
    StepFeatures,
    batch_draft_length,
    parse_table,
    per_request_draft_lengths,
    predicted_ms,
    prior_belief,
    reference_cost,
    update,
)
from recordings import COVARIANCE, assert_close, scenarios

# The recordings hold x as (base, per_expert, per_token, d); the form's own order puts the union before PerToken.
RECORDED_ORDER = ["base", "per_expert", "per_token", "diversity"]

observe = jax.jit(RunningRates.observe)
learn = jax.jit(update)
predict = jax.jit(predicted_ms)
choose_batch = jax.jit(batch_draft_length, static_argnames="levels")
choose_per_request = jax.jit(per_request_draft_lengths)


def step_of(tokens: float) -> StepFeatures:
    return StepFeatures(tokens=np.float64(tokens), requests=np.float64(1))


def recorded_order(model: AbstractCostModel) -> list[int]:
    names = [parameter.name for parameter in model.parameters()]
    return [names.index(name) for name in RECORDED_ORDER]


@pytest.mark.parametrize("scenario", scenarios("acceptance"))
def test_rates_follow_the_recording(scenario: dict[str, Any]) -> None:
    settings = scenario["settings"]
    model = RunningRates(*(settings[name] for name in ("alpha", "global_alpha", "global_drift", "prior")))
    pool = model.init_pool(scenario["num_spec_tokens"])
    requests: dict[int, Any] = {}
    for event in scenario["events"]:
        request = requests.get(event["req"], model.init_request(pool))
        pool, request = observe(model, pool, request, np.int32(event["drafted"]), np.int32(event["accepted"]))
        requests[event["req"]] = request
        assert_close(pool, event["g"])
        assert_close(request, event["c"])


@pytest.mark.parametrize("scenario", scenarios("cost_filter"))
def test_filter_follows_the_recording(scenario: dict[str, Any]) -> None:
    settings = scenario["settings"]
    model = reference_cost(*scenario["theta"], experts=settings["experts"], top_k=settings["topk"])
    order = recorded_order(model)
    belief = prior_belief(model)
    for event in scenario["events"]:
        belief, innovation = learn(belief, step_of(event["tokens"]), np.float64(event["ms"]))
        assert_close(innovation.predicted, event["predicted"])
        assert_close(np.asarray(jax.tree.leaves(belief.model))[order], event["x"])
        assert_close(belief.covariance[np.ix_(order, order)], event["P"], COVARIANCE)
    for tokens, ms in scenario["curve"]:
        assert_close(predict(belief.model, step_of(tokens)), ms)


@pytest.mark.parametrize("scenario", scenarios("cost_table"))
def test_table_follows_the_recording(scenario: dict[str, Any]) -> None:
    table = parse_table(scenario["spec"])
    for tokens, ms in scenario["curve"]:
        assert_close(predict(table, step_of(tokens)), ms)


def recorded_cost(scenario: dict[str, Any]) -> AbstractCostModel:
    base, per_expert, per_token, diversity = scenario["x"]
    settings = scenario["settings"]
    union = DiverseTokens(diversity, settings["experts"], settings["topk"])
    return Constant(base) + ExpertReads(per_expert, union) + PerToken(per_token)


def padded_survival(scenario: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Survivals in a multiple of 32 rows, as the controller pads them, and which rows are requests."""
    requests = len(scenario["rates"])
    rates = np.ones((32 * (requests // 32 + 1), scenario["num_spec_tokens"]))
    rates[:requests] = np.reshape(scenario["rates"], (requests, scenario["num_spec_tokens"]))
    return np.cumprod(rates, axis=1), np.arange(len(rates)) < requests


@pytest.mark.parametrize("scenario", scenarios("choose_batch"))
def test_batch_choice_is_the_recorded_one(scenario: dict[str, Any]) -> None:
    survival, decoding = padded_survival(scenario)
    levels, margin = tuple(scenario["levels"]), scenario["settings"]["margin"]
    current = np.int32(scenario["current_k"])
    chosen = choose_batch(survival, decoding, recorded_cost(scenario), levels, current, margin)
    assert int(chosen) == scenario["k"]


@pytest.mark.parametrize("scenario", scenarios("choose_per_request"))
def test_per_request_choice_is_the_recorded_one(scenario: dict[str, Any]) -> None:
    survival, decoding = padded_survival(scenario)
    chosen = choose_per_request(survival, decoding, recorded_cost(scenario))
    assert chosen[decoding].tolist() == scenario["k"]
