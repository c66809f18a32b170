"""What a form gets wrong, learned by a small network."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PyTree

from akjax.arrays import Array
from akjax.cost.model import AbstractCostModel
from akjax.features import StepFeatures
from akjax.parameter import Parameter, as_parameter

# Logarithms of 1 to 500 tokens and requests come to lie between about -1 and 1.
_CENTRE, _SCALE = 3.5, 2.75


class Residual(AbstractCostModel):
    """`model`, times `exp(size * network(x))` with x the scaled logarithms of the step's tokens and requests.

    A factor, so that it means the same on any machine, and in the exponent, so that it stays positive. Every scalar in
    the network's arrays is a parameter, of either sign, with a prior of standard deviation 1: `size` says how much
    they may do together. A network whose last layer is 0 (`small_network`) leaves the model as it is; the filter then
    learns that layer first, and the others through it.

    Attributes:
        model: what the step costs before the correction.
        weights: the network's arrays.
        shape: the rest of the network.
        size: what an output of 1 adds to the logarithm of the ms.
    """

    model: AbstractCostModel
    weights: PyTree[Array]
    # An activation is a leaf of the network too, and no parameter.
    shape: Any = eqx.field(static=True)
    size: float = eqx.field(static=True)

    def __init__(self, model: AbstractCostModel, network: PyTree, size: float = 0.05) -> None:
        """Takes the network apart: any module that maps `Float[Array, "2"]` to `Float[Array, ""]`."""
        weights, self.shape = eqx.partition(network, lambda leaf: isinstance(leaf, jax.Array | np.ndarray))
        self.model, self.weights, self.size = model, jax.tree.map(as_parameter, weights), size

    def __call__(self, step: StepFeatures) -> Float[Array, "*steps"]:
        """The model's ms, times the factor."""
        network = eqx.combine(self.weights, self.shape)
        requests = jnp.broadcast_to(step.requests, jnp.shape(step.tokens))
        inputs = (jnp.log1p(jnp.stack([step.tokens, requests], axis=-1)) - _CENTRE) / _SCALE
        return self.model(step) * jnp.exp(self.size * jnp.vectorize(network, signature="(inputs)->()")(inputs))

    def parameters(self) -> tuple[Parameter, ...]:
        """The model's, then the network's, numbered."""
        count = sum(np.size(leaf) for leaf in jax.tree.leaves(self.weights))
        own = (Parameter(f"residual_{number}", "1", variance=1.0, spread=None) for number in range(count))
        return (*self.model.parameters(), *own)


def small_network(units: int = 4, seed: int = 0) -> eqx.nn.MLP:
    """A network of one layer of tanh units whose output is 0, until learning changes its last layer.

    Without a last bias: it would be one more factor of everything, as the machine's speed is already. NumPy draws the
    units' weights, so that nothing touches a JAX backend.

    Args:
        units: in the layer.
        seed: of their weights, from the standard normal distribution.
    """

    def outline() -> eqx.nn.MLP:
        return eqx.nn.MLP(2, "scalar", units, depth=1, activation=jnp.tanh, use_final_bias=False, key=jax.random.key(0))

    # Its shapes alone.
    network = eqx.filter_eval_shape(outline)
    rng = np.random.default_rng(seed)
    drawn = jax.tree.map(
        lambda leaf: rng.standard_normal(leaf.shape) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf, network
    )
    return eqx.tree_at(lambda network: network.layers[-1].weight, drawn, np.zeros((1, units)))
