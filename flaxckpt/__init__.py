"""Checkpoints for Flax training loops: one line saves, one line restores.

Everything is imported when it is first asked for: the command line looks into checkpoints without
jax, and nobody pays for TensorFlow who uses no hook of CLU.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flaxckpt import errors as errors
    from flaxckpt.exporting.export import export as export
    from flaxckpt.items.handler import register_item_handler as register_item_handler
    from flaxckpt.items.restoring import restore_items as restore_items
    from flaxckpt.leaves.handler import register_leaf_handler as register_leaf_handler
    from flaxckpt.looking.inspect import LeafInfo as LeafInfo
    from flaxckpt.looking.inspect import inspect as inspect
    from flaxckpt.looking.lazy import lazy as lazy
    from flaxckpt.looking.verify import VerifyReport as VerifyReport
    from flaxckpt.looking.verify import verify as verify
    from flaxckpt.manager import CheckpointManager as CheckpointManager
    from flaxckpt.options import Options as Options
    from flaxckpt.periodic import PeriodicCheckpoint as PeriodicCheckpoint
    from flaxckpt.preemption import on_preemption as on_preemption
    from flaxckpt.restoring.leaf import Leaf as Leaf
    from flaxckpt.restoring.report import RestoreReport as RestoreReport
    from flaxckpt.restoring.restore import restore as restore
    from flaxckpt.retention import Keep as Keep
    from flaxckpt.runs.costs import Stats as Stats
    from flaxckpt.saving.partial import PartialSave as PartialSave
    from flaxckpt.saving.save import save as save
    from flaxckpt.schedule import Every as Every
    from flaxckpt.sharding.abstract import abstract_state as abstract_state
    from flaxckpt.storage.object_store import ObjectStore as ObjectStore
    from flaxckpt.tensorboard import metric_from_tensorboard as metric_from_tensorboard
    from flaxckpt.transforms.apply import Apply as Apply
    from flaxckpt.transforms.layers import Stack as Stack
    from flaxckpt.transforms.layers import Unstack as Unstack
    from flaxckpt.transforms.names import Drop as Drop
    from flaxckpt.transforms.names import Rename as Rename
    from flaxckpt.transforms.sizes import Resize as Resize
    from flaxckpt.transforms.values import Cast as Cast
    from flaxckpt.transforms.values import Fallback as Fallback
    from flaxckpt.tree.rebuild import SavedNode as SavedNode
    from flaxckpt.tree.rebuild import register_node as register_node

__version__ = "0.1.0"

# Where each public name is. No module of this package has the name of a function: importing it
# would put it in the function's place.
_PLACES = {
    "Apply": "transforms.apply",
    "Cast": "transforms.values",
    "CheckpointManager": "manager",
    "Drop": "transforms.names",
    "Every": "schedule",
    "Fallback": "transforms.values",
    "Keep": "retention",
    "Leaf": "restoring.leaf",
    "LeafInfo": "looking.inspect",
    "ObjectStore": "storage.object_store",
    "Options": "options",
    "PartialSave": "saving.partial",
    "PeriodicCheckpoint": "periodic",
    "Rename": "transforms.names",
    "Resize": "transforms.sizes",
    "RestoreReport": "restoring.report",
    "SavedNode": "tree.rebuild",
    "Stats": "runs.costs",
    "Stack": "transforms.layers",
    "Unstack": "transforms.layers",
    "VerifyReport": "looking.verify",
    "abstract_state": "sharding.abstract",
    "export": "exporting.export",
    "inspect": "looking.inspect",
    "lazy": "looking.lazy",
    "metric_from_tensorboard": "tensorboard",
    "on_preemption": "preemption",
    "register_item_handler": "items.handler",
    "register_leaf_handler": "leaves.handler",
    "register_node": "tree.rebuild",
    "restore": "restoring.restore",
    "restore_items": "items.restoring",
    "save": "saving.save",
    "verify": "looking.verify",
}

__all__ = ["errors", *_PLACES]


def __getattr__(name: str) -> Any:
    """A public name, which is looked up once."""
    if name == "errors":
        return importlib.import_module("flaxckpt.errors")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """The public names."""
    return [*__all__, "__version__"]
