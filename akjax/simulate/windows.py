"""Stretches of the run in which something is different."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Float

from akjax.arrays import Array
from akjax.simulate.leaves import as_real, as_single


class Windows(eqx.Module):
    """Stretches by progress, the share of the run's work that is done, so that every policy meets them alike.

    Attributes:
        start: of each window, its progress.
        end: of each window.
        acceptance: factor of all conditional acceptance rates inside.
        time: factor of all step times inside.
    """

    start: Float[Array, "*lanes w"] = eqx.field(converter=as_real, default=())
    end: Float[Array, "*lanes w"] = eqx.field(converter=as_real, default=())
    acceptance: Float[Array, "*lanes w"] = eqx.field(converter=as_single, default=())
    time: Float[Array, "*lanes w"] = eqx.field(converter=as_real, default=())

    def factors(self, progress: Float[Array, ""]) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The factors of acceptance and of time at `progress`: the products over the windows it lies in."""
        inside = (self.start <= progress) & (progress < self.end)
        return (
            jnp.prod(jnp.where(inside, self.acceptance, jnp.float32(1.0))),
            jnp.prod(jnp.where(inside, self.time, 1.0)),
        )
