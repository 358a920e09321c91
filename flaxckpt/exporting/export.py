"""Writing the arrays of a tree or of a checkpoint into the safetensors format."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import orjson

from flaxckpt.exporting.files import Files, index_of, writing
from flaxckpt.exporting.tensors import Rename, Tensor, candidates_of, choose
from flaxckpt.exporting.values import Block, blocks
from flaxckpt.formats import row_major, safetensors_header
from flaxckpt.formats.safetensors import SUFFIX
from flaxckpt.formats.safetensors_header import CODES, Entry
from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.opening import open_source
from flaxckpt.options import Options
from flaxckpt.restoring.source import Source
from flaxckpt.storage.bucket import BucketPath
from flaxckpt.storage.location import Location, PathLike, locate


def export(
    tree_or_path: Any,
    path: PathLike,
    *,
    rename: Rename = None,
    dtype: Any = None,
    max_shard_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
    options: Options = Options(),
) -> None:
    """Writes the arrays of a tree, or of a checkpoint, to a safetensors file.

    The name of a tensor is its key path joined by dots: `params.Dense_0.kernel`. Python numbers
    become arrays of no axes; what holds no value (`None`, optax's empty states) leaves no trace.
    In a job of several processes, one of them exports the checkpoint that all have saved.

    Args:
      tree_or_path: any pytree of arrays, or the path or URL of a checkpoint, of flaxckpt or of any
        format that `restore` reads.
      path: the file, which ends in `.safetensors`; `s3://` and `gs://` URLs work, but there a file
        is one object, which has to fit in the host's memory: give `max_shard_bytes`.
      rename: what a tensor is called instead: a function of the name, or a mapping, which keeps
        the names that it does not have. `None` for a name leaves the tensor out.
      dtype: what arrays of floating-point numbers become, such as `"bfloat16"`; others stay.
      max_shard_bytes: the most bytes of tensors in one file, or one tensor. If they are more, there
        are files like `model-00001-of-00003.safetensors`, and `model.safetensors.index.json`
        instead of `model.safetensors`.
      metadata: strings by name, for the header. Some readers want `{"format": "pt"}`.
      overwrite: whether to replace what is there: a file at once; of several files, the old index
        goes first.
      options: how to read and write. Beside the tree, the host has about `max_host_bytes` bytes of
        it at a time (by default 96 MiB).

    Raises:
      UnsupportedLeafError: when the format cannot hold a leaf, or an array is spread over several
        processes; all such leaves are listed, and nothing was written.
      ValueError: when two leaves get the same name, `rename` names what is not there, or another
        argument is not as described.
      StepExistsError: when there is such a file and `overwrite` is not set.
      DirectoryError: when `path` is a directory, or its parent cannot be written.
      CheckpointNotFoundError: when there is no checkpoint at the path that was given.
      CorruptCheckpointError: when it is damaged.
      StoreError: when an object store cannot be used.

    Example:
      >>> import jax.numpy as jnp
      >>> from flaxckpt.exporting.export import export
      >>> params = {"Dense_0": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}}
      >>> export(params, tmp_path / "model.safetensors", dtype="bfloat16")
      >>> sorted(flaxckpt.restore(tmp_path / "model.safetensors"))
      ['Dense_0.bias', 'Dense_0.kernel']
    """
    final = _file(path, options)
    _check(max_shard_bytes, metadata)
    is_path = isinstance(tree_or_path, str | os.PathLike | BucketPath)
    source = open_source(tree_or_path, options) if is_path else None
    found = candidates_of(tree_or_path if source is None else source.leaves, is_tree=not is_path)
    tensors = choose(found, rename, _floating(dtype))
    shards = _shards(final, tensors, max_shard_bytes, metadata)
    names = [shard.name for shard in shards]
    if len(shards) > 1:
        names.append(index_of(final))
    _check_source(source, final)
    with writing(final, names, options, overwrite=overwrite) as files:
        with contextlib.nullcontext() if source is None else source.unchanged():
            for shard in shards:
                _write(files, shard, source, options)
        if len(shards) > 1:
            _write_index(files, names[-1], shards)


class _Shard(NamedTuple):
    """One file: its name, all that comes before the data, and the tensors in their order."""

    name: str
    header: bytes
    tensors: Sequence[tuple[Entry, Tensor]]

    @property
    def data_bytes(self) -> int:
        """The size of the data."""
        return self.tensors[-1][0].end if self.tensors else 0


def _file(path: PathLike, options: Options) -> Location:
    """The file to write."""
    final = locate(path, options)
    if not final.name.endswith(SUFFIX) or final.name == SUFFIX:
        raise ValueError(f"the path of an export ends in {SUFFIX}, got {final}. Add that.")
    return final


def _check(max_shard_bytes: int | None, metadata: Mapping[str, str] | None) -> None:
    """Refuses arguments that the format has no place for."""
    if max_shard_bytes is not None and max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes must be positive, got {max_shard_bytes}")
    if wrong := {k: v for k, v in (metadata or {}).items() if {type(k), type(v)} != {str}}:
        raise ValueError(f"the metadata of safetensors are strings by name, got {wrong}")


def _check_source(source: Source | None, final: Location) -> None:
    """Refuses to write objects into the place of those that are read meanwhile."""
    if source is not None and isinstance(final, BucketPath):
        places = (final, final.parent, final.parent / index_of(final))
        if str(source.path) in map(str, places):
            raise ValueError(f"{final} cannot be exported to its own place in a bucket.")


def _floating(dtype: Any) -> np.dtype | None:
    """The dtype that floats get, when one is given."""
    if dtype is None:
        return None
    found = np.dtype(dtype)
    if found.name not in CODES or not jax.dtypes.issubdtype(found, np.floating):
        names = [n for n in CODES if jax.dtypes.issubdtype(parse_dtype(n), np.floating)]
        raise ValueError(f"dtype must be one of {', '.join(names)}, got {found.name}")
    return found


def _shards(
    final: Location,
    tensors: Sequence[Tensor],
    limit: int | None,
    metadata: Mapping[str, str] | None,
) -> list[_Shard]:
    """The files to write: one, or several in the order of the tree."""
    groups: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if limit is not None and groups[-1] and size + tensor.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    stem, count = final.name.removesuffix(SUFFIX), len(groups)
    names = [f"{stem}-{i + 1:05}-of-{count:05}{SUFFIX}" for i in range(count)]
    return [
        _shard(name, group, metadata)
        for name, group in zip(names if count > 1 else [final.name], groups, strict=True)
    ]


def _shard(name: str, tensors: Sequence[Tensor], metadata: Mapping[str, str] | None) -> _Shard:
    """The file that holds `tensors`."""
    entries = [Entry(tensor.name, tensor.dtype.name, tensor.array.shape) for tensor in tensors]
    header, placed = safetensors_header.build(entries, metadata)
    if len(header) > safetensors_header.MAX_BYTES:
        raise ValueError(
            f"the header of {name} would have {len(header)} bytes, of which no reader takes more "
            f"than {safetensors_header.MAX_BYTES}. Pass a smaller max_shard_bytes."
        )
    by_name = {tensor.name: tensor for tensor in tensors}
    return _Shard(name, header, [(entry, by_name[entry.name]) for entry in placed])


def _write(files: Files, shard: _Shard, source: Source | None, options: Options) -> None:
    """Writes one file."""
    start = len(shard.header)
    places = {tensor.name: start + entry.start for entry, tensor in shard.tensors}
    with files.file(shard.name, start + shard.data_bytes) as write:
        write(0, memoryview(shard.header))
        for block in blocks(source, [tensor for _, tensor in shard.tensors], options):
            for offset, data in _runs(block):
                write(places[block.tensor.name] + offset, data)


def _runs(block: Block) -> list[tuple[int, memoryview]]:
    """The bytes of a block, and where they go within its tensor."""
    flat = np.ascontiguousarray(block.values).reshape(-1).view(np.uint8)
    itemsize, shape = block.tensor.dtype.itemsize, block.tensor.array.shape
    result, taken = [], 0
    for start, end in row_major.runs(block.region, shape, itemsize):
        result.append((start, flat[taken : taken + end - start].data))
        taken += end - start
    return result


def _write_index(files: Files, name: str, shards: Sequence[_Shard]) -> None:
    """Writes the index of several files."""
    data = {
        "metadata": {"total_size": sum(shard.data_bytes for shard in shards)},
        "weight_map": {e.name: shard.name for shard in shards for e, _ in shard.tensors},
    }
    text = orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS) + b"\n"
    with files.file(name, len(text)) as write:
        write(0, memoryview(text))
