"""The two controllers that serving offers: the default, and the reference."""

from akjax.acceptance import AbstractAcceptanceModel, LogitFilter, RunningRates
from akjax.controller import CodeMode, Controller
from akjax.learner import AbstractCostLearner, FixedCost, InnovationGate, RatioGate
from akjax.policy import ReferencePolicy, SteadyPolicy


def reference_controller(
    acceptance: AbstractAcceptanceModel | None = None,
    *,
    draft_limit: int,
    levels: tuple[int, ...],
    margin: float = 0.03,
    per_request: bool = False,
    code_mode: CodeMode = "gated",
    learns_cost: bool = True,
) -> Controller:
    """The reference algorithm: running rates, the ratio gate, and the level of most goodput within a margin.

    Args:
        acceptance: `RunningRates` if None.
        draft_limit: K, the most drafts of a request.
        levels: the draft lengths that the batch may have, ascending, from 1.
        margin: relative gain below which the batch's draft length stays.
        per_request: whether each request gets a length of its own, in steps of two or more decoding requests. Goes by
            the usual rates, whatever the code mode.
        code_mode: see `Controller`.
        learns_cost: whether steps teach the cost model.
    """
    return Controller(
        RunningRates() if acceptance is None else acceptance,
        RatioGate() if learns_cost else FixedCost(),
        ReferencePolicy(levels=levels, margin=margin, per_request=per_request),
        draft_limit=draft_limit,
        code_mode=code_mode,
        uses_modes=not per_request,
    )


def default_controller(
    *,
    draft_limit: int,
    levels: tuple[int, ...],
    per_request: bool = False,
    code_mode: CodeMode = "1",
    learns_cost: bool = True,
) -> Controller:
    """What measured best: acceptance by the logit filter, costs by the innovation gate, and the steady policy.

    Args:
        draft_limit: K, the most drafts of a request.
        levels: the draft lengths that the batch may have, ascending, from 0.
        per_request: whether requests may get lengths of their own, where that pays.
        code_mode: see `Controller`.
        learns_cost: whether steps teach the cost model.
    """
    learner: AbstractCostLearner = InnovationGate() if learns_cost else FixedCost()
    return Controller(
        LogitFilter(),
        learner,
        SteadyPolicy(levels=levels, per_request=per_request),
        draft_limit=draft_limit,
        code_mode=code_mode,
        usual_is_prose=code_mode == "1",
    )
