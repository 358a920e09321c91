"""Meshes that a checkpoint was saved on, built of the devices that are here."""

from __future__ import annotations

import functools
import math

import jax
from jax.experimental import mesh_utils
from jax.sharding import Mesh


def mesh_like(axes: tuple[tuple[str, int], ...]) -> Mesh | None:
    """A mesh with these axes and sizes: the current mesh, or one of the devices of this job.

    `None` if there are too few devices, or, in a job of several processes, too many: then every
    process must take part in every array.
    """
    names, sizes = tuple(name for name, _ in axes), tuple(size for _, size in axes)
    current = jax.sharding.get_mesh()
    if current.axis_names == names and current.axis_sizes == sizes:
        return current
    count, wanted = jax.device_count(), math.prod(sizes)
    if wanted > count or (wanted < count and jax.process_count() > 1):
        return None
    return _mesh(names, sizes)


@functools.cache
def _mesh(names: tuple[str, ...], sizes: tuple[int, ...]) -> Mesh:
    devices = jax.devices()[: math.prod(sizes)]
    return Mesh(mesh_utils.create_device_mesh(sizes, devices=devices), names)
