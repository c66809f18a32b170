"""The flat layout of a pytree."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from akjax import Layout

LEAF = hnp.arrays(
    st.sampled_from([np.float64, np.int32, np.bool_]), hnp.array_shapes(min_dims=0, max_dims=3, max_side=3)
)


@given(
    st.recursive(
        LEAF,
        lambda inner: (
            st.lists(inner, min_size=1, max_size=3)
            | st.dictionaries(st.text(max_size=2), inner, min_size=1, max_size=3)
        ),
    )
)
def test_a_packed_tree_unpacks_to_itself(tree: object) -> None:
    layout = Layout(tree)
    packed = layout.pack(tree)
    assert packed.shape == (layout.size,)
    back = layout.unpack(packed)
    for leaf, original in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True):
        assert leaf.dtype == original.dtype
        np.testing.assert_array_equal(leaf, original)


def test_writing_to_a_view_fills_the_vector() -> None:
    layout = Layout({"a": np.zeros(2), "b": np.zeros((), np.int32)})
    flat = np.zeros(layout.size)
    views = layout.views(flat)
    views["a"][:] = 7.0, 8.0
    views["b"][...] = 3
    assert flat.tolist() == [7.0, 8.0, 3.0]
    assert layout.unpack(jnp.asarray(flat))["b"].dtype == jnp.int32


def test_a_slice_is_where_the_view_of_the_same_array_lies() -> None:
    layout = Layout((np.zeros((2, 3)), np.zeros(()), np.zeros(4, np.int32)))
    flat = np.arange(layout.size, dtype=np.float64)
    for place, view in zip(layout.slices(), layout.views(flat), strict=True):
        np.testing.assert_array_equal(flat[place], view.ravel())
