"""nnx modules, optimizers and other graph nodes within a tree, as their states.

jax sees an `nnx.Module` as a pytree, but a pytree has no shared references: a weight that two
layers share would come back as two weights. So every nnx object in a tree is replaced by its
`nnx.State` (which holds a shared Variable once) and put together again around the same graph.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax

from flaxckpt.tree.structure import flatten


def split(tree: Any) -> tuple[Any, list[Any]]:
    """`tree` with every nnx object replaced by its state, and what `merge` needs to undo that.

    The states share their Variables with the objects.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return tree, []
    graphs: list[Any] = []

    def replace(value: Any) -> Any:
        if is_object(value):
            graph, value = nnx.split(value)
            graphs.append(graph)
        elif isinstance(value, nnx.State):
            graphs.append(None)
        return value

    def is_leaf(value: Any) -> bool:
        return is_object(value) or isinstance(value, nnx.State)

    try:
        return jax.tree.map(replace, tree, is_leaf=is_leaf), graphs
    except ValueError:
        flatten(tree)  # jax cannot sort the keys of a dict, and does not say which
        raise


def merge(tree: Any, graphs: list[Any]) -> Any:
    """The inverse of `split`: new objects around the states in `tree`, in the same order."""
    if not graphs:
        return tree
    from flax import nnx

    remaining = iter(graphs)

    def put_back(value: Any) -> Any:
        if not isinstance(value, nnx.State):
            return value
        graph = next(remaining)
        return value if graph is None else nnx.merge(graph, value)

    return jax.tree.map(put_back, tree, is_leaf=lambda value: isinstance(value, nnx.State))


def is_object(value: Any) -> bool:
    """Whether `value` is an nnx graph node: a module, optimizer, `Rngs`, metric, ..."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Pytree)


def update(objects: Sequence[Any], states: Sequence[Any]) -> None:
    """Writes each of `states` into the Variables of its object, in place."""
    from flax import nnx

    for value, state in zip(objects, states, strict=True):
        nnx.update(value, state)
