"""Checkpoints for Flax training loops: one line saves, one line restores.

Everything is imported when it is first asked for: the command line looks into checkpoints without
jax, and nobody pays for TensorFlow who uses no hook of CLU.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flaxckpt import errors as errors
    from flaxckpt.exporting import export as export
    from flaxckpt.inspecting import CheckpointInfo as CheckpointInfo
    from flaxckpt.inspecting import ItemInfo as ItemInfo
    from flaxckpt.inspecting import LazyCheckpoint as LazyCheckpoint
    from flaxckpt.inspecting import VerifyReport as VerifyReport
    from flaxckpt.inspecting import inspect as inspect
    from flaxckpt.inspecting import lazy as lazy
    from flaxckpt.inspecting import verify as verify
    from flaxckpt.items.item_kinds import register_item_handler as register_item_handler
    from flaxckpt.items.item_kinds import restore_items as restore_items
    from flaxckpt.leaves.kinds import register_leaf_handler as register_leaf_handler
    from flaxckpt.leaves.spec import LeafInfo as LeafInfo
    from flaxckpt.manager import CheckpointManager as CheckpointManager
    from flaxckpt.options import ObjectStore as ObjectStore
    from flaxckpt.options import Options as Options
    from flaxckpt.periodic import PeriodicCheckpoint as PeriodicCheckpoint
    from flaxckpt.preemption import on_preemption as on_preemption
    from flaxckpt.restoring.restore import restore as restore
    from flaxckpt.restoring.restore_report import RestoreReport as RestoreReport
    from flaxckpt.run.costs import Stats as Stats
    from flaxckpt.run.retention import Keep as Keep
    from flaxckpt.run.schedule import Every as Every
    from flaxckpt.run.tensorboard import metric_from_tensorboard as metric_from_tensorboard
    from flaxckpt.saving.save import PartialSave as PartialSave
    from flaxckpt.saving.save import save as save
    from flaxckpt.sharding.abstract import abstract_state as abstract_state
    from flaxckpt.source.leaf import Leaf as Leaf
    from flaxckpt.transforms import Apply as Apply
    from flaxckpt.transforms import Cast as Cast
    from flaxckpt.transforms import Drop as Drop
    from flaxckpt.transforms import Fallback as Fallback
    from flaxckpt.transforms import Rename as Rename
    from flaxckpt.transforms import Resize as Resize
    from flaxckpt.transforms import Stack as Stack
    from flaxckpt.transforms import Unstack as Unstack
    from flaxckpt.tree.rebuild import SavedNode as SavedNode
    from flaxckpt.tree.rebuild import register_node as register_node

__version__ = "0.1.0"

# Where each public name is. No module of this package has the name of a function: importing it
# would put it in the function's place.
_PLACES = {
    "Apply": "transforms",
    "Cast": "transforms",
    "CheckpointInfo": "inspecting",
    "CheckpointManager": "manager",
    "Drop": "transforms",
    "Every": "run.schedule",
    "Fallback": "transforms",
    "ItemInfo": "inspecting",
    "Keep": "run.retention",
    "Leaf": "source.leaf",
    "LazyCheckpoint": "inspecting",
    "LeafInfo": "leaves.spec",
    "ObjectStore": "options",
    "Options": "options",
    "PartialSave": "saving.save",
    "PeriodicCheckpoint": "periodic",
    "Rename": "transforms",
    "Resize": "transforms",
    "RestoreReport": "restoring.restore_report",
    "SavedNode": "tree.rebuild",
    "Stats": "run.costs",
    "Stack": "transforms",
    "Unstack": "transforms",
    "VerifyReport": "inspecting",
    "abstract_state": "sharding.abstract",
    "export": "exporting",
    "inspect": "inspecting",
    "lazy": "inspecting",
    "metric_from_tensorboard": "run.tensorboard",
    "on_preemption": "preemption",
    "register_item_handler": "items.item_kinds",
    "register_leaf_handler": "leaves.kinds",
    "register_node": "tree.rebuild",
    "restore": "restoring.restore",
    "restore_items": "items.item_kinds",
    "save": "saving.save",
    "verify": "inspecting",
}

__all__ = ["errors", *_PLACES]


def __getattr__(name: str) -> Any:
    """A public name, which is looked up once."""
    if name == "errors":
        return importlib.import_module("flaxckpt.errors")
    if name not in _PLACES:
        raise importlib.import_module("flaxckpt.arguments").no_public_name(__name__, name)
    found = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """The public names."""
    return [*__all__, "__version__"]
