"""The metric that decides which steps are best, from TensorBoard's event files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class _EventFiles:
    """The values of one tag, as far as they are written."""

    tag: str
    directory: Path
    accumulators: dict[Path, Any] = dataclasses.field(default_factory=dict)

    def __call__(self) -> Mapping[int, float]:
        """The value at each step; what was written twice has the later one."""
        values: dict[int, float] = {}
        for directory in sorted({file.parent for file in self.directory.rglob("*tfevents*")}):
            values.update(self._read(directory))
        return values

    def _read(self, directory: Path) -> Mapping[int, float]:
        """The values in one directory; only what is new is read again."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.util import tensor_util

        if directory not in self.accumulators:
            everything = {"scalars": 0, "tensors": 0}
            self.accumulators[directory] = EventAccumulator(str(directory), everything)
        found = self.accumulators[directory].Reload()
        tags = found.Tags()
        if self.tag in tags["scalars"]:
            return {event.step: float(event.value) for event in found.Scalars(self.tag)}
        if self.tag not in tags["tensors"]:
            return {}
        tensors = found.Tensors(self.tag)
        return {t.step: float(tensor_util.make_ndarray(t.tensor_proto)) for t in tensors}


def metric_from_tensorboard(tag: str, directory: str | os.PathLike[str]) -> _EventFiles:
    """The metric of each step that an evaluation wrote for TensorBoard, for `CheckpointManager`.

    A step that has none yet is kept until it has.

    Args:
      tag: the name of the scalar.
      directory: where the event files are; those in directories below are read too.

    Raises:
      ModuleNotFoundError: when tensorboard is not installed.

    Example:
      >>> metric = flaxckpt.metric_from_tensorboard("eval/loss", tmp_path / "logs")
      >>> ckpt = flaxckpt.CheckpointManager(
      ...     tmp_path / "run", metric=metric, keep=flaxckpt.Keep(last=1, best=3))
    """
    import tensorboard  # noqa: F401 - now, not in the background after hours of training

    return _EventFiles(tag, Path(directory))
