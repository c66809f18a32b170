"""The real engine: what is served does not depend on how many drafts are verified, and k is what was asked for."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine_process import serve, tokens_of
from tiny_pair.prompts import PROMPTS

pytestmark = pytest.mark.engine

MAX_TOKENS = 96
# Near the tiny pair's own cost on a CPU core: the reference gate refuses steps far from the prediction.
MODEL = [3.0, 0.1, 0.1]
ADAPTIVE: dict[str, dict[str, Any]] = {
    "default": {"code_mode": "0"},
    "default, gated": {"code_mode": "gated"},
    "default per request": {"per_request": True},
    "reference": {"policy": "reference", "code_mode": "0"},
    "reference, code mode 1": {"policy": "reference", "code_mode": "1"},
    "reference per request": {"policy": "reference", "per_request": True},
    # No clock decides here, so k has to change: each further token costs a tenth of a step.
    "fixed table": {"policy": "reference", "online": False, "cost_ms": "1:10,101:110"},
    # Here it has to end at 0: a second token costs far more than it can bring.
    "fixed table without drafts": {"online": False, "cost_ms": "1:10,101:4010"},
}

# All prompts at once, and the kinds one prompt at a time: large batches and single streams.
EVERY_PROMPT = [prompt for prompts in PROMPTS.values() for prompt in prompts]
PHASES = [{"prompts": EVERY_PROMPT}, *({"prompts": prompts[:1]} for prompts in PROMPTS.values())]


@cache
def served_without_speculation() -> list[Any]:
    job = {"speculation": "none", "max_tokens": MAX_TOKENS, "phases": PHASES}
    return [tokens_of(phase) for phase in serve(job)["phases"]]


@pytest.mark.parametrize("draft_limit", [1, 6])
def test_fixed_k_serves_the_same_tokens(draft_limit: int) -> None:
    job = {"speculation": "fixed", "draft_limit": draft_limit, "max_tokens": MAX_TOKENS, "phases": PHASES}
    assert [tokens_of(phase) for phase in serve(job)["phases"]] == served_without_speculation()


@pytest.mark.parametrize("settings", ADAPTIVE.values(), ids=ADAPTIVE.keys())
def test_adaptive_k_serves_the_same_tokens(settings: dict[str, Any]) -> None:
    job = {
        "speculation": "adaptive",
        "settings": {"model": MODEL, **settings},
        "max_tokens": MAX_TOKENS,
        "phases": PHASES,
    }
    report = serve(job)
    assert report["faults"] == 0
    assert [tokens_of(phase) for phase in report["phases"]] == served_without_speculation()
    if settings.get("online", True):
        assert report["taught"] > 0
    else:
        lengths = {drafts for phase in report["phases"] for step in phase["drafts"] for drafts in step.values()}
        undrafted = any(not step for phase in report["phases"] for step in phase["drafts"][20:])
        assert undrafted if settings["cost_ms"].endswith("4010") else len(lengths) > 1, "k never changed"
    assert report["rows"] == 32, "twice the 16 requests that can run at once"


@pytest.mark.parametrize("per_request", [False, True])
def test_a_forced_k_is_the_number_of_drafts_verified(tmp_path: Path, per_request: bool) -> None:
    control = tmp_path / "control"
    forced = [3, 0, 1, 0, 6, 99]
    prompts, max_tokens = EVERY_PROMPT[:4], 48
    job = {
        "speculation": "adaptive",
        "settings": {"model": MODEL, "control": str(control), "per_request": per_request},
        "max_tokens": max_tokens,
        "phases": [{"prompts": prompts, "control": f"force {k}\n"} for k in forced],
    }
    expected = [tokens[:max_tokens] for tokens in served_without_speculation()[0][: len(prompts)]]
    for k, phase in zip(forced, serve(job)["phases"], strict=True):
        verified = [drafts for step in phase["drafts"] for drafts in step.values()]
        assert set(verified) == ({min(k, 10)} if k else set())
        assert tokens_of(phase) == expected
