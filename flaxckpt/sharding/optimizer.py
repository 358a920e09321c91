"""The specs of optimizer state: those of the parameters that it mirrors. Pure decisions.

No table of optimizers: a leaf of the state takes the spec of the parameter that ends in the same
key path (`opt_state/0/mu/dense/kernel` and `params/dense/kernel`), when it also has its shape.
Factored, stacked and masked state has other shapes, and is replicated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

Keys = tuple[Any, ...]


class Annotated(NamedTuple):
    """A parameter: its keys, its shape, and the spec that it was given."""

    keys: Keys
    shape: tuple[int, ...]
    spec: PartitionSpec


Index = Mapping[Any, Sequence[Annotated]]


def index_by_last_key(params: Sequence[Annotated]) -> Index:
    """`params` by the last key of their paths, so that a look-up need not go through them all."""
    index: dict[Any, list[Annotated]] = {}
    for param in params:
        if param.keys:
            index.setdefault(param.keys[-1], []).append(param)
    return index


def mirrored_spec(keys: Keys, shape: tuple[int, ...], params: Index) -> PartitionSpec | None:
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
