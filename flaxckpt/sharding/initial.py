"""The state that a run begins with: what it will be, all of it, or some of its leaves."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from flaxckpt.sharding.abstract import abstract_state, bind, in_context, reachable
from flaxckpt.sharding.specs import Rules, Specs
from flaxckpt.tree import nnx_objects


@dataclasses.dataclass(frozen=True)
class InitialState:
    """What `init_fn(*args)` makes; the attributes are the arguments of `abstract_state`."""

    init_fn: Callable[..., Any]
    args: Sequence[Any]
    mesh: Mesh | None
    rules: Rules | None
    specs: Specs | None

    @functools.cached_property
    def abstract(self) -> Any:
        """Its shapes, dtypes and shardings."""
        return abstract_state(
            self.init_fn, *self.args, mesh=self.mesh, rules=self.rules, specs=self.specs
        )

    def tree(self) -> Any:
        """All of it, each leaf made straight where it belongs."""
        stateful, graphs = nnx_objects.split(self.abstract)
        shapes, structure = jax.tree.flatten(stateful)
        leaves = self.leaves(range(len(shapes)))
        return nnx_objects.merge(jax.tree.unflatten(structure, leaves), graphs)

    def leaves(self, positions: Sequence[int]) -> Sequence[Any]:
        """The leaves at `positions`, in the order of `jax.tree.leaves`; only they are computed."""
        shapes = jax.tree.leaves(nnx_objects.split(self.abstract)[0])
        bound, arrays = bind(self.init_fn, self.args)

        def leaves(*arrays: Any) -> list[Any]:
            # Only the leaves: two builds of one TrainState have unequal treedefs, and jit compares.
            found = jax.tree.leaves(nnx_objects.split(bound(*arrays))[0])
            return [found[i] for i in positions]

        jitted = jax.jit(leaves, out_shardings=[shapes[i].sharding for i in positions])
        made: Sequence[Any] = in_context(
            lambda: jitted(*reachable(arrays, self.mesh)), self.mesh, self.rules
        )
        return made
