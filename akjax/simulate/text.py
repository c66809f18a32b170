"""Which drafts are truly accepted: the kinds of text, the requests, and how the drafter fares on them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from akjax.arrays import Array
from akjax.simulate.leaves import as_single

# The kinds are the controller's modes: USUAL, CODE and TOOL.
KINDS = 3


class Text(eqx.Module):
    """The acceptance process. A draft's logit is that of its kind and position, plus what the request adds.

    Attributes:
        rates: P(draft i accepted | draft i-1 accepted) of each kind, for a request without effects; inside (0, 1).
        switching: chance per generated token that the text turns from the row's kind to the column's. The diagonal
            does not count. At most one turn in a step.
        starts: chance of each kind at a request's start.
        request_spread: standard deviation of a request's own effect on the logit.
        context_slope: what 1000 tokens of context add to the logit.
    """

    rates: Float[Array, "*lanes kinds K"] = eqx.field(converter=as_single)
    switching: Float[Array, "*lanes kinds kinds"] = eqx.field(
        converter=as_single, kw_only=True, default_factory=lambda: np.zeros((KINDS, KINDS))
    )
    starts: Float[Array, "*lanes kinds"] = eqx.field(converter=as_single, kw_only=True, default=(1.0, 0.0, 0.0))
    request_spread: Float[Array, "*lanes"] = eqx.field(converter=as_single, kw_only=True, default=0.0)
    context_slope: Float[Array, "*lanes"] = eqx.field(converter=as_single, kw_only=True, default=0.0)

    def __check_init__(self) -> None:
        """Refuses rates that are not one row for each kind."""
        if self.rates.shape[-2] != KINDS:
            raise ValueError(f"rates must have {KINDS} rows, given the shape {self.rates.shape}")

    @property
    def draft_limit(self) -> int:
        """K, the most drafts of a request."""
        return self.rates.shape[-1]

    def conditional_rates(
        self, kind: Int[Array, " n"], added: Float[Array, " n"], context: Int[Array, " n"], factor: Float[Array, ""]
    ) -> Float[Array, "n K"]:
        """P(draft i accepted | draft i-1 accepted) of requests.

        Args:
            kind: of each request's text.
            added: to each request's logits.
            context: tokens of each request so far.
            factor: of all rates.
        """
        logits = jnp.log(self.rates) - jnp.log1p(-self.rates)
        added = added + self.context_slope * context.astype(jnp.float32) * jnp.float32(1e-3)
        return factor * jax.nn.sigmoid(of_kind(logits, kind) + added[:, None])

    def next_kind(
        self, kind: Int[Array, " n"], tokens: Int[Array, " n"], uniform: Float[Array, " n"]
    ) -> Int[Array, " n"]:
        """Each request's kind after `tokens` more; longer steps turn more often, so turns do not depend on k."""
        away = self.switching * (1.0 - jnp.eye(KINDS, dtype=jnp.float32))
        leaving = jnp.sum(away, axis=1)
        shares = jnp.cumsum(away, axis=1) / jnp.maximum(leaving, jnp.float32(1e-30))[:, None]
        leaves = 1.0 - (1.0 - of_kind(leaving, kind)) ** tokens.astype(jnp.float32)
        to = jnp.sum(of_kind(shares, kind) * leaves[:, None] <= uniform[:, None], axis=1, dtype=jnp.int32)
        return jnp.where(uniform < leaves, jnp.minimum(to, KINDS - 1), kind)


class Drafter(eqx.Module):
    """How many drafts there are, and what a step without drafts does to the next ones.

    Attributes:
        uneven_drafts: whether the drafter makes lists of its own length, as an n-gram drafter does.
        list_keep: then, the chance that a list goes on by one draft more: at least i drafts with chance list_keep**i.
        stale_logit: what a request's step without drafts adds to its logits, since the drafter's cache misses it.
        stale_keep: share of that which each step with drafts leaves.
    """

    uneven_drafts: bool = eqx.field(static=True, default=False)
    list_keep: Float[Array, "*lanes"] = eqx.field(converter=as_single, kw_only=True, default=0.8)
    stale_logit: Float[Array, "*lanes"] = eqx.field(converter=as_single, kw_only=True, default=0.0)
    stale_keep: Float[Array, "*lanes"] = eqx.field(converter=as_single, kw_only=True, default=0.5)

    def reach(self, draft_limit: int) -> Float[Array, " K"]:
        """The chance that a list has draft i at all."""
        if not self.uneven_drafts:
            return jnp.ones(draft_limit, jnp.float32)
        return self.list_keep ** jnp.arange(1, draft_limit + 1, dtype=jnp.float32)

    def drafts(self, asked: Int[Array, " n"], uniform: Float[Array, " n"]) -> Int[Array, " n"]:
        """The drafts that requests get when `asked` are asked for."""
        if not self.uneven_drafts:
            return asked
        listed = jnp.floor(jnp.log(uniform) / jnp.log(self.list_keep))
        return jnp.minimum(asked, jnp.minimum(listed, jnp.float32(1e6)).astype(jnp.int32))

    def staleness(self, before: Float[Array, " n"], drafted: Int[Array, " n"]) -> Float[Array, " n"]:
        """What is added to requests' logits after a step in which each had `drafted` drafts."""
        return jnp.where(drafted == 0, self.stale_logit, before * self.stale_keep)


def accepted_drafts(
    rates: Float[Array, "n K"], drafted: Int[Array, " n"], uniform: Float[Array, " n"]
) -> Int[Array, " n"]:
    """How many of each request's drafts are accepted, up to the first rejection.

    One number decides for all positions: at least i are accepted with the i-th survival's chance, which is the law
    of a draw for each position until one fails.
    """
    survives = uniform[:, None] < jnp.cumprod(rates, axis=1)
    return jnp.minimum(jnp.sum(survives, axis=1, dtype=jnp.int32), drafted)


def of_kind(table: Float[Array, " kinds *rest"], kind: Int[Array, " n"]) -> Float[Array, " n *rest"]:
    """The row of each request's kind, by selection: a gather is slower for so few."""
    kind = kind.reshape(kind.shape + (1,) * (table.ndim - 1))
    first, second, third = (table[i][None] for i in range(KINDS))
    shape = jnp.broadcast_shapes(kind.shape, first.shape)
    first, second, third = (jnp.broadcast_to(row, shape) for row in (first, second, third))
    return jnp.where(kind == 0, first, jnp.where(kind == 1, second, third))
