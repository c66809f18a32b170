"""Worlds in which adaptive draft lengths have gone wrong before, each named after what did.

The figures are public ones: acceptance by position and step times by verified tokens as reported for the engines
named beside them, 2025-2026. Text that switches kind, requests that differ, and 3% of noise in step times are
everywhere, as they are in serving.
"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Float

from akjax.cost import (
    AbstractCostModel,
    Constant,
    Context,
    Drafting,
    ExpertReads,
    OwnPath,
    Padded,
    PerToken,
    PowerTokens,
    Prefill,
)
from akjax.simulate.scenario import Scenario, all_tokens
from akjax.simulate.text import Drafter, Text
from akjax.simulate.times import StepTimes
from akjax.simulate.traffic import AbstractTraffic, ClosedLoop, Lengths, OpenLoop, poisson_traffic
from akjax.simulate.windows import Windows

DRAFT_LIMIT = 8
LEVELS = (0, 1, 2, 3, 4, 6, 8)
# The cost model that every policy starts from unless a case says otherwise: GLM-5.3-Flash, TP 4, GB10.
PRIOR = (27.0, 0.635, 0.542)


class Case(eqx.Module):
    """A world, and what a policy is told of it beforehand.

    Attributes:
        name: in a few words.
        story: what went wrong there.
        scenario: what is true.
        prior: ms, ms per expert and ms per token that learning starts from.
        experts: routed experts of a layer, None for a dense model.
        top_k: experts a token picks.
        sizes: numbers of tokens that steps are known to be padded to.
    """

    name: str = eqx.field(static=True)
    story: str = eqx.field(static=True)
    scenario: Scenario
    prior: tuple[float, float, float] = eqx.field(static=True, default=PRIOR, kw_only=True)
    experts: int | None = eqx.field(static=True, default=288, kw_only=True)
    top_k: int | None = eqx.field(static=True, default=8, kw_only=True)
    sizes: tuple[int, ...] = eqx.field(static=True, default=(), kw_only=True)

    @property
    def is_open_loop(self) -> bool:
        """Whether requests come whatever the server does, so that what counts is how long they take."""
        return isinstance(self.scenario.traffic, OpenLoop)


def rates(*by_kind: Sequence[float]) -> Float[np.ndarray, "kinds K"]:
    """Conditional acceptance of prose, code and tool calls, the last figure given holding for deeper positions."""
    return np.array([[*each, *[each[-1]] * DRAFT_LIMIT][:DRAFT_LIMIT] for each in by_kind])


PROSE, CODE, TOOL = (0.77, 0.66, 0.63, 0.60), (0.91, 0.78, 0.78, 0.73), (0.99, 0.97, 0.94, 0.97)
# Chances per token: a stretch of prose lasts some 140 tokens, one of code 90, a tool call 45.
SWITCHING = np.array([[0.0, 0.005, 0.002], [0.01, 0.0, 0.001], [0.02, 0.002, 0.0]])
MIXED = {"switching": SWITCHING, "starts": (0.6, 0.3, 0.1), "request_spread": 0.5}
SHORT = Lengths(300.0, 0.5), Lengths(250.0, 0.6)


def mixed_text(**changes: Any) -> Text:
    """Prose with code and tool calls in it."""
    return Text(rates(PROSE, CODE, TOOL), **{**MIXED, **changes})


def true_cost(
    base: float,
    per_expert: float,
    per_token: float,
    *,
    experts: int = 288,
    top_k: int = 8,
    gamma: float = 0.81,
    drafting: float = 0.03,
    one_token: float = 1.0,
    uneven: float = 1.1,
    context: float = 1e-6,
    sizes: tuple[int, ...] = (),
) -> AbstractCostModel:
    """A step's true ms; what is drafted, read as context and taken in as prompts is given as a share of the base.

    The union is the power law that measured routing follows, and not the form that policies learn by.
    """
    verifying = Constant(base) + ExpertReads(per_expert, PowerTokens(gamma, experts, top_k)) + PerToken(per_token)
    if sizes:
        verifying = Padded(verifying, sizes)
    decoding = verifying + Drafting(drafting * base)
    decoding = OwnPath(decoding, one_token, "one_token")
    return OwnPath(decoding, uneven, "uneven") + Context(context * base) + Prefill(2e-3 * base)


# Least squares of the logarithm, on 2:29.7 3:33.1 4:36.5 5:39.8 6:43.1 7:46.0 8:48.9 ms by verified tokens.
GLM_FLASH = true_cost(21.9, 0.399, 0.769)


def world(
    tokens: float,
    traffic: AbstractTraffic | int,
    cost: AbstractCostModel = GLM_FLASH,
    text: Text | None = None,
    *,
    drafter: Drafter | None = None,
    windows: Windows | None = None,
    slots: int = 16,
    noise: float = 0.03,
    **times: float,
) -> Scenario:
    """A scenario of the bank; `traffic` may be a steady number of requests."""
    if isinstance(traffic, int):
        traffic = ClosedLoop([[traffic]], *SHORT)
    return Scenario(
        mixed_text() if text is None else text,
        StepTimes(cost, noise=noise, **times),
        traffic,
        tokens,
        slots,
        # Every case has a window, if one without effect, so that cases share compiled runs.
        windows=Windows([2.0], [2.0], [1.0], [1.0]) if windows is None else windows,
        drafter=Drafter() if drafter is None else drafter,
    )


def foreign_prior(scale: float) -> Case:
    """The world of four requests, seen through a prior from hardware of another speed."""
    prior = PRIOR[0] * scale, PRIOR[1] * scale, PRIOR[2] * scale
    return Case(f"prior x{scale:g}", "a gate by size learns from no step at all", world(30e3, 4), prior=prior)


def bank(arrivals: OpenLoop | None = None) -> tuple[Case, ...]:
    """All cases.

    Args:
        arrivals: recorded traffic for one more of them; Poisson arrivals stand in for it.
    """
    if arrivals is None:
        arrivals = poisson_traffic(0.6, 400, Lengths(900.0, 1.0), Lengths(120.0, 0.8))
    prose_only: dict[str, Any] = {"switching": np.zeros((3, 3)), "starts": (1.0, 0.0, 0.0)}
    hard = mixed_text(starts=(1.0, 0.0, 0.0), switching=np.zeros((3, 3)), request_spread=0.3)
    collapse = Windows([1 / 3], [0.5], [0.0], [1.0])
    return (
        Case("one stream", "adaptive lengths lose at low concurrency", world(12e3, 1)),
        Case("expert-heavy MoE", "each further token reads more experts", world(30e3, 4, true_cost(15.0, 1.0, 0.3))),
        Case(
            "many requests",
            "a list by batch size cannot see the text",
            world(120e3, 16),
        ),
        Case(
            "hovering batch size",
            "a list's k flips every step",
            world(80e3, ClosedLoop([[8, 9]], *SHORT)),
        ),
        *map(foreign_prior, (0.1, 0.3, 3.0, 10.0)),
        Case(
            "speculation never pays",
            "no drafts 37.7 ms, k=1 98.7, k=7 263 (MoE on GB10)",
            world(4e3, 1, true_cost(43.9, 0.0, 27.4, one_token=0.53, drafting=0.0)),
        ),
        Case(
            "drafts never accepted",
            "a drafter that does not fit the model",
            world(15e3, 4, text=Text(rates((0.08,), (0.1,), (0.15,)), **MIXED)),
        ),
        Case(
            "always pays at one stream",
            "at one stream with good drafts stay deep",
            world(24e3, 1, text=Text(rates((0.93,), (0.96,), (0.98,)), **MIXED)),
        ),
        Case(
            "padded staircase",
            "captured sizes make the cost a staircase",
            world(30e3, 4, true_cost(21.9, 0.399, 0.769, sizes=(1, 2, 4, 8, 16, 24, 32, 48, 64))),
            sizes=(1, 2, 4, 8, 16, 24, 32, 48, 64),
        ),
        Case(
            "unknown staircase",
            "the same, and nobody told the policy the sizes",
            world(30e3, 4, true_cost(21.9, 0.399, 0.769, sizes=(1, 2, 4, 8, 16, 24, 32, 48, 64))),
        ),
        Case(
            "long context",
            "acceptance falls from 70% to 16-32% at 172k tokens, and attention costs",
            world(
                14e3,
                ClosedLoop([[2]], Lengths(40e3, 1.0), Lengths(600.0, 0.5)),
                true_cost(21.9, 0.399, 0.769, context=1e-5),
                mixed_text(context_slope=-0.012),
            ),
        ),
        Case("collapse and recovery", "acceptance drops to nothing, and returns", world(30e3, 4, windows=collapse)),
        Case(
            "spikes",
            "one outlier must not make a k look bad for ever",
            world(30e3, 4, spike_chance=0.01, spike_factor=12.0),
        ),
        Case(
            "slow start",
            "a latency spike at start-up makes a k look bad for ever",
            world(30e3, 4, windows=Windows([0.0], [0.004], [1.0], [8.0])),
        ),
        Case(
            "idle gaps",
            "the time between requests is no step's",
            world(all_tokens(lonely := poisson_traffic(0.15, 60, *SHORT)), lonely),
        ),
        Case("drift", "the machine slows down to half its speed", world(30e3, 4, drift=2.0)),
        Case(
            "prefill-heavy traffic",
            "hardly a step without a prompt in it",
            world(60e3, ClosedLoop([[8]], Lengths(3000.0, 0.5), Lengths(60.0, 0.5))),
        ),
        Case(
            "uneven n-gram drafts",
            "drafters that give fewer drafts than asked",
            world(
                24e3, 4, true_cost(21.9, 0.399, 0.769, uneven=1.0, drafting=0.0), drafter=Drafter(uneven_drafts=True)
            ),
        ),
        Case(
            "stale after zero",
            "after steps without drafts the drafter's cache is stale",
            world(
                16e3,
                4,
                true_cost(21.9, 0.399, 2.5),
                Text(rates((0.45, 0.4), CODE, TOOL), **MIXED),
                drafter=Drafter(stale_logit=-2.0),
            ),
        ),
        Case(
            "rising and falling load",
            "one k for all batch sizes",
            world(60e3, ClosedLoop([[1], [4], [16], [4], [1], [16]], *SHORT)),
        ),
        Case("recorded arrivals", "production arrivals", world(all_tokens(arrivals), arrivals)),
        Case(
            "Nemotron 30B-A3B, M5 Max",
            "1:8.47 2:13.49 3:15.64 5:20.67 8:28.13 ms by tokens (128/6)",
            world(12e3, 1, true_cost(8.75, 0.0025, 2.17, experts=128, top_k=6, one_token=0.775)),
            experts=128,
            top_k=6,
        ),
        Case(
            "GLM-4.5-Air",
            "1:5.88 2:17.93 3:20.58 4:22.89 6:27.05 8:30.07 ms by tokens (128/8)",
            world(12e3, 1, true_cost(11.15, 0.495, 0.0076, experts=128, top_k=8, one_token=0.39, drafting=0.007)),
            experts=128,
            top_k=8,
        ),
        Case(
            "dense Llama 8B with EAGLE",
            "survival .681 .391 .204 .101 .051; 6.52 to 57.4 ms from batch 1 to 256",
            world(
                80e3,
                ClosedLoop([[1], [4], [16], [64]], *SHORT),
                true_cost(6.7, 0.0, 0.0177, drafting=0.097),
                Text(rates((0.681, 0.574, 0.522, 0.495, 0.505), CODE, TOOL), **{**MIXED, **prose_only}),
                slots=64,
            ),
            experts=None,
            top_k=None,
        ),
        Case("plain prose", "gains are small where text does not change", world(30e3, 4, text=hard)),
    )


def named(name: str, cases: Sequence[Case]) -> Case:
    """The case of this name.

    Raises:
        KeyError: there is none; says which there are.
    """
    found = [case for case in cases if case.name == name]
    if not found:
        raise KeyError(f"no case {name!r}; there are: {', '.join(case.name for case in cases)}")
    return found[0]
