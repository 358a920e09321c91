"""Checkpoints for Flax training loops: one line saves, one line restores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flaxckpt import errors
from flaxckpt.inspect import LeafInfo, inspect
from flaxckpt.items.handler import register_item_handler
from flaxckpt.items.restoring import restore_items
from flaxckpt.lazy import lazy
from flaxckpt.leaves.handler import register_leaf_handler
from flaxckpt.manager import CheckpointManager
from flaxckpt.options import Options
from flaxckpt.partial_save import PartialSave
from flaxckpt.preemption import on_preemption
from flaxckpt.restore import restore
from flaxckpt.restoring.leaf import Leaf
from flaxckpt.restoring.report import RestoreReport
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
    from flaxckpt.exporting.export import export
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
    "PartialSave",
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
    """What is imported only for those who ask for it, as it takes its time."""
    if name == "PeriodicCheckpoint":  # its base class imports TensorFlow
        from flaxckpt.periodic import PeriodicCheckpoint

        return PeriodicCheckpoint
    if name == "export":
        from flaxckpt.exporting.export import export

        return export
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
