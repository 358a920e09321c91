"""The metric that decides which steps are best, from TensorBoard's event files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flaxckpt.errors import DirectoryError, InvalidMetricError


@dataclasses.dataclass(frozen=True)
class _EventFiles:
    """The values of one tag, as far as they are written.

    Attributes:
      tag: the name of the scalar.
      directory: where the files are.
      loaders: what reads each file from where it has got.
      values: when each step's value was written, and the value.
    """

    tag: str
    directory: Path
    loaders: dict[Path, Any] = dataclasses.field(default_factory=dict)
    values: dict[int, tuple[float, float]] = dataclasses.field(default_factory=dict)

    def __call__(self) -> Mapping[int, float]:
        """The value at each step; of several the one that was written last."""
        for file in sorted(self.directory.rglob("*tfevents*")):
            for step, written in self._new(file):
                self.values[step] = max(written, self.values.get(step, written))
        return {step: value for step, (_, value) in self.values.items()}

    def _new(self, file: Path) -> Iterator[tuple[int, tuple[float, float]]]:
        """What was added to a file: steps, and when their values were written, with these."""
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        if file not in self.loaders:
            self.loaders[file] = EventFileLoader(str(file))
        for event in self.loaders[file].Load():
            for value in event.summary.value:
                if value.tag == self.tag:
                    yield event.step, (event.wall_time, self._number(value))

    def _number(self, value: Any) -> float:
        """The number of a summary.

        Raises:
          InvalidMetricError: when it is something else.
        """
        from tensorboard.util import tensor_util

        found = tensor_util.make_ndarray(value.tensor)
        if found.size != 1 or found.dtype.kind not in "biuf":
            raise InvalidMetricError(
                f"the tag {self.tag!r} in {self.directory} is no scalar. Give that of one."
            )
        return float(found.reshape(()))


def metric_from_tensorboard(tag: str, directory: str | os.PathLike[str]) -> _EventFiles:
    """The metric of each step that an evaluation wrote for TensorBoard, for `Keep(metric=...)`.

    A step that has none yet is kept until it has.

    Args:
      tag: the name of the scalar.
      directory: where the event files are, on this machine; those in directories below are read
        too.

    Raises:
      ModuleNotFoundError: when tensorboard is not installed.
      DirectoryError: when `directory` is the URL of an object store.

    Example:
      >>> metric = flaxckpt.metric_from_tensorboard("eval/loss", tmp_path / "logs")
      >>> keep = flaxckpt.Keep(last=1, best=3, metric=metric, mode="min")
      >>> ckpt = flaxckpt.CheckpointManager(tmp_path / "run", keep=keep)
    """
    import tensorboard  # noqa: F401 - now, not in the background after hours of training

    if "://" in os.fspath(directory):
        raise DirectoryError(
            f"event files are read from a directory of this machine, not from {directory}. Mount "
            "the bucket, or copy them."
        )
    return _EventFiles(tag, Path(directory))
