"""The real engine: all sorts of requests get what they get without speculation, and teach what is true of them.

`offline.py` asserts after every step that the models were told the drafts that were verified and no others, and after
each phase that nothing is kept of its requests.
"""

import re
from functools import cache
from typing import Any

import pytest

from engine_process import serve
from tiny_pair.prompts import PROMPTS

# The first test of each drafter waits for its engine, and the very first for two.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

MAX_TOKENS = 48
# How the engine speculates, and what drafts cost: no clock decides over the first one's, which are deep throughout.
DRAFTERS: dict[str, dict[str, Any]] = {
    "draft model": {"settings": {"online": False, "cost_ms": "1:10,101:11"}},
    "n-gram": {"settings": {}, "drafter": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4}},
}
CODE, PROSE, TOOL = (PROMPTS[kind] for kind in ("code", "prose", "tool"))
# The tiny pair's tokens are mostly characters.
E, COMMA = ord("e"), ord(",")

GRAMMARS: list[dict[str, Any]] = [
    {"regex": r"[a-z]+( [a-z]+){3,6}\."},
    {"regex": r'\{"name": "[a-z_]{2,20}", "count": [0-9]{1,3}\}'},
    {"choice": ["the weather in Paris", "the weather in Oslo"]},
]
STOPS: list[dict[str, Any]] = [
    {"stop": ["self.", "str"]},
    {"stop": ["ret"], "include_stop_str_in_output": True},
    {"stop_token_ids": [COMMA]},
    {"max_tokens": 23},
]
LEAST = 30

# Names to what is served together; each as `offline.py` takes it.
PHASES: dict[str, dict[str, Any]] = {
    "grammars": {
        "prompts": [CODE[0], PROSE[0], TOOL[0], CODE[1]],
        "sampling": [*({"structured_outputs": grammar, "ignore_eos": False} for grammar in GRAMMARS), {}],
    },
    "stops": {
        "prompts": [prompt for prompts in (CODE, PROSE, TOOL) for prompt in prompts[:1] * len(STOPS)],
        "sampling": STOPS * 3,
    },
    "least lengths": {
        "prompts": [*CODE[:3], *PROSE[:3]],
        "sampling": [{"stop_token_ids": [E], "min_tokens": LEAST}] * 6,
    },
    "several completions": {
        # As good as greedy, which vLLM refuses for more than one: where one token is far more likely than all others.
        "prompts": [CODE[0], TOOL[0]],
        "sampling": [{"n": 2, "temperature": 0.01, "seed": 7}] * 2,
    },
    "logprobs": {
        "prompts": [CODE[0], PROSE[0]],
        "sampling": [{"logprobs": 2}, {"prompt_logprobs": 1}],
    },
    # More than the cache holds at once, by far, and more than may run at once.
    "preemptions": {"prompts": [*CODE[:6], *PROSE[:6], *TOOL[:8]]},
    "aborts": {
        "prompts": [*CODE[:6], *PROSE[:6], *TOOL[:8]],
        "leave": {"0": 1, "3": 20, "9": 30, "12": 0, "18": 0, "19": 5},
    },
}


@cache
def served(drafter: str | None) -> dict[str, Any]:
    """What one engine made of all phases; without a drafter, nobody leaves."""
    job: dict[str, Any] = {
        "max_tokens": MAX_TOKENS,
        "engine": {"block_size": 32, "max_model_len": 512, "num_gpu_blocks_override": 20},
    }
    if drafter is None:
        phases = [{key: phase[key] for key in phase.keys() - {"leave"}} for phase in PHASES.values()]
        report = serve(job | {"speculation": "none", "phases": phases})
    else:
        report = serve(job | {"speculation": "adaptive", "phases": list(PHASES.values())} | DRAFTERS[drafter])
        assert report["faults"] == 0
    return dict(zip(PHASES, report["phases"], strict=True))


@pytest.fixture(params=DRAFTERS)
def drafter(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("name", [name for name in PHASES if name not in ("aborts", "least lengths")])
def test_requests_of_any_sort_get_what_they_get_without_speculation(drafter: str, name: str) -> None:
    expected = served(None)[name]
    phase = served(drafter)[name]
    for request, other in zip(phase["requests"], expected["requests"], strict=True):
        assert request["prompt_logprobs"] == near(other["prompt_logprobs"])
        for done, wanted in zip(request["completions"], other["completions"], strict=True):
            assert done | {"logprobs": None} == wanted | {"logprobs": None}
            assert done["logprobs"] == near(wanted["logprobs"])
    assert phase["observations"] > 0


def near(logprobs: list[dict[str, float] | None] | None) -> Any:
    """The same tokens, their logarithms as far as a batch of another size leaves them."""
    return logprobs and [at and pytest.approx(at, abs=1e-3) for at in logprobs]


def test_drafts_that_a_grammar_cut_teach_nothing_and_the_text_obeys_it(drafter: str) -> None:
    phase = served(drafter)["grammars"]
    assert phase["counts"]["cut"] > 0
    texts = [request["completions"][0]["text"] for request in phase["requests"]]
    for grammar, text in zip(GRAMMARS, texts, strict=False):
        assert text in grammar["choice"] if "choice" in grammar else re.fullmatch(grammar["regex"], text)


def test_requests_stop_amid_accepted_drafts() -> None:
    requests = served("draft model")["stops"]["requests"]
    for place, stop in enumerate(STOPS):
        assert sum(request["dropped"] for request in requests[place :: len(STOPS)]) > 0, stop


def test_no_request_stops_before_its_least_length(drafter: str) -> None:
    """Beyond it vLLM itself may stop later with drafts: what forbids the stop holds to the end of a step's tokens."""
    phases = served(None)["least lengths"], served(drafter)["least lengths"]
    for expected, request in zip(*(phase["requests"] for phase in phases), strict=True):
        (tokens,) = (done["tokens"] for done in request["completions"])
        assert len(tokens) >= LEAST
        assert tokens[:LEAST] == expected["completions"][0]["tokens"][:LEAST]


def test_those_that_stay_get_the_same_when_others_leave_amid_their_text(drafter: str) -> None:
    whole, phase = served(None)["aborts"], served(drafter)["aborts"]
    for number, (request, expected) in enumerate(zip(phase["requests"], whole["requests"], strict=True)):
        tokens = [token for done in request["completions"] for token in done["tokens"]]
        most = PHASES["aborts"]["leave"].get(str(number), MAX_TOKENS)
        # One whose client leaves may have all of its last step's drafts beyond that.
        assert most <= len(tokens) <= min(most + 10, MAX_TOKENS)
        assert tokens == expected["completions"][0]["tokens"][: len(tokens)]


def test_what_is_preempted_is_served_all_the_same(drafter: str) -> None:
    """That it is the same text, and that nothing is left, is seen above."""
    assert served(drafter)["preemptions"]["counts"]["preempted"] > 2
