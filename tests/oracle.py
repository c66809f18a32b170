"""The contract of the adaptive draft length in plain NumPy: arrays of K per request, a loop over requests.

The package is tested against it and timed against it, so it shares nothing with the package.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.floating]
Curve = Callable[[ArrayLike], Array]
"""Milliseconds of a step by its verified tokens, elementwise."""

PROSE, CODE, TOOL = 0, 1, 2


@dataclass(frozen=True)
class Settings:
    """What a run is configured with; the defaults are the contract's."""

    alpha: float = 0.25
    margin: float = 0.03
    prior: float = 0.8
    global_alpha: float = 0.05
    global_drift: float = 0.01
    experts: int = 288
    topk: int = 8
    per_request: bool = False
    code_mode: str = "gated"
    online: bool = True
    model: tuple[float, float, float] = (27.0, 0.635, 0.542)
    cost_ms: str = "2:47,4:53,8:65"


# --- acceptance ---------------------------------------------------------------------------------------


class Acceptance:
    """Estimates of P(draft i accepted | draft i-1 accepted): `g` of all requests, `rates` of each."""

    def __init__(self, settings: Settings, num_spec_tokens: int) -> None:
        self.settings = settings
        self.g: Array = np.full(num_spec_tokens, settings.prior)
        self.rates: dict[str, Array] = {}

    def of(self, req: str) -> Array:
        """The request's rates, made from what all requests have shown so far if it has none yet."""
        if req not in self.rates:
            self.rates[req] = self.g.copy()
        return self.rates[req]

    def observe(self, req: str, drafted: int, accepted: int) -> None:
        """Learn from one verification; positions after a rejected draft say nothing."""
        s, c, g = self.settings, self.of(req), self.g
        for r, rate in ((c, s.alpha), (g, s.global_alpha)):
            r[:accepted] += rate * (1.0 - r[:accepted])
            if accepted < drafted:
                r[accepted] -= rate * r[accepted]
        if accepted == drafted:
            lead = c[drafted - 1] - g[drafted - 1]
            c[drafted:] += s.alpha * (np.clip(g[drafted:] + lead, 0.0, 1.0) - c[drafted:])
            g[drafted:] += s.global_drift * (g[drafted - 1] - g[drafted:])

    def survivals(self, req: str) -> Array:
        """P(draft i is accepted and all before it), for each i."""
        return np.cumprod(self.of(req))

    def drop(self, req: str) -> None:
        """Forget a request that has ended."""
        self.rates.pop(req, None)


# --- cost of a step -----------------------------------------------------------------------------------

FLOOR_MS = 1.0
P0 = (25.0, 4e-4, 4e-3, 0.1)
Q = (0.0, 0.0, 0.0, 2e-3)
NOISE = 0.05
ERR_RATE = 0.05
D_MIN, D_MAX = 0.05, 2.0


class CostFilter:
    """Extended Kalman filter over x = (base, per_expert, per_token, d) of the time of a step."""

    def __init__(self, settings: Settings) -> None:
        self.experts = settings.experts
        self.miss = 1.0 - settings.topk / settings.experts  # P(a token leaves an expert alone)
        self.log_miss = math.log(self.miss) if self.miss > 0.0 else 0.0  # only ever used times a power of miss
        self.x: Array = np.array([*settings.model, 1.0])
        self.P: Array = np.diag(P0)
        self.Q: Array = np.diag(Q)
        self.err = 0.0
        self.n = 0

    def raw(self, tokens: ArrayLike) -> Array:
        """The time without its floor."""
        base, per_expert, per_token, d = self.x
        t = np.asarray(tokens, dtype=np.float64)
        return base + per_expert * self.experts * (1.0 - self.miss ** (d * t)) + per_token * t

    def predicted(self, tokens: ArrayLike) -> Array:
        """The time of a step with so many verified tokens."""
        return np.maximum(self.raw(tokens), FLOOR_MS)

    def gradient(self, tokens: float) -> Array:
        """The derivative of `raw` by x."""
        _, per_expert, _, d = self.x
        missed = self.experts * self.miss ** (d * tokens)
        return np.array([1.0, self.experts - missed, tokens, -per_expert * missed * self.log_miss * tokens])

    def update(self, tokens: int, ms: float) -> None:
        """Learn from one step's time."""
        predicted = float(self.predicted(tokens))
        surprise = ms - predicted
        self.err += ERR_RATE * (abs(surprise) / predicted - self.err)
        H = self.gradient(tokens)
        P = self.P + self.Q
        PH = P @ H
        gain = PH / (H @ PH + (NOISE * predicted) ** 2)
        self.x = self.x + gain * surprise
        self.x[3] = min(max(self.x[3], D_MIN), D_MAX)
        self.P = P - np.outer(gain, PH)
        self.n += 1


class CostTable:
    """Measured points "tokens:ms,...", linear between them."""

    def __init__(self, spec: str) -> None:
        entries = (entry.split(":") for entry in spec.split(","))
        points = sorted((float(tokens), float(ms)) for tokens, ms in entries)
        self.tokens: Array = np.array([tokens for tokens, _ in points])
        self.ms: Array = np.array([ms for _, ms in points])
        run = self.tokens[-1] - self.tokens[-2] if len(points) > 1 else 0.0
        self.slope = (self.ms[-1] - self.ms[-2]) / run if run > 0.0 else 0.0

    def predicted(self, tokens: ArrayLike) -> Array:
        """The time of a step with so many verified tokens."""
        t = np.asarray(tokens, dtype=np.float64)
        beyond = np.maximum(t - self.tokens[-1], 0.0)
        return np.interp(t, self.tokens, self.ms) + self.slope * beyond


# --- choices ------------------------------------------------------------------------------------------


def choose_batch(survivals: Sequence[Array], ms: Curve, levels: Sequence[int], current_k: int, margin: float) -> int:
    """One k for the batch: the level of most tokens per ms, but the current one unless the gain is worth it.

    `levels` ascend.
    """
    n = len(survivals)
    if n == 0:
        return current_k
    drafts = np.cumsum(sum(survivals))
    ks = np.array(levels)
    scores = (n + drafts[ks - 1]) / ms(n * (ks + 1))
    best = int(np.argmax(scores))
    if current_k in levels and not scores[best] > scores[levels.index(current_k)] * (1.0 + margin):
        return current_k
    return levels[best]


def choose_per_request(survivals: Sequence[Array], ms: Curve) -> list[int]:
    """A k for each request: the likeliest drafts of the batch, as many as give most tokens per ms."""
    n, width = len(survivals), len(survivals[0])
    slots = np.concatenate(survivals)
    order = np.argsort(-slots, kind="stable")
    tokens = n + np.concatenate(([0.0], np.cumsum(slots[order])))
    budget = int(np.argmax(tokens / ms(n + np.arange(len(slots) + 1))))
    taken = np.bincount(order[:budget] // width, minlength=n)
    return [max(1, int(k)) for k in taken]


# --- code mode ----------------------------------------------------------------------------------------


class Modes:
    """Whether each request is writing prose, code in a fence or a tool call, read off its tokens."""

    @dataclass
    class _Reader:
        run: int = 0
        fence: bool = False
        tool: bool = False

        @property
        def mode(self) -> int:
            return TOOL if self.tool else CODE if self.fence else PROSE

    def __init__(self, backticks: Mapping[int, str], tool_open: int, tool_close: int) -> None:
        self.backticks = backticks  # the text of every token that holds a backtick, others may be missing
        self.tool_open = tool_open
        self.tool_close = tool_close
        self.switches = 0
        self.readers: dict[str, Modes._Reader] = {}

    def of(self, req: str) -> int:
        """The request's mode after all that was scanned."""
        reader = self.readers.get(req)
        return PROSE if reader is None else reader.mode

    def scan(self, req: str, new: Sequence[int]) -> None:
        """Read new tokens; a change of mode counts once however often it changed on the way."""
        reader = self.readers.setdefault(req, self._Reader())
        before = reader.mode
        for token in new:
            if token in (self.tool_open, self.tool_close):
                reader.tool = token == self.tool_open
                reader.run = 0
            elif token in self.backticks:
                for char in self.backticks[token]:
                    reader.run = reader.run + 1 if char == "`" else 0
                    if reader.run == 3:
                        reader.fence = not reader.fence
            else:
                reader.run = 0
        self.switches += reader.mode != before

    def drop(self, req: str) -> None:
        """Forget a request that has ended."""
        self.readers.pop(req, None)


# --- a whole run --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What was scheduled: tokens of each request in the step's order, and how many of them are drafts."""

    scheduled: Mapping[str, int]
    drafted: Mapping[str, int]

    @property
    def tokens(self) -> int:
        """The verified tokens."""
        return sum(1 + self.drafted.get(req, 0) for req in self.scheduled)

    @property
    def prefills(self) -> bool:
        """Whether a request has more than its last token and its drafts in the step."""
        return any(tokens > 1 + self.drafted.get(req, 0) for req, tokens in self.scheduled.items())


@dataclass(frozen=True)
class Output:
    """What came of a step: accepted drafts in output order, new tokens, requests that ended with it."""

    accepted: Mapping[str, int]
    new: Mapping[str, Sequence[int]] = field(default_factory=dict)
    finished: Sequence[str] = ()


class Serve:
    """The scheduler's state over a run, with gate=ratio and no control file."""

    def __init__(self, settings: Settings, num_spec_tokens: int, levels: Sequence[int], modes: Modes) -> None:
        self.settings = settings
        self.levels = levels
        self.k = num_spec_tokens  # the last one chosen for the batch
        self.acceptance = {mode: Acceptance(settings, num_spec_tokens) for mode in (PROSE, CODE, TOOL)}
        self.usual = self.acceptance[PROSE]  # learns from every step, those in a mode too
        self.cost = CostFilter(settings) if settings.online else CostTable(settings.cost_ms)
        self.modes = modes
        self.unread: dict[str, list[int]] = {}
        self.had_output = False

    def scheduled(self, step: Step) -> tuple[int, dict[str, int] | None]:
        """Drafts to schedule next: the step's number and, in per-request mode, that of each request."""
        for req in step.scheduled:
            if req in self.unread:
                self.modes.scan(req, self.unread.pop(req))
        decoding = [req for req in step.scheduled if req in self.usual.rates]
        if not self.settings.per_request:
            return self._batch(self._survivals_by_mode(decoding)), None
        survivals = [self.usual.survivals(req) for req in decoding]
        if len(decoding) < 2:
            k = self._batch(survivals)
            return k, dict.fromkeys(step.scheduled, k)
        ks = choose_per_request(survivals, self.cost.predicted)
        k = max(ks)
        return k, dict.fromkeys(step.scheduled, k) | dict(zip(decoding, ks, strict=True))

    def output(self, step: Step, ms: float, output: Output) -> None:
        """Learn from a step's output, `ms` after the one before it."""
        if self.had_output and isinstance(self.cost, CostFilter) and step.tokens and not step.prefills:
            predicted = float(self.cost.predicted(step.tokens))
            if 0.5 * predicted < ms < 2.0 * predicted + 20.0:
                self.cost.update(step.tokens, ms)
        self.had_output = True
        for req, accepted in output.accepted.items():
            drafted = step.drafted[req]
            for mode in {PROSE, self.modes.of(req)}:
                self.acceptance[mode].observe(req, drafted, accepted)
        if self.settings.code_mode != "0":
            for req, new in output.new.items():
                self.unread.setdefault(req, []).extend(new)
        for req in output.finished:
            self.drop(req)

    def drop(self, req: str) -> None:
        """Forget a request that has ended or was aborted."""
        for acceptance in self.acceptance.values():
            acceptance.drop(req)
        self.modes.drop(req)
        self.unread.pop(req, None)

    def _batch(self, survivals: Sequence[Array]) -> int:
        self.k = choose_batch(survivals, self.cost.predicted, self.levels, self.k, self.settings.margin)
        return self.k

    def _survivals_by_mode(self, decoding: Sequence[str]) -> list[Array]:
        modes = [self.modes.of(req) for req in decoding]
        if self.settings.code_mode == "gated" and len(set(modes)) > 1:
            return [self.usual.survivals(req) for req in decoding]
        return [self.acceptance[mode].survivals(req) for mode, req in zip(modes, decoding, strict=True)]
