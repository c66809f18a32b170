"""The cost form that serving learns: the reference's terms, and what the step does beside verifying tokens."""

import math

import numpy as np

from akjax.cost.experts import DiverseTokens, ExpertReads
from akjax.cost.levels import ByDraftLength
from akjax.cost.linear import Constant, PerToken
from akjax.cost.model import AbstractCostModel
from akjax.cost.padded import Padded
from akjax.cost.paths import OwnPath
from akjax.cost.work import Context, Drafting, Prefill

# Where the factor of uneven steps starts: a piecewise graph in place of a full one made steps 14% longer at one stream,
# and less at more.
UNEVEN = 1.1
# Where a coefficient starts that is said to be 0, as a share of the base: it is learned in its logarithm, so it has to
# start above 0, and this low it says nothing until steps do.
_NEXT_TO_NOTHING = 1e-3


def serving_cost(
    base: float,
    per_expert: float,
    per_token: float,
    *,
    lengths: tuple[int, ...],
    experts: int | None,
    top_k: int | None,
    sizes: tuple[int, ...] = (),
    uneven: float | None = None,
) -> AbstractCostModel:
    """The cost of a step that may be padded, may go without drafts, and may read long contexts or take in prompts.

    Verifying and drafting are corrected at each draft length, and together have a factor of their own for the step of
    a single token; the context and prompts come on top of that. What the three coefficients do not say starts at a
    usual share of them: a draft at 3% of the base, a KV token at a millionth, a prompt's token at a quarter of a
    verified one.

    Args:
        base: ms of any step.
        per_expert: ms per distinct expert touched.
        per_token: ms per verified token.
        lengths: drafts per request that may be served, ascending; 0 too if steps may go without.
        experts: routed experts of a layer; None for a dense model.
        top_k: experts a token picks. One that picks all of them reads the same weights as in a dense model.
        sizes: captured numbers of tokens, ascending; none if steps are not padded.
        uneven: where the factor starts of steps whose requests verify different numbers of drafts, which leave the
            full graph; None where no step does.

    Raises:
        ValueError: a base that is not above 0, another coefficient below 0, experts without top_k, or what
            `ByDraftLength`, `Padded` or `DiverseTokens` refuses.
    """
    given = f"given base={base}, per_expert={per_expert}, per_token={per_token}"
    if not all(map(math.isfinite, (base, per_expert, per_token))) or base <= 0 or per_expert < 0 or per_token < 0:
        raise ValueError(f"base must be above 0, and per_expert and per_token 0 or more, all finite: {given}")
    if experts is not None and top_k is None:
        raise ValueError(f"experts={experts} needs top_k, the experts that a token picks")

    least = _NEXT_TO_NOTHING * base
    verifying = Constant(base)
    if experts is not None and top_k is not None and top_k < experts:
        verifying = verifying + ExpertReads(per_expert or least, DiverseTokens(1.0, experts, top_k))
    verifying = verifying + PerToken(per_token or least)
    if sizes:
        verifying = Padded(verifying, sizes)

    decoding = ByDraftLength(verifying + Drafting(0.03 * base), np.ones(len(lengths)), lengths)
    decoding = OwnPath(decoding, 1.0, "one_token")
    if uneven is not None:
        decoding = OwnPath(decoding, uneven, "uneven")
    return decoding + Context(1e-6 * base) + Prefill(0.25 * per_token or least)
