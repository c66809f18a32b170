"""Work of a step beside the verified tokens: each kind in a straight line of its own amount."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Float

from akjax.arrays import Array
from akjax.cost.model import AbstractCostModel
from akjax.features import StepFeatures
from akjax.parameter import Parameter, as_parameter

# How far off the start may be, as the standard deviation of a logarithm: these prices depend on the drafter, the
# attention and the host alike, so little is known of them beforehand.
_SPREAD = 1.0


class Drafting(AbstractCostModel):
    """What the drafter costs: it makes its drafts one after the other, each in a pass for all requests together.

    Attributes:
        per_draft: ms per pass of the drafter.
    """

    per_draft: Float[Array, ""] = eqx.field(converter=as_parameter)

    def __call__(self, step: StepFeatures) -> Float[Array, "*steps"]:
        """`per_draft * drafting`."""
        return jnp.broadcast_to(self.per_draft * step.drafting, jnp.shape(step.tokens))

    def parameters(self) -> tuple[Parameter, ...]:
        """The price of a draft, around 1 ms."""
        return (Parameter("per_draft", "ms/draft", variance=0.25, spread=_SPREAD),)


class Context(AbstractCostModel):
    """What attention to the past costs: the KV cache is read once a step, whatever the number of verified tokens.

    Attributes:
        per_kv_token: ms per KV token read (all layers together).
    """

    per_kv_token: Float[Array, ""] = eqx.field(converter=as_parameter)

    def __call__(self, step: StepFeatures) -> Float[Array, "*steps"]:
        """`per_kv_token * context`."""
        return jnp.broadcast_to(self.per_kv_token * step.context, jnp.shape(step.tokens))

    def parameters(self) -> tuple[Parameter, ...]:
        """The price of a KV token, around 3e-5 ms: 100 KB at 3 TB/s."""
        return (Parameter("per_kv_token", "ms/KV token", variance=2.25e-10, spread=_SPREAD),)


class Prefill(AbstractCostModel):
    """What taking in prompts costs, in the steps that do.

    Attributes:
        per_prefill_token: ms per token of a prompt.
    """

    per_prefill_token: Float[Array, ""] = eqx.field(converter=as_parameter)

    def __call__(self, step: StepFeatures) -> Float[Array, "*steps"]:
        """`per_prefill_token * prefill`."""
        return jnp.broadcast_to(self.per_prefill_token * step.prefill, jnp.shape(step.tokens))

    def parameters(self) -> tuple[Parameter, ...]:
        """The price of a prompt's token, around 0.1 ms."""
        return (Parameter("per_prefill_token", "ms/prefill token", variance=2.5e-3, spread=_SPREAD),)


class PerRequest(AbstractCostModel):
    """What each request costs, however many of its tokens are verified: its sampling, and the host's work for it.

    Attributes:
        per_request: ms per request.
    """

    per_request: Float[Array, ""] = eqx.field(converter=as_parameter)

    def __call__(self, step: StepFeatures) -> Float[Array, "*steps"]:
        """`per_request * requests`."""
        return jnp.broadcast_to(self.per_request * step.requests, jnp.shape(step.tokens))

    def parameters(self) -> tuple[Parameter, ...]:
        """The price of a request, around 0.2 ms."""
        return (Parameter("per_request", "ms/request", variance=0.01, spread=_SPREAD),)
