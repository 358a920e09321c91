"""Comparing trees bit for bit."""

import jax

from flaxckpt.testing import differences
from flaxckpt.tree import nnx_objects
from flaxckpt.tree.structure import flatten


def nodes(tree):
    """The containers of `tree`, nnx objects as their states."""
    return flatten(nnx_objects.split(tree)[0]).nodes


def assert_same(a, b):
    """Containers, leaf types, dtypes, shapes, weak types, bits and empties are equal."""
    assert differences(a, b) == []
    # A key may be NaN, which equals nothing.
    assert nodes(a) == nodes(b) or repr(nodes(a)) == repr(nodes(b))


def abstract(tree):
    """`tree` with `jax.ShapeDtypeStruct`s for its jax arrays."""
    return jax.tree.map(
        lambda x: jax.eval_shape(lambda: x) if isinstance(x, jax.Array) else x, tree
    )
