"""A checkpoint as a mapping of leaves that are read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flaxckpt.opening import open_source
from flaxckpt.options import Options
from flaxckpt.restoring.leaf import Leaf, saved_leaf
from flaxckpt.restoring.source import Source
from flaxckpt.storage.location import PathLike


class LazyCheckpoint(Mapping[str, Leaf]):
    """The leaves of a checkpoint by key path, in the order of `jax.tree.leaves`.

    Attributes:
      metadata: what it was saved with as `metadata=`.
    """

    def __init__(self, source: Source, options: Options):
        """The leaves of `source`."""
        self._source, self._options = source, options
        self._leaves = {leaf.name: leaf for leaf in source.leaves}
        self.metadata = dict(source.metadata)

    def __getitem__(self, name: str) -> Leaf:
        """The leaf at the key path `name`."""
        return saved_leaf(self._source, self._leaves[name], name, self._options)

    def __iter__(self) -> Iterator[str]:
        """The key paths."""
        return iter(self._leaves)

    def __len__(self) -> int:
        """The number of leaves."""
        return len(self._leaves)

    def __repr__(self) -> str:
        """Where it is, and how much of it."""
        return f"LazyCheckpoint({str(self._source.path)!r}, {len(self)} leaves)"


def lazy(path: PathLike, *, options: Options = Options()) -> LazyCheckpoint:
    """Opens the checkpoint at `path`, of any format, without reading an array.

    Args:
      path: as for `flaxckpt.restore`.
      options: how to read.

    Raises:
      CheckpointNotFoundError: when there is no checkpoint at `path`.
      CorruptCheckpointError: when its metadata are damaged.

    Example:
      >>> import numpy as np
      >>> flaxckpt.save(tmp_path / "exported", {"params": {"kernel": np.eye(3)}})
      >>> kernel = flaxckpt.lazy(tmp_path / "exported")["params/kernel"]
      >>> kernel.shape, kernel.nbytes, kernel.read(np.s_[0])
      ((3, 3), 72, array([1., 0., 0.]))
    """
    return LazyCheckpoint(open_source(path, options), options)
