"""Requests whose drafts are accepted for reasons of their own: which they are, and that they teach only themselves."""

from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from adaptive_engine import Build, pilot_of, scheduler_of
from akjax.scheduler.sampling import is_apart
from harness import bernoulli


@pytest.mark.parametrize(
    ("sampling", "apart"),
    [
        ({}, False),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3}, False),
        ({"max_tokens": 5, "min_tokens": 2, "stop": ["x"], "stop_token_ids": [3], "logprobs": 1}, False),
        ({"presence_penalty": 0.5}, True),
        ({"frequency_penalty": -0.5}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"repetition_penalty": 1.0}, False),
        ({"bad_words": ["x"]}, True),
        ({"allowed_token_ids": [1, 2]}, True),
        ({"logit_bias": {1: -100.0}}, True),
        ({"extra_args": {"adaptive_k_teaches_pool": 0}}, True),
        ({"extra_args": {"adaptive_k_teaches_pool": False}}, True),
        ({"extra_args": {"adaptive_k_teaches_pool": 1}}, False),
        ({"extra_args": {"other": 0}}, False),
    ],
)
def test_sampling_that_no_drafter_knows_of_sets_a_request_apart(sampling: dict[str, Any], apart: bool) -> None:
    assert is_apart(SamplingParams(**sampling)) == apart


def test_a_request_without_sampling_is_as_all_others() -> None:
    assert not is_apart(None)


def survival(build: Build, *kinds: tuple[str, dict[str, Any]]) -> float:
    """P(first draft) by the pool after requests of these kinds: a name that says how well they do, and sampling."""
    accept = {"good": bernoulli((0.9,)), "bad": bernoulli((0.1,))}
    engine = build(
        True,
        {"code_mode": 0},
        {"schedule": [(1, 8, 4)]},
        accept=lambda name, *rest: accept[name.partition(" ")[0]](name, *rest),
    )
    for number in range(3):
        for kind, sampling in kinds:
            # The bad ones take as many steps for fewer tokens, and end first.
            engine.add(8, 500 if kind == "good" else 100, f"{kind} {number}", **sampling)
    engine.drain()
    mean = np.asarray(pilot_of(engine).controller.settle().pools.mean)[0, 0]
    return float(1.0 / (1.0 + np.exp(-mean)))


PENALTY = {"presence_penalty": 1.0}


def test_requests_apart_leave_the_pool_to_the_others(build: Build) -> None:
    alone = survival(build, ("good", {}))
    assert alone == pytest.approx(0.9, abs=0.06)
    assert survival(build, ("good", {}), ("bad", PENALTY)) == pytest.approx(alone, abs=0.03)
    assert survival(build, ("good", {}), ("bad", {})) < 0.75


def test_an_engine_that_has_none_but_those_learns_from_them(build: Build) -> None:
    assert survival(build, ("bad", PENALTY)) < 0.3


def test_after_a_fault_a_request_is_still_apart(build: Build) -> None:
    engine = build(True, {"code_mode": 0})
    engine.add(8, 60, "apart", **PENALTY)
    engine.add(8, 60, "other")
    engine.run(5)
    scheduler = scheduler_of(engine)
    scheduler._begin_anew(pilot_of(engine), ValueError("injected"))
    assert scheduler.pilot is not None
    assert scheduler.pilot.controller.apart_ids == {"apart"}
    engine.drain()
    engine.run(2)
    assert scheduler.pilot.request_ids == set()
