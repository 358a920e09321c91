"""Where a state lies: on one device, or over eight on a mesh, or on that mesh transposed."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

DEVICES = {"single": 1, "sharded": 8}
AXES = ("data", "model")
MESHES = {"sharded": (4, 2), "transposed": (2, 4)}
REPLICATED = 1024  # leaves with fewer elements


def spec(shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """The largest axis that `data` divides over it, the largest of the others over `model`.

    Two axes are cut by two, as both of one would give the same regions on the transposed mesh.
    """
    names: list[str | None] = [None] * len(shape)
    for name in AXES if math.prod(shape) >= REPLICATED else ():
        free = [n for n, size in enumerate(shape) if not names[n] and size % mesh.shape[name] == 0]
        if free:
            names[max(free, key=shape.__getitem__)] = name
    return PartitionSpec(*names)


def sharding(shape: tuple[int, ...], layout: str) -> Sharding:
    """The sharding of an array of this shape."""
    if layout == "single":
        return SingleDeviceSharding(jax.devices()[0])
    mesh = Mesh(np.reshape(jax.devices(), MESHES[layout]), AXES)
    return NamedSharding(mesh, spec(shape, mesh))


def target(abstract: Any, layout: str) -> Any:
    """`abstract` with shardings: what a restore is asked for."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x.shape, layout)),
        abstract,
    )
