"""A world to measure policies in: everything that is true of it."""

import equinox as eqx
import numpy as np
from jaxtyping import Float, Int

from akjax.arrays import Array
from akjax.simulate.leaves import as_count, as_real
from akjax.simulate.text import Drafter, Text
from akjax.simulate.times import StepTimes
from akjax.simulate.traffic import AbstractTraffic, OpenLoop
from akjax.simulate.windows import Windows


class Scenario(eqx.Module):
    """What is true of a run. Numbers are data, so scenarios of one form and size share a compiled run.

    Attributes:
        text: which drafts are accepted.
        times: how long steps take.
        traffic: which requests come.
        work_tokens: tokens to generate, after which the run ends; the same for every policy.
        slots: requests that can run at once (N).
        drafter: how many drafts there are.
        windows: stretches in which acceptance or times are different.
        prompt_chunk: most prompt tokens that a step takes in.
    """

    text: Text
    times: StepTimes
    traffic: AbstractTraffic
    work_tokens: Float[Array, "*lanes"] = eqx.field(converter=as_real)
    slots: int = eqx.field(static=True)
    drafter: Drafter = eqx.field(default_factory=Drafter, kw_only=True)
    windows: Windows = eqx.field(default_factory=Windows, kw_only=True)
    prompt_chunk: Int[Array, "*lanes"] = eqx.field(converter=as_count, kw_only=True, default=2048)

    @property
    def draft_limit(self) -> int:
        """K, the most drafts of a request."""
        return self.text.draft_limit


def all_tokens(traffic: OpenLoop) -> float:
    """The work of serving every given request."""
    return float(np.sum(traffic.output))
