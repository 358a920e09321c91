"""Abstract states and initial states on a mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxckpt.arguments import checked
from flaxckpt.errors import ShardingError
from flaxckpt.sharding import specs as leaf_specs
from flaxckpt.sharding.specs import (
    Annotated,
    Keys,
    ParamIndex,
    Rules,
    Specs,
    index_by_last_key,
    mirrored_spec,
)
from flaxckpt.tree import nnx_objects
from flaxckpt.tree import structure as tree_structure
from flaxckpt.tree.keypaths import first_match, name_of

# The abstract state of a model: shapes, dtypes, and where each leaf lies on a mesh.


T = TypeVar("T")


@checked()
def abstract_state(
    init_fn: Callable[..., T],
    *args: Any,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
    specs: Specs | None = None,
) -> T:
    """What `init_fn(*args)` returns, without computing it, and with a sharding for each leaf.

    A leaf's sharding comes from, in this order: the first pattern of `specs` that matches its key
    path; its box (`nn.Partitioned`, `nn.LogicallyPartitioned`, the metadata of an `nnx.Variable`);
    for optimizer state, the parameter that it mirrors. Every other leaf is replicated.

    Args:
      init_fn: makes the state: a TrainState, an nnx module, a tuple of them, any pytree.
      *args: its arguments, such as a PRNG key. Arrays, and trees of nothing but arrays, are traced;
        everything else (a number of steps, a config) is passed as it is.
      mesh: the devices; without it leaves have no sharding and go to the default device.
      rules: pairs of a logical axis and a mesh axis, as for `nn.logical_axis_rules`; by default
        those of the context.
      specs: PartitionSpecs by pattern. A pattern is the key path of a node, for all leaves of its
        subtree, or a regular expression that must match a whole key path (`re.fullmatch`), such as
        `params/.*/kernel`.

    Returns:
      A tree like that of `init_fn`, with `jax.ShapeDtypeStruct`s.

    Raises:
      ShardingError: when the spec of a parameter does not fit its shape or the mesh.
      RuleError: when a pattern is not a valid regular expression, or is a glob.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> flaxckpt.abstract_state(lambda: {"kernel": jnp.ones((2, 3))})
      {'kernel': ShapeDtypeStruct(shape=(2, 3), dtype=float32)}
    """
    shapes, graphs = _eval_shape(init_fn, *args, mesh=mesh, rules=rules)
    if mesh is not None:
        shapes = _with_shardings(shapes, mesh, rules, specs or {})
    merged: T = nnx_objects.merge(shapes, graphs)
    return merged


def _eval_shape(
    init_fn: Callable[..., Any], *args: Any, mesh: Mesh | None, rules: Rules | None
) -> tuple[Any, list[Any]]:
    """The shapes of `init_fn(*args)`, nnx objects split into their states and graphs."""
    graphs: list[Any] = []
    bound, arrays = bind(init_fn, args)

    def split(*arrays: Any) -> Any:
        tree, found = nnx_objects.split(bound(*arrays))
        graphs[:] = found
        return tree

    return in_context(lambda: jax.eval_shape(split, *arrays), mesh, rules), graphs


def bind(init_fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], list[Any]]:
    """`init_fn` as a function of those of its arguments that are arrays, and these."""
    traced = [_is_arrays(arg) for arg in args]

    def bound(*arrays: Any) -> Any:
        values = iter(arrays)
        return init_fn(*(next(values) if t else a for a, t in zip(args, traced, strict=True)))

    return bound, [arg for arg, t in zip(args, traced, strict=True) if t]


def _is_arrays(arg: Any) -> bool:
    """Whether an argument is a tree of nothing but arrays."""
    leaves = jax.tree.leaves(arg)
    arrays = jax.Array | np.ndarray | jax.ShapeDtypeStruct
    return bool(leaves) and all(isinstance(leaf, arrays) for leaf in leaves)


def reachable(arrays: Any, mesh: Mesh | None) -> Any:
    """`arrays` where a computation on `mesh` can take them: not committed to other devices."""
    if mesh is None:
        return arrays
    everywhere, devices = NamedSharding(mesh, PartitionSpec()), set(mesh.devices.flat)

    def reachable(array: Any) -> Any:
        elsewhere = isinstance(array, jax.Array) and array.sharding.device_set != devices
        return jax.device_put(array, everywhere) if elsewhere and array.committed else array

    return jax.tree.map(reachable, arrays)


def in_context(call: Callable[[], T], mesh: Mesh | None, rules: Rules | None) -> T:
    """`call()` with the mesh and the logical axis rules in context, as models expect them."""
    with contextlib.ExitStack() as stack:
        if rules is not None:
            stack.enter_context(nn.logical_axis_rules(rules))
        if mesh is None:
            return call()
        try:
            with jax.set_mesh(mesh):
                return call()
        except AssertionError:
            if mesh.are_all_axes_auto:
                raise
        # The boxes of linen constrain their values to the mesh in context. On Explicit axes jax
        # takes that for an assertion, which fails; without a mesh the boxes leave it.
        return call()


class _TargetLeaf(NamedTuple):
    """One leaf: its keys without boxes, its type, its own spec, and whether it is derived."""

    keys: Keys
    shape: jax.ShapeDtypeStruct
    spec: PartitionSpec | None
    derived: bool
    by_path: bool = False


def _with_shardings(tree: Any, mesh: Mesh, rules: Rules | None, specs: Specs) -> Any:
    """`tree` of shapes with a sharding for each."""
    leaves, axes = _with_path_specs(list(_leaves(tree, rules)), specs), dict(mesh.shape)
    params = index_by_last_key(
        [
            Annotated(leaf.keys, leaf.shape.shape, _checked(leaf, axes))
            for leaf in leaves
            if leaf.spec is not None and not leaf.derived
        ]
    )
    sharded = []
    for leaf in leaves:
        spec = _derived(leaf, axes, params) if leaf.derived else _checked(leaf, axes)
        sharded.append(_with_sharding(leaf.shape, NamedSharding(mesh, spec)))
    return jax.tree.unflatten(jax.tree.structure(tree), sharded)


def _with_path_specs(leaves: list[_TargetLeaf], specs: Specs) -> list[_TargetLeaf]:
    """`leaves`, those that a pattern of `specs` selects with its spec."""
    if not specs:
        return leaves
    names = [name_of(leaf.keys) for leaf in leaves]
    by_name = first_match(specs, names, "specs")
    return [
        leaf._replace(spec=by_name[name], by_path=True) if name in by_name else leaf
        for name, leaf in zip(names, leaves, strict=True)
    ]


def _with_sharding(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """`shape` on `sharding`."""
    return jax.ShapeDtypeStruct(
        shape.shape, shape.dtype, sharding=sharding, weak_type=shape.weak_type
    )


def _checked(leaf: _TargetLeaf, axes: dict[str, int]) -> PartitionSpec:
    """The spec of a leaf that was given one.

    Raises:
      ShardingError: when it does not fit.
    """
    spec = PartitionSpec() if leaf.spec is None else leaf.spec
    if why := leaf_specs.misfit(spec, leaf.shape.shape, axes):
        raise ShardingError(
            f"{name_of(leaf.keys) or 'the state'} cannot be sharded: {why}.\n"
            f"  spec:  {spec}\n"
            f"  shape: {leaf.shape.shape}\n"
            f"  mesh:  {axes}\n"
            "Change the spec (its annotation, the logical axis rules, or specs=) or the mesh."
        )
    return spec


def _derived(leaf: _TargetLeaf, axes: dict[str, int], params: ParamIndex) -> PartitionSpec:
    """The spec of a leaf of optimizer state; whatever its shape, one that is valid.

    An optimizer maps over the boxes of the parameters, so that the factored moments of a kernel
    carry the kernel's axis names; and a pattern for kernels matches them too. Both count only
    where they fit.
    """
    shape = leaf.shape.shape
    own = leaf.spec
    if own is None or leaf_specs.misfit(own, shape, axes):
        own = None
    if own is not None and leaf.by_path:
        return own
    mirrored = mirrored_spec(leaf.keys, shape, params)
    if mirrored is not None:
        return mirrored
    return own if own is not None and len(own) == len(shape) else PartitionSpec()


def _leaves(tree: Any, rules: Rules | None) -> Iterator[_TargetLeaf]:
    """The leaves of `tree` in the order of jax."""
    stack: list[tuple[Any, Keys, PartitionSpec | None, bool]] = [(tree, (), None, False)]
    while stack:
        value, keys, boxed, derived = stack.pop()
        split = tree_structure.split_container(value, ())
        if split is None:
            yield _TargetLeaf(keys, value, boxed, derived)
            continue
        node, children = split
        derived = derived or _is_optimizer_state(value, node.kind)
        if node.is_box:
            stack.append((children[0], keys, leaf_specs.from_box(value, rules), derived))
            continue
        for key, child in zip(reversed(node.keys), reversed(children), strict=True):
            stack.append((child, (*keys, key.value), None, derived))


def _is_optimizer_state(value: Any, kind: str) -> bool:
    """Whether everything in a node is derived from parameters: optax keeps state in NamedTuples.

    nnx flattens those into dicts, and marks the Variables instead.
    """
    nnx = sys.modules.get("flax.nnx")
    return kind == "namedtuple" or (nnx is not None and isinstance(value, nnx.OptState))


# The state that a run begins with: what it will be, all of it, or some of its leaves.


@dataclasses.dataclass(frozen=True)
class InitialState(Generic[T]):
    """What `init_fn(*args)` makes; the attributes are the arguments of `abstract_state`."""

    init_fn: Callable[..., T]
    args: Sequence[Any]
    mesh: Mesh | None
    rules: Rules | None
    specs: Specs | None

    @functools.cached_property
    def abstract(self) -> T:
        """Its shapes, dtypes and shardings."""
        return abstract_state(
            self.init_fn, *self.args, mesh=self.mesh, rules=self.rules, specs=self.specs
        )

    def tree(self) -> T:
        """All of it, each leaf made straight where it belongs."""
        stateful, graphs = nnx_objects.split(self.abstract)
        shapes, structure = jax.tree.flatten(stateful)
        leaves = self.leaves(range(len(shapes)))
        made: T = nnx_objects.merge(jax.tree.unflatten(structure, leaves), graphs)
        return made

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
