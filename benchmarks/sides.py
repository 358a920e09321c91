"""The two libraries behind one interface, each through its manager with its defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import orbax.checkpoint as ocp

import flaxckpt

# As strace shows it; TensorStore's default is `file_io_sync`.
DURABILITY = (
    "flaxckpt fsyncs every file and directory, before and after the rename that commits. Orbax "
    "fsyncs the array data (TensorStore's default), not its own JSON files and not that rename."
)


class Side(Protocol):
    """A library that saves and restores the steps of one run."""

    def __init__(self, directory: Path, *, async_: bool = True):
        """Opens the run in `directory`."""

    def save(self, step: int, tree: Any) -> None:
        """Returns when the loop may go on."""

    def wait(self) -> None:
        """Returns when the save in flight is committed."""

    def restore(self, step: int, target: Any) -> Any:
        """The state, where `target` says."""

    def delete(self, step: int) -> None:
        """Deletes a step."""


class FlaxckptSide:
    """flaxckpt."""

    def __init__(
        self,
        directory: Path,
        *,
        async_: bool = True,
        options: flaxckpt.Options = flaxckpt.Options(),
    ):
        """Opens the run in `directory`."""
        self._manager = flaxckpt.CheckpointManager(directory, async_=async_, options=options)

    def save(self, step: int, tree: Any) -> None:
        """Returns when the loop may go on."""
        self._manager.save(step, tree)

    def wait(self) -> None:
        """Returns when the save in flight is committed."""
        self._manager.wait()

    def restore(self, step: int, target: Any) -> Any:
        """The state, where `target` says."""
        return self._manager.restore(target, step=step)

    def delete(self, step: int) -> None:
        """Deletes a step."""
        self._manager.delete(step)


class OrbaxSide:
    """Orbax."""

    def __init__(self, directory: Path, *, async_: bool = True):
        """Opens the run in `directory`."""
        options = ocp.CheckpointManagerOptions(enable_async_checkpointing=async_)
        self._manager = ocp.CheckpointManager(directory, options=options)

    def save(self, step: int, tree: Any) -> None:
        """Returns when the loop may go on."""
        self._manager.save(step, args=ocp.args.StandardSave(tree))

    def wait(self) -> None:
        """Returns when the save in flight is committed."""
        self._manager.wait_until_finished()

    def restore(self, step: int, target: Any) -> Any:
        """The state, where `target` says."""
        return self._manager.restore(step, args=ocp.args.StandardRestore(target))

    def delete(self, step: int) -> None:
        """Deletes a step."""
        self._manager.delete(step)


SIDES: dict[str, type[Side]] = {"flaxckpt": FlaxckptSide, "Orbax": OrbaxSide}
