"""Checkpoints for Flax training loops: one line saves, one line restores."""

from __future__ import annotations

from flaxckpt import errors
from flaxckpt.inspect import LeafInfo, inspect
from flaxckpt.leaves.handler import register_leaf_handler
from flaxckpt.options import Options
from flaxckpt.restore import RestoreReport, restore
from flaxckpt.save import save
from flaxckpt.tree.rebuild import SavedNode, register_node
from flaxckpt.verify import VerifyReport, verify
