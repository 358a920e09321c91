"""Checkpoints for Flax training loops: one line saves, one line restores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flaxckpt import errors
from flaxckpt.export import export
from flaxckpt.inspect import LeafInfo, inspect
from flaxckpt.items.handler import register_item_handler
from flaxckpt.items.restoring import restore_items
from flaxckpt.lazy import lazy
from flaxckpt.leaf import Leaf
from flaxckpt.leaves.handler import register_leaf_handler
from flaxckpt.manager import CheckpointManager
from flaxckpt.options import Options
from flaxckpt.preemption import on_preemption
from flaxckpt.report import RestoreReport
from flaxckpt.restore import restore
from flaxckpt.retention import Keep
from flaxckpt.save import save
from flaxckpt.schedule import Every
from flaxckpt.sharding.abstract import abstract_state
from flaxckpt.storage.object_store import ObjectStore
from flaxckpt.tensorboard import metric_from_tensorboard
from flaxckpt.transforms.apply import Apply
from flaxckpt.transforms.layers import Stack, Unstack
from flaxckpt.transforms.names import Drop, Rename
from flaxckpt.transforms.sizes import Resize
from flaxckpt.transforms.values import Cast, Fallback
from flaxckpt.tree.rebuild import SavedNode, register_node
from flaxckpt.verify import VerifyReport, verify

if TYPE_CHECKING:
    from flaxckpt.periodic import PeriodicCheckpoint

__version__ = "0.1.0"

__all__ = [
    "Apply",
    "Cast",
    "CheckpointManager",
    "Drop",
    "Every",
    "Fallback",
    "Keep",
    "Leaf",
    "LeafInfo",
    "ObjectStore",
    "Options",
    "PeriodicCheckpoint",
    "Rename",
    "Resize",
    "RestoreReport",
    "SavedNode",
    "Stack",
    "Unstack",
    "VerifyReport",
    "abstract_state",
    "errors",
    "export",
    "inspect",
    "lazy",
    "metric_from_tensorboard",
    "on_preemption",
    "register_item_handler",
    "register_leaf_handler",
    "register_node",
    "restore",
    "restore_items",
    "save",
    "verify",
]


def __getattr__(name: str) -> Any:
    """`PeriodicCheckpoint`, whose base class imports TensorFlow: only for those who ask for it."""
    if name == "PeriodicCheckpoint":
        from flaxckpt.periodic import PeriodicCheckpoint

        return PeriodicCheckpoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
