"""Checkpoints for Flax training loops: one line saves, one line restores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flaxckpt import errors
from flaxckpt.inspect import LeafInfo, inspect
from flaxckpt.leaves.handler import register_leaf_handler
from flaxckpt.manager import CheckpointManager
from flaxckpt.options import Options
from flaxckpt.preemption import on_preemption
from flaxckpt.restore import RestoreReport, restore
from flaxckpt.retention import Keep
from flaxckpt.save import save
from flaxckpt.schedule import Every
from flaxckpt.sharding.abstract import abstract_state
from flaxckpt.storage.object_store import ObjectStore
from flaxckpt.tree.rebuild import SavedNode, register_node
from flaxckpt.verify import VerifyReport, verify

if TYPE_CHECKING:
    from flaxckpt.periodic import PeriodicCheckpoint

__version__ = "0.1.0"

__all__ = [
    "CheckpointManager",
    "Every",
    "Keep",
    "LeafInfo",
    "ObjectStore",
    "Options",
    "PeriodicCheckpoint",
    "RestoreReport",
    "SavedNode",
    "VerifyReport",
    "abstract_state",
    "errors",
    "inspect",
    "on_preemption",
    "register_leaf_handler",
    "register_node",
    "restore",
    "save",
    "verify",
]


def __getattr__(name: str) -> Any:
    """`PeriodicCheckpoint`, whose base class imports TensorFlow: only for those who ask for it."""
    if name == "PeriodicCheckpoint":
        from flaxckpt.periodic import PeriodicCheckpoint

        return PeriodicCheckpoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
