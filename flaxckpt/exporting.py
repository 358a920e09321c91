"""Exports to safetensors."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
import orjson

from flaxckpt.arguments import checked
from flaxckpt.errors import DirectoryError, UnsupportedLeafError
from flaxckpt.formats import reading, safetensors
from flaxckpt.formats.opening import open_source
from flaxckpt.formats.safetensors import CODES, INDEX_SUFFIX, METADATA, SUFFIX, TensorEntry
from flaxckpt.leaves import kinds
from flaxckpt.leaves.dtypes import dtype_name, parse_dtype
from flaxckpt.leaves.lazy_array import DerivedArray, LazyArray
from flaxckpt.leaves.spec import ARRAY_KINDS, SCALAR_KINDS
from flaxckpt.options import Options
from flaxckpt.saving import snapshot
from flaxckpt.sharding.chunks import Region, Shape, chunk_region, chunks_of, region_of, whole
from flaxckpt.source.checkpoint import Source
from flaxckpt.source.chunk_reads import ArrayRead, read_each
from flaxckpt.source.leaf import Leaf
from flaxckpt.store.locate import locate
from flaxckpt.store.store import Location, NewFiles, already_there
from flaxckpt.tree import nnx_objects
from flaxckpt.tree.keypaths import parse_name
from flaxckpt.tree.structure import flatten

if TYPE_CHECKING:
    from etils import epath

# What a tensor is called: a function of the dotted key path, or a mapping from it.
Renaming = Callable[[str], str | None] | Mapping[str, str | None] | None


@checked(options=Options)
def export(
    tree_or_path: Any,
    path: epath.PathLike,
    *,
    rename: Renaming = None,
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
      >>> from flaxckpt.exporting import export
      >>> params = {"Dense_0": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}}
      >>> export(params, tmp_path / "model.safetensors", dtype="bfloat16")
      >>> sorted(flaxckpt.restore(tmp_path / "model.safetensors"))
      ['Dense_0.bias', 'Dense_0.kernel']
    """
    final = _file(path, options)
    _check(max_shard_bytes, metadata)
    is_path = isinstance(tree_or_path, str | os.PathLike)
    source = open_source(tree_or_path, options) if is_path else None
    limit = options.buffer_bytes // PARTS
    leaves = leaves_of(tree_or_path, limit) if source is None else source.leaves
    tensors = choose(leaves, rename, _floating(dtype))
    shards = _shards(final, tensors, max_shard_bytes, metadata)
    names = [shard.name for shard in shards]
    if len(shards) > 1:
        names.append(index_of(final))
    _check_source(source, final)
    with writing(final, names, overwrite=overwrite) as files:
        with contextlib.nullcontext() if source is None else source.unchanged():
            for shard in shards:
                _write(files, shard, limit)
        if len(shards) > 1:
            _write_index(files, names[-1], shards)


class _Shard(NamedTuple):
    """One file: its name, all that comes before the data, and the tensors in their order."""

    name: str
    header: bytes
    tensors: Sequence[tuple[TensorEntry, ExportedTensor]]

    @property
    def data_bytes(self) -> int:
        """The size of the data."""
        return self.tensors[-1][0].end if self.tensors else 0


def _file(path: epath.PathLike, options: Options) -> Location:
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
    if source is not None and not final.store.can.directories:
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
    tensors: Sequence[ExportedTensor],
    limit: int | None,
    metadata: Mapping[str, str] | None,
) -> list[_Shard]:
    """The files to write: one, or several in the order of the tree."""
    groups: list[list[ExportedTensor]] = [[]]
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


def _shard(
    name: str, tensors: Sequence[ExportedTensor], metadata: Mapping[str, str] | None
) -> _Shard:
    """The file that holds `tensors`."""
    entries = [
        TensorEntry(tensor.name, tensor.dtype.name, tensor.array.shape) for tensor in tensors
    ]
    header, placed = safetensors.build(entries, metadata)
    if len(header) > safetensors.MAX_BYTES:
        raise ValueError(
            f"the header of {name} would have {len(header)} bytes, of which no reader takes more "
            f"than {safetensors.MAX_BYTES}. Pass a smaller max_shard_bytes."
        )
    by_name = {tensor.name: tensor for tensor in tensors}
    return _Shard(name, header, [(entry, by_name[entry.name]) for entry in placed])


def _write(files: NewFiles, shard: _Shard, limit: int) -> None:
    """Writes one file."""
    start = len(shard.header)
    places = {tensor.name: start + entry.start for entry, tensor in shard.tensors}
    with files.file(shard.name, start + shard.data_bytes) as write:
        write(0, memoryview(shard.header))
        for block in blocks([tensor for _, tensor in shard.tensors], limit):
            for offset, data in _runs(block):
                write(places[block.tensor.name] + offset, data)


def _runs(block: TensorBlock) -> list[tuple[int, memoryview]]:
    """The bytes of a block, and where they go within its tensor."""
    flat = np.ascontiguousarray(block.values).reshape(-1).view(np.uint8)
    itemsize, shape = block.tensor.dtype.itemsize, block.tensor.array.shape
    result, taken = [], 0
    for start, end in reading.runs(block.region, shape, itemsize):
        result.append((start, flat[taken : taken + end - start].data))
        taken += end - start
    return result


def _write_index(files: NewFiles, name: str, shards: Sequence[_Shard]) -> None:
    """Writes the index of several files."""
    data = {
        "metadata": {"total_size": sum(shard.data_bytes for shard in shards)},
        "weight_map": {e.name: shard.name for shard in shards for e, _ in shard.tensors},
    }
    text = orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS) + b"\n"
    with files.file(name, len(text)) as write:
        write(0, memoryview(text))


# What is exported: the leaves that are wanted, their names, and whether safetensors holds them.


class ExportedTensor(NamedTuple):
    """A leaf that is exported.

    Attributes:
      leaf: its key path.
      name: what it is called in the file.
      dtype: that of the file.
      array: its values.
    """

    leaf: str
    name: str
    dtype: np.dtype
    array: LazyArray

    @property
    def nbytes(self) -> int:
        """Its size in the file, in bytes."""
        return math.prod(self.array.shape) * self.dtype.itemsize


def leaves_of(tree: Any, limit: int) -> list[Leaf]:
    """The leaves of a tree in memory, of which `limit` bytes are copied from a device at a time."""
    flat = flatten(nnx_objects.split(tree)[0])
    return [
        Leaf.computed(name, functools.partial(_leaf_in_memory, value, name, limit))
        for name, value in zip(flat.names, flat.leaves, strict=True)
    ]


def _leaf_in_memory(value: Any, name: str, limit: int) -> Leaf:
    """The leaf `name` of a tree.

    Raises:
      UnsupportedLeafError: when no checkpoint can hold it, or it is not all in this process.
    """
    spec, stored = kinds.encode(value, name)
    if not isinstance(stored, jax.Array | np.ndarray):
        return Leaf(name, spec, value=stored)
    if isinstance(stored, jax.Array) and not stored.is_fully_addressable:
        raise UnsupportedLeafError(
            "it is spread over several processes. Save a checkpoint, and export that in one of them"
        )

    def read(regions: Sequence[Region]) -> Sequence[np.ndarray]:
        if isinstance(stored, np.ndarray):
            return [stored[region.slices] for region in regions]
        return [_on_host(stored, region, limit) for region in regions]

    dtype, chunks = dtype_name(np.dtype(stored.dtype)), (1,) * stored.ndim
    assert dtype is not None, "its handler has looked"
    return Leaf(name, spec, DerivedArray(dtype, stored.shape, chunks, read))


def choose(
    leaves: Sequence[Leaf], rename: Renaming, floating: np.dtype | None
) -> list[ExportedTensor]:
    """The tensors to write, in the order of the leaves.

    Args:
      leaves: all leaves.
      rename: as of `export`.
      floating: what floating-point arrays become.

    Raises:
      UnsupportedLeafError: when there are leaves that the format cannot hold; all are listed.
      ValueError: when two get the same name, or one a name that cannot be.
    """
    tensors, problems = [], []
    for name, leaf in _named(leaves, rename).items():
        try:
            tensors.append(_tensor(leaf, name, floating))
        except UnsupportedLeafError as error:
            why = str(error).removeprefix(f"the leaf {leaf.name}: ")
            problems.append(f"\n  {_dotted(leaf)}: {why}")
    if problems:
        raise UnsupportedLeafError(
            f"{len(problems)} of {len(leaves)} leaves cannot be written to safetensors:"
            f"{''.join(problems)}\nPass rename=, a function that returns None for the names of "
            "these, to leave them out."
        )
    return tensors


def _named(leaves: Sequence[Leaf], rename: Renaming) -> dict[str, Leaf]:
    """The leaves that are wanted, by the names that they get."""
    names = list(map(_dotted, leaves))
    if isinstance(rename, Mapping) and (unknown := [n for n in rename if n not in set(names)]):
        raise ValueError(
            f"rename= has names that no leaf has: {unknown}. There are, among others, {names[:8]}."
        )
    found: dict[str, Leaf] = {}
    for leaf in leaves:
        name = _renamed(_dotted(leaf), rename)
        if name is None:
            continue
        if name in found:
            raise ValueError(
                f"the leaves {found[name].name} and {leaf.name} would both be called "
                f"{name!r}. Give one of them another name by rename=."
            )
        found[name] = leaf
    return found


def _dotted(leaf: Leaf) -> str:
    return ".".join(map(str, parse_name(leaf.name)))


def _renamed(name: str, rename: Renaming) -> str | None:
    """What the leaf `name` is called in the file; `None` to leave it out."""
    if rename is None:
        new: str | None = name
    else:
        new = rename.get(name, name) if isinstance(rename, Mapping) else rename(name)
    if new is None:
        return None
    if not isinstance(new, str) or new == METADATA or not safetensors.is_unicode(new):
        raise ValueError(
            f"the leaf {name} cannot be called {new!r} in a safetensors file. Let rename= return "
            f"another string, or None to leave it out."
        )
    return new


def _tensor(leaf: Leaf, name: str, floating: np.dtype | None) -> ExportedTensor:
    """The tensor `name`.

    Raises:
      UnsupportedLeafError: when the format cannot hold it.
    """
    if leaf.spec.kind not in ARRAY_KINDS | SCALAR_KINDS or leaf.array is None:
        raise UnsupportedLeafError(f"{leaf.spec} is not an array of numbers")
    dtype = parse_dtype(leaf.array.dtype)
    dtype = dtype.newbyteorder("<") if dtype.byteorder == ">" else dtype
    if floating is not None and jax.dtypes.issubdtype(dtype, np.floating):
        dtype = floating
    if dtype.name not in CODES:
        raise UnsupportedLeafError(f"the format has no dtype {dtype.name}")
    return ExportedTensor(leaf.name, name, dtype, leaf.array)


# The values of what is exported, in blocks of which only a few are on the host at a time.


# Of the memory that there is, so many blocks are there: being read, waiting, and being written.
PARTS = 4


class TensorBlock(NamedTuple):
    """A part of a tensor, and its values."""

    tensor: ExportedTensor
    region: Region
    values: np.ndarray


def blocks(tensors: Sequence[ExportedTensor], limit: int) -> Iterator[TensorBlock]:
    """All of `tensors`, in order, as they have to be written, in blocks of `limit` bytes."""
    wanted = [
        (tensor, region)
        for tensor in tensors
        for _, region in chunks_of(whole(tensor.array.shape), _block_shape(tensor, limit))
    ]
    reads = [ArrayRead(t.leaf, t.array, [region], t.dtype) for t, region in wanted]
    values = read_each(reads, (PARTS - 2) * limit)
    yield from (TensorBlock(*block, found) for block, found in zip(wanted, values, strict=True))


def _block_shape(tensor: ExportedTensor, limit: int) -> Shape:
    array = tensor.array
    itemsize = max(tensor.dtype.itemsize, parse_dtype(array.dtype).itemsize)
    return reading.block_shape(array.shape, array.chunks, itemsize, limit)


def _on_host(array: jax.Array, region: Region, limit: int) -> np.ndarray:
    """A part of an array on the host."""
    shard: Shape = array.sharding.shard_shape(array.shape)
    if shard == array.shape:
        with jax.transfer_guard("allow"):
            return _part(array.addressable_data(0), region.slices[:-1], limit)
    positions = {
        region_of(found.index, array.shape).start: i
        for i, found in enumerate(array.addressable_shards)
    }
    memory = np.empty(region.shape, array.dtype)
    with jax.transfer_guard("allow"):  # which is against transfers that nobody asked for
        for grid, part in chunks_of(region, shard):
            outer = chunk_region(grid, shard)
            # Of a new array each time: jax keeps the host's copy with the array it was asked for.
            data = array.addressable_data(positions[outer.start])
            memory[part.within(region)] = _part(data, part.within(outer)[: array.ndim], limit)
    return memory


def _part(data: jax.Array, index: tuple[slice, ...], limit: int) -> np.ndarray:
    """A part of what is on one device."""
    is_remote = any(device.platform != "cpu" for device in data.devices())
    if is_remote and data.nbytes > limit:
        return snapshot.part_of_device(data, index)
    return np.asarray(data)[index]


# How exported files become visible: all of them, or none.
#
# On a disk they are written into a temporary directory next to their place, which the next export
# removes should this one be killed, and renamed when all of them are durable, the index last. A
# bucket has no renames: the objects are written in that order, each at once.


def writing(
    final: Location, names: Sequence[str], *, overwrite: bool
) -> AbstractContextManager[NewFiles]:
    """Where to write files next to `final`; they are there when the block ends without an error.

    Args:
      final: the file that was asked for.
      names: of the files, in the order in which they shall appear.
      overwrite: whether what is there, of any number of files, is replaced.

    Raises:
      StepExistsError: when there is something and `overwrite` is not set.
      DirectoryError: when there is a directory, or the parent cannot be written.
    """
    if final.store.can.directories:
        if (found := final.store.stat(final)) is not None and found.is_directory:
            raise DirectoryError(f"{final} is a directory. Export to a file in it, or next to it.")
        final.store.prepare(final.parent)
        final.store.take_over(final.parent, final.name)
    old = _existing(final)
    if old and not overwrite:
        raise already_there(final.parent / old[0])
    return final.store.new_files(final, names, old, index_of(final))


def index_of(final: Location) -> str:
    """The name of the index of the files that are there instead of `final`."""
    return final.name.removesuffix(SUFFIX) + INDEX_SUFFIX


def _existing(final: Location) -> list[str]:
    """The names of the files of an earlier export to `final`: the index first."""
    stem = final.name.removesuffix(SUFFIX)
    ours = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?{re.escape(SUFFIX)}")
    names = final.parent.children()
    return [n for n in names if n == index_of(final)] + [n for n in names if ours.fullmatch(n)]
