"""Drafters that draft lengths can be chosen for, and those that they cannot."""

from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig

from akjax.scheduler import AdaptiveKScheduler
from akjax.scheduler.drafters import RIGID, check_drafter, is_rigid
from harness import FakeEngine, make_config

K = 4
SCHEDULE = [(1, 2, 4), (3, 8, 2)]


def config_for(method: str, **options: Any) -> VllmConfig:
    """An engine's with a drafter that needs a model, a GPU or a package that is not here."""
    config = make_config(num_speculative_tokens=K, max_num_seqs=8, **options)
    assert config.speculative_config is not None
    config.speculative_config.method = method  # pyright: ignore[reportAttributeAccessIssue]
    return config


@pytest.mark.parametrize("method", RIGID)
def test_a_drafter_that_makes_k_alone_is_refused_other_lengths(method: str) -> None:
    config = config_for(method, schedule=SCHEDULE)
    with pytest.raises(
        ValueError, match=f"vLLM's {method} drafter makes 4 drafts .*per_batch_size has 2, 4; leave it out"
    ):
        FakeEngine(AdaptiveKScheduler, config, v2_model_runner=False)


@pytest.mark.parametrize("method", RIGID)
def test_a_drafter_that_makes_k_alone_is_refused_lengths_for_each_request(method: str) -> None:
    config = config_for(method, additional_config={"adaptive_k": {"per_request": True}})
    with pytest.raises(ValueError, match=f"vLLM's {method} drafter makes 4 drafts .*PER_REQUEST=1.*; leave it out"):
        FakeEngine(AdaptiveKScheduler, config, v2_model_runner=False)


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("method", RIGID)
def test_a_drafter_that_makes_k_alone_is_asked_for_k_whatever_the_control_file_says(
    method: str, asynchronous: bool, tmp_path: Path
) -> None:
    control = tmp_path / "control"
    settings = {"control": str(control), "code_mode": 0}
    config = config_for(method, async_scheduling=asynchronous, additional_config={"adaptive_k": settings})
    engine = FakeEngine(AdaptiveKScheduler, config, v2_model_runner=False)
    asked = set()
    for line in ("", "force 2", "force 0", "policy reference"):
        control.write_text(line)
        engine.add(10, 40)
        asked |= {turn.scheduled.num_spec_tokens_to_schedule for turn in engine.drain() if turn.scheduled is not None}
    assert asked == {K}
    engine.check()


@pytest.mark.parametrize("method", RIGID)
def test_vllms_second_model_runner_has_none_of_these(method: str) -> None:
    FakeEngine(AdaptiveKScheduler, config_for(method, schedule=SCHEDULE), v2_model_runner=True)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.parametrize("v2", [True, False], ids=["runner2", "runner1"])
def test_other_drafters_make_any_number(method: Any, v2: bool) -> None:
    engine = FakeEngine(
        AdaptiveKScheduler,
        make_config(
            num_speculative_tokens=K,
            method=method,
            schedule=SCHEDULE,
            max_num_seqs=8,
            async_scheduling=method != "ngram",
            additional_config={"adaptive_k": {"per_request": True, "code_mode": 0}},
        ),
        v2_model_runner=v2,
    )
    for _ in range(4):
        engine.add(20, 60)
    verified = {drafts for turn in engine.drain() for drafts in turn.drafted.values()}
    assert len(verified) > 1
    engine.check()


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "dflash", "dspark", "mlp_speculator", "custom_class"])
def test_no_other_drafter_is_rigid(method: str) -> None:
    config = config_for(method, schedule=SCHEDULE)
    assert not is_rigid(config)
    check_drafter(config, (2, 4), K, per_request=True)


def test_two_that_choose_are_refused() -> None:
    config = config_for("dspark", schedule=SCHEDULE)
    assert config.speculative_config is not None
    config.speculative_config.enable_adaptive_verification = True
    with pytest.raises(ValueError, match=r"enable_adaptive_verification has vLLM choose .* leave one out"):
        FakeEngine(AdaptiveKScheduler, config)


def test_an_engine_that_does_not_speculate_has_no_drafter_to_refuse() -> None:
    config = make_config(num_speculative_tokens=K)
    config.speculative_config = None
    assert not is_rigid(config)
    check_drafter(config, (K,), K, per_request=True)
