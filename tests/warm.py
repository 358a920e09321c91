"""Imports all that a save and a restore import, in a server from which tests fork processes.

`flaxckpt` imports its modules on first use, which would take every fork a quarter of a second.
No import here may start a backend of jax, or a thread, because neither survives a fork.
"""

import importlib
import pkgutil

import flax.linen
import jax
import jax.experimental.multihost_utils
import optax
import tensorstore

import flaxckpt

__all__ = ["flax", "jax", "optax", "tensorstore"]

# Rooms that import nothing beside jax, and that no save or restore can do without.
ROOMS = ("items", "leaves", "metadata", "restoring", "run", "saving", "sharding", "source", "store")


def modules_of(package):
    """The names of all modules of a package."""
    return [found.name for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")]


for _room in ROOMS:
    for _name in modules_of(importlib.import_module(f"flaxckpt.{_room}")):
        importlib.import_module(_name)
for _name in ("CheckpointManager", "save", "restore", "verify", "inspect", "lazy"):
    getattr(flaxckpt, _name)
