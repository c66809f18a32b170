"""What a log of steps holds: one header, then a record for each step whose output arrived.

A log is JSON Lines. Each line is one record, an object whose `kind` says which. Fields may be added within a version;
whoever reads a log ignores those that it does not know. A field that changes its meaning or goes away makes a new
version, and a reader refuses versions above its own.

A file may end in half a line, if the process was killed: a reader leaves that out. Each file belongs to one run of an
engine, as its header's `run` says; a run that fills a file goes on in the next.

All that a step says of its requests stands in lists of equal length, one entry for each request that had drafts to
verify, in the order of the output: columns are what readers want, and a tenth of the size.
"""

from dataclasses import dataclass, field
from typing import Literal

VERSION = 1
"""Of the records below."""

Untaught = Literal["", "idle", "fixed", "prompts", "change", "surprise", "unknown"]
"""Why a step's time did not teach the cost model, the first of these that holds; "" if it did.

- unknown: the output was of no step that was seen scheduled, or learning began anew before the step was taken in.
- idle: the engine had nothing to do in the gap, or it is the first step, so the gap is not the step's time.
- fixed: the cost model does not learn.
- prompts: the step took in prompts, and the cost learner takes none such.
- change: the step changes over from verifying no drafts to some, or back, and the cost learner takes none such.
- surprise: the learner refused it as too far from what it expected.

The reference learner goes by a time's size alone, so now and then it takes a gap with a little waiting in it for a
step: that one is "" as well.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogHeader:
    """What served: the first record of a file. What is not known is None, or empty.

    Attributes:
        time: when the file was begun, Unix seconds.
        run: of the engine, a name of its own: all files of one run have it, and those of no other.
        model: that was served.
        method: of drafting, as vLLM names it.
        draft_limit: K, the most drafts of a request.
        levels: draft lengths that could be chosen, ascending.
        experts: routed experts of a layer (E); None for a dense model.
        top_k: experts that a token picks; None for a dense model.
        captured_sizes: numbers of tokens that steps are padded to, ascending; empty if they are not.
        tensor_parallel: ranks.
        pipeline_parallel: ranks.
        expert_parallel: whether experts are spread over the ranks.
        max_requests: that run at once.
        device: what it ran on.
        policy: that chose.
        versions: of akjax, vllm, jax and python, by name.
        kind: "header".
        version: of the log's format.
    """

    time: float
    run: str = ""
    model: str = ""
    method: str = ""
    draft_limit: int = 0
    levels: list[int] = field(default_factory=list)
    experts: int | None = None
    top_k: int | None = None
    captured_sizes: list[int] = field(default_factory=list)
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: bool = False
    max_requests: int = 0
    device: str = ""
    policy: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    kind: Literal["header"] = "header"
    version: int = VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A step whose output arrived. Steps without requests are left out.

    Attributes:
        time: when the output arrived, Unix seconds.
        gap_ms: since the output before it: the step's own time where `untaught` is neither "idle" nor "unknown". None
            at the first.
        untaught: why it did not teach; "" if it did.
        tokens: verified tokens, as `StepFeatures.tokens`.
        requests: in the step, at least 1.
        prefill: tokens of prompts, as `StepFeatures.prefill`.
        context: KV tokens read; 0 if the step is unknown.
        drafts: verified, over all requests, with those that a grammar cut or that no drafter made.
        drafting: drafts made for each request in the step, for its next one; 0 if the step is unknown.
        uneven: whether its requests verified different numbers of drafts.
        k: that was planned in it, for the step after it: that of the batch, or the most of any request; 0 if the step
            is unknown.
        forced: whether that k was forced by the control file.
        predicted_ms: of the step, by the cost model as it was before the step taught it; None where there is none.
        request: of each request with drafts, its number in the run, from 0; a request keeps it.
        drafted: of each, drafts verified, at least 1.
        accepted: of each, drafts accepted.
        cut: of each, drafts that a grammar cut before they were verified, not counted in `drafted`.
        mode: of each, its text: 0 usual, 1 code, 2 tool call.
        kind: "step".
    """

    time: float
    gap_ms: float | None
    untaught: Untaught
    tokens: int
    requests: int
    prefill: int
    context: int
    drafts: int
    drafting: int
    uneven: bool
    k: int
    forced: bool
    predicted_ms: float | None
    request: list[int]
    drafted: list[int]
    accepted: list[int]
    cut: list[int]
    mode: list[int]
    kind: Literal["step"] = "step"
