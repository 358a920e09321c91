"""PartitionSpecs: of rules, of boxes, and of optimizer moments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from flax.core import meta as flax_meta
from jax.sharding import PartitionSpec

# The specs of optimizer state: those of the parameters that it mirrors. Pure decisions.
#
# No table of optimizers: a leaf of the state takes the spec of the parameter that ends in the same
# key path (`opt_state/0/mu/dense/kernel` and `params/dense/kernel`), when it also has its shape.
# Factored, stacked and masked state has other shapes, and is replicated.


Keys = tuple[Any, ...]


class Annotated(NamedTuple):
    """A parameter: its keys, its shape, and the spec that it was given."""

    keys: Keys
    shape: tuple[int, ...]
    spec: PartitionSpec


ParamIndex = Mapping[Any, Sequence[Annotated]]


def index_by_last_key(params: Sequence[Annotated]) -> ParamIndex:
    """`params` by the last key of their paths, so that a look-up need not go through them all."""
    index: dict[Any, list[Annotated]] = {}
    for param in params:
        if param.keys:
            index.setdefault(param.keys[-1], []).append(param)
    return index


def mirrored_spec(keys: Keys, shape: tuple[int, ...], params: ParamIndex) -> PartitionSpec | None:
    """The spec of the parameter that the state leaf at `keys` mirrors; `None` when there is none.

    It is the one with the longest common suffix of the key path among those of the same shape.
    When several have it, and not the same spec, none is taken.

    Example:
      >>> spec = PartitionSpec("model")
      >>> params = index_by_last_key([Annotated(("params", "dense", "bias"), (8,), spec)])
      >>> mirrored_spec(("opt_state", 0, "mu", "dense", "bias"), (8,), params) == spec
      True
    """
    candidates = params.get(keys[-1], ()) if keys else ()
    alike = [(_common_suffix(keys, p.keys), p.spec) for p in candidates if p.shape == shape]
    longest = max((length for length, _ in alike), default=0)
    specs = [spec for length, spec in alike if length == longest]
    return specs[0] if specs and all(spec == specs[0] for spec in specs) else None


def _common_suffix(a: Keys, b: Keys) -> int:
    """How many keys at the end of `a` and `b` are equal."""
    length = 0
    for x, y in zip(reversed(a), reversed(b), strict=False):
        if x != y:
            break
        length += 1
    return length


# The PartitionSpec of a leaf: from its box, from path rules, and whether it fits. No devices.


Rules = Sequence[tuple[str, str | tuple[str, ...] | None]]
Specs = Mapping[str, PartitionSpec]


def from_box(box: Any, rules: Rules | None) -> PartitionSpec | None:
    """What a box says of its value: a flax `Partitioned` or an `nnx.Variable`; `None` if nothing.

    Args:
      box: the box. Names of logical axes become mesh axes by `rules`; names of
        `LogicallyPartitioned` that no rule has are not sharded.
      rules: pairs of a logical axis and a mesh axis; by default flax's own of the context.
    """
    if isinstance(box, nn.LogicallyPartitioned):
        effective = rules or box.rules or nn.get_logical_axis_rules()
        return PartitionSpec(*(nn.logical_to_mesh_axes(tuple(box.names), effective) or ()))
    if isinstance(box, flax_meta.Partitioned):
        return _by_rules(box.names, rules)
    if isinstance(box, flax_meta.AxisMetadata):
        return None
    metadata = box.get_metadata()
    names = metadata.get("out_sharding")
    if not names:
        return None
    own = metadata.get("sharding_rules") or nn.get_logical_axis_rules()
    return _by_rules(getattr(names, "spec", names), rules or own)


def _by_rules(names: Sequence[Any], rules: Rules | None) -> PartitionSpec:
    """`names` of axes as a spec; those that a rule knows are renamed by the first that does."""
    renamed: dict[str, Any] = {}
    for logical, axis in rules or ():
        renamed.setdefault(logical, axis)
    return PartitionSpec(*(renamed.get(n, n) if isinstance(n, str) else n for n in names))


def misfit(spec: PartitionSpec, shape: Sequence[int], axes: Mapping[str, int]) -> str:
    """Why an array of `shape` cannot be sharded by `spec` on a mesh of `axes`; `""` if it can.

    Example:
      >>> misfit(PartitionSpec("x"), (3,), {"x": 2})
      'axis 0 of size 3 is not divisible by 2 (x)'
    """
    if len(spec) > len(shape):
        return f"the spec has {len(spec)} entries, the array {len(shape)} axes"
    used: list[str] = []
    for i, entry in enumerate(spec):
        names = _names(entry)
        if unknown := [n for n in names if n not in axes]:
            return f"the mesh has no axis {unknown[0]!r}, only {', '.join(axes)}"
        used += names
        parts = math.prod(axes[n] for n in names)
        if shape[i] % parts:
            return f"axis {i} of size {shape[i]} is not divisible by {parts} ({', '.join(names)})"
    twice = next((n for n in used if used.count(n) > 1), None)
    return f"the mesh axis {twice!r} is used twice" if twice else ""


def _names(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a spec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def describe_sharding(sharding: jax.sharding.Sharding | None) -> Any:
    """A sharding by the names of its mesh axes, as JSON; `None` for a single device."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    mesh = {
        "axis_names": [str(name) for name in sharding.mesh.axis_names],
        "shape": list(sharding.mesh.devices.shape),
    }
    spec = [list(map(str, p)) if isinstance(p, tuple) else p and str(p) for p in sharding.spec]
    return {"mesh": mesh, "spec": spec}
