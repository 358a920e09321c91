"""Reading every byte of a checkpoint and checking every checksum, without a device."""

from __future__ import annotations

import dataclasses

from etils import epath

from flaxckpt.checkpoint import Checkpoint, open_checkpoint
from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.leaves.dtypes import storage_of
from flaxckpt.leaves.record import StoredArray
from flaxckpt.options import Options
from flaxckpt.reading import ArrayRead, read_arrays
from flaxckpt.sharding.chunks import whole
from flaxckpt.storage import tensorstore_io, zarr3


@dataclasses.dataclass(frozen=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
      path: the checkpoint.
      leaves: how many leaves it has.
      nbytes: the size of its arrays, in bytes.
      problems: what is wrong, one line for each damaged leaf; empty when all is well.
    """

    path: str
    leaves: int
    nbytes: int
    problems: tuple[str, ...]

    def __bool__(self) -> bool:
        """Whether all is well."""
        return not self.problems


def verify(
    path: epath.PathLike, *, strict: bool = False, options: Options = Options()
) -> VerifyReport:
    """Reads every byte of the checkpoint at `path` and checks every checksum.

    Args:
      path: the directory of one checkpoint.
      strict: whether to raise when something is wrong.
      options: how to read.

    Raises:
      CheckpointNotFoundError: when there is no checkpoint at `path`.
      CorruptCheckpointError: when its metadata are damaged, or with `strict` anything is.

    Example:
      >>> flaxckpt.save(tmp_path / "exported", {"step": 7})
      >>> bool(flaxckpt.verify(tmp_path / "exported"))
      True
    """
    checkpoint = open_checkpoint(path)
    arrays = [(r.name, r.array) for r in checkpoint.tree.records if r.array is not None]
    problems = [
        line for name, array in arrays if (line := _check(checkpoint, name, array, options))
    ]
    if strict and problems:
        raise CorruptCheckpointError("\n".join(problems))
    nbytes = sum(array.nbytes for _, array in arrays)
    return VerifyReport(str(checkpoint.path), len(checkpoint.tree.records), nbytes, tuple(problems))


def _check(checkpoint: Checkpoint, name: str, array: StoredArray, options: Options) -> str:
    """What is wrong with the array of the leaf `name`; `""` when all is well."""
    storage = storage_of(array.dtype)
    shape = zarr3.stored_shape(array.shape, storage)
    chunk = zarr3.stored_shape(array.chunks, storage)
    expected = zarr3.array_metadata(shape, chunk, storage.data_type)
    try:
        store = tensorstore_io.open_store(checkpoint.item)
        request = (zarr3.metadata_key(array.store), len(expected))
        (found,) = tensorstore_io.read_all(store, [request], options.buffer_bytes)
        if found != expected:
            return f"the leaf {name}: zarr.json does not fit the tree"
        read = ArrayRead(name, array, [whole(array.shape)])
        list(read_arrays(checkpoint.item, [read], options.buffer_bytes))
    except (CorruptCheckpointError, ValueError) as error:
        return str(error)
    return ""
