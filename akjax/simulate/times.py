"""How long a step truly takes."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Float

from akjax.arrays import Array
from akjax.cost.model import AbstractCostModel, predicted_ms
from akjax.features import StepFeatures
from akjax.simulate.draws import normals
from akjax.simulate.leaves import as_real


class StepTimes(eqx.Module):
    """The true cost and what disturbs it.

    Attributes:
        cost: ms of an undisturbed step.
        noise: standard deviation of the logarithm of a step's time; its mean is that of `cost`.
        spike_chance: of a step to take `spike_factor` times as long.
        spike_factor: of a spike.
        drift: factor of all times at the end of the run, reached in a straight line from 1.
    """

    cost: AbstractCostModel
    noise: Float[Array, "*lanes"] = eqx.field(converter=as_real, kw_only=True, default=0.0)
    spike_chance: Float[Array, "*lanes"] = eqx.field(converter=as_real, kw_only=True, default=0.0)
    spike_factor: Float[Array, "*lanes"] = eqx.field(converter=as_real, kw_only=True, default=1.0)
    drift: Float[Array, "*lanes"] = eqx.field(converter=as_real, kw_only=True, default=1.0)

    def ms(
        self, step: StepFeatures, progress: Float[Array, ""], factor: Float[Array, ""], uniform: Float[Array, " 2"]
    ) -> Float[Array, ""]:
        """The step's milliseconds at `progress` of the run, times `factor`."""
        normal = normals(uniform[0]).astype(jnp.float64)
        noise = jnp.exp(self.noise * normal - 0.5 * self.noise**2)
        spike = jnp.where(uniform[1].astype(jnp.float64) < self.spike_chance, self.spike_factor, 1.0)
        return predicted_ms(self.cost, step) * noise * spike * factor * (1.0 + (self.drift - 1.0) * progress)
