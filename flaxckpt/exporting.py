"""Exports to safetensors."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import orjson

from flaxckpt.errors import DirectoryError, StepExistsError, UnsupportedLeafError
from flaxckpt.formats import reading, safetensors
from flaxckpt.formats import reading as foreign_files
from flaxckpt.formats.opening import open_source
from flaxckpt.formats.safetensors import CODES, INDEX_SUFFIX, METADATA, SUFFIX, Entry
from flaxckpt.leaves import kinds
from flaxckpt.leaves.dtypes import parse_dtype
from flaxckpt.leaves.spec import ARRAY_KINDS, SCALAR_KINDS, LazyArray, LeafSpec, StoredArray
from flaxckpt.options import Options
from flaxckpt.saving import snapshot
from flaxckpt.sharding.chunks import Region, Shape, chunk_region, chunks_of, region_of, whole
from flaxckpt.source.checkpoint import SavedLeaf, Source
from flaxckpt.source.chunk_reads import ArrayRead
from flaxckpt.source.reads import read_each
from flaxckpt.store import layout, local, store
from flaxckpt.store.bucket import BucketPath
from flaxckpt.store.store import Location, PathLike, locate
from flaxckpt.tree import nnx_objects
from flaxckpt.tree.keypaths import parse_name
from flaxckpt.tree.structure import flatten

# What is exported: the leaves that are wanted, their names, and whether safetensors holds them.


Rename = Callable[[str], str | None] | Mapping[str, str | None] | None
Array = jax.Array | np.ndarray | StoredArray | LazyArray


class Candidate(NamedTuple):
    """A leaf that may be exported.

    Attributes:
      leaf: its key path.
      load: gives its type and what is stored of it. An `UnsupportedLeafError` says why it cannot.
    """

    leaf: str
    load: Callable[[], tuple[LeafSpec, Any]]

    @property
    def name(self) -> str:
        """Its key path with dots."""
        return ".".join(map(str, parse_name(self.leaf)))


class Tensor(NamedTuple):
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
    array: Array

    @property
    def nbytes(self) -> int:
        """Its size in the file, in bytes."""
        return math.prod(self.array.shape) * self.dtype.itemsize


def candidates_of(tree_or_leaves: Any, *, is_tree: bool) -> list[Candidate]:
    """The leaves of a tree, or those of an opened checkpoint."""
    if is_tree:
        flat = flatten(nnx_objects.split(tree_or_leaves)[0])
        pairs = zip(flat.names, flat.leaves, strict=True)
        return [Candidate(n, functools.partial(kinds.encode, leaf, n)) for n, leaf in pairs]
    leaves: Sequence[SavedLeaf] = tree_or_leaves
    return [Candidate(leaf.name, functools.partial(_saved, leaf)) for leaf in leaves]


def _saved(leaf: SavedLeaf) -> tuple[LeafSpec, Any]:
    """The type of a saved leaf, and its array."""
    return leaf.spec, leaf.array


def choose(
    candidates: Sequence[Candidate], rename: Rename, floating: np.dtype | None
) -> list[Tensor]:
    """The tensors to write, in the order of the leaves.

    Args:
      candidates: all leaves.
      rename: as of `export`.
      floating: what floating-point arrays become.

    Raises:
      UnsupportedLeafError: when there are leaves that the format cannot hold; all are listed.
      ValueError: when two get the same name, or one a name that cannot be.
    """
    tensors, problems = [], []
    for name, candidate in _named(candidates, rename).items():
        try:
            tensors.append(_tensor(candidate, name, floating))
        except UnsupportedLeafError as error:
            why = str(error).removeprefix(f"the leaf {candidate.leaf}: ")
            problems.append(f"\n  {candidate.name}: {why}")
    if problems:
        raise UnsupportedLeafError(
            f"{len(problems)} of {len(candidates)} leaves cannot be written to safetensors:"
            f"{''.join(problems)}\nPass rename=, a function that returns None for the names of "
            "these, to leave them out."
        )
    return tensors


def _named(candidates: Sequence[Candidate], rename: Rename) -> dict[str, Candidate]:
    """The leaves that are wanted, by the names that they get."""
    names = [candidate.name for candidate in candidates]
    if isinstance(rename, Mapping) and (unknown := [n for n in rename if n not in set(names)]):
        raise ValueError(
            f"rename= has names that no leaf has: {unknown}. There are, among others, {names[:8]}."
        )
    found: dict[str, Candidate] = {}
    for candidate in candidates:
        name = _renamed(candidate.name, rename)
        if name is None:
            continue
        if name in found:
            raise ValueError(
                f"the leaves {found[name].leaf} and {candidate.leaf} would both be called "
                f"{name!r}. Give one of them another name by rename=."
            )
        found[name] = candidate
    return found


def _renamed(name: str, rename: Rename) -> str | None:
    """What the leaf `name` is called in the file; `None` to leave it out."""
    if rename is None:
        new: str | None = name
    else:
        new = rename.get(name, name) if isinstance(rename, Mapping) else rename(name)
    if new is None:
        return None
    if not isinstance(new, str) or new == METADATA or not _is_unicode(new):
        raise ValueError(
            f"the leaf {name} cannot be called {new!r} in a safetensors file. Let rename= return "
            f"another string, or None to leave it out."
        )
    return new


def _is_unicode(name: str) -> bool:
    """Whether a name has no half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _tensor(candidate: Candidate, name: str, floating: np.dtype | None) -> Tensor:
    """The tensor `name`.

    Raises:
      UnsupportedLeafError: when the format cannot hold it.
    """
    spec, array = candidate.load()
    if spec.kind not in ARRAY_KINDS | SCALAR_KINDS or not hasattr(array, "shape"):
        raise UnsupportedLeafError(f"{spec} is no array of numbers")
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        raise UnsupportedLeafError(
            "it is spread over several processes. Save a checkpoint, and export that in one of them"
        )
    dtype = _dtype_of(array)
    if floating is not None and jax.dtypes.issubdtype(dtype, np.floating):
        dtype = floating
    if dtype.name not in CODES:
        raise UnsupportedLeafError(f"the format has no dtype {dtype.name}")
    return Tensor(candidate.leaf, name, dtype, array)


def _dtype_of(array: Any) -> np.dtype:
    """The dtype of an array, in the byte order of the file."""
    dtype = parse_dtype(array.dtype) if isinstance(array.dtype, str) else np.dtype(array.dtype)
    return dtype.newbyteorder("<") if dtype.byteorder == ">" else dtype


# The values of what is exported, in blocks of which only a few are on the host at a time.


# Of the memory that there is, so many blocks are there: being read, waiting, and being written.
PARTS = 4


class Block(NamedTuple):
    """A part of a tensor, and its values."""

    tensor: Tensor
    region: Region
    values: np.ndarray


def blocks(source: Source | None, tensors: Sequence[Tensor], options: Options) -> Iterator[Block]:
    """All of `tensors`, in order, as they have to be written.

    Args:
      source: what their arrays are in; `None` when they are in memory.
      tensors: what is wanted.
      options: how much may be on the host.
    """
    limit = options.buffer_bytes // PARTS
    if source is not None:
        yield from _read(source, tensors, limit)
        return
    for tensor in tensors:
        shape, itemsize = tensor.array.shape, np.dtype(tensor.array.dtype).itemsize
        rows = reading.leading_rows(shape, itemsize, limit)
        for _, region in chunks_of(whole(shape), rows):
            values = _in_memory(tensor.array, region, limit)  # type: ignore[arg-type]
            yield Block(tensor, region, values.astype(tensor.dtype, copy=False))


def _read(source: Source, tensors: Sequence[Tensor], limit: int) -> Iterator[Block]:
    """As `blocks`, of a checkpoint."""
    wanted = [
        (tensor, region)
        for tensor in tensors
        for _, region in chunks_of(whole(tensor.array.shape), _block(tensor, limit))
    ]
    reads = [ArrayRead(t.leaf, t.array, [region], t.dtype) for t, region in wanted]  # type: ignore[arg-type]
    values = read_each(source, reads, (PARTS - 2) * limit)
    yield from (Block(*block, found) for block, found in zip(wanted, values, strict=True))


def _block(tensor: Tensor, limit: int) -> Shape:
    """The shape of the blocks of a saved array."""
    array: Any = tensor.array
    return reading.block_shape(array.shape, array.chunks, tensor.dtype.itemsize, limit)


def _in_memory(array: jax.Array | np.ndarray, region: Region, limit: int) -> np.ndarray:
    """A part of an array on the host."""
    if isinstance(array, np.ndarray):
        return array[region.slices]
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


# Writes bytes at an offset of a file.
Write = Callable[[int, memoryview], None]


class Files(Protocol):
    """Where exported files go."""

    def file(self, name: str, size: int) -> AbstractContextManager[Write]:
        """A file of `size` bytes, all of which are written in the block."""


def writing(
    final: Location, names: Sequence[str], options: Options, *, overwrite: bool
) -> AbstractContextManager[Files]:
    """Where to write files next to `final`; they are there when the block ends without an error.

    Args:
      final: the file that was asked for.
      names: of the files, in the order in which they shall appear.
      options: whether to wait for the disk.
      overwrite: whether what is there, of any number of files, is replaced.

    Raises:
      StepExistsError: when there is something and `overwrite` is not set.
      DirectoryError: when there is a directory, or the parent cannot be written.
    """
    if isinstance(final, Path):
        if final.is_dir():
            raise DirectoryError(f"{final} is a directory. Export to a file in it, or next to it.")
        store.prepare(final.parent, options)
        local.remove_abandoned(final.parent, final.name, claims=False)
    old = _existing(final)
    if old and not overwrite:
        raise _exists(final.parent / old[0])
    if isinstance(final, BucketPath):
        return _to_bucket(final, names, old)
    return _to_directory(final, names, old, options)


def index_of(final: Location) -> str:
    """The name of the index of the files that are there instead of `final`."""
    return final.name.removesuffix(SUFFIX) + INDEX_SUFFIX


def _existing(final: Location) -> list[str]:
    """The names of the files of an earlier export to `final`: the index first."""
    stem = final.name.removesuffix(SUFFIX)
    ours = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?{re.escape(SUFFIX)}")
    names = foreign_files.children(final.parent)
    return [n for n in names if n == index_of(final)] + [n for n in names if ours.fullmatch(n)]


def _exists(path: Location) -> StepExistsError:
    """The error for a file that is there."""
    return StepExistsError(f"there is {path} already. Pass overwrite=True to replace it.")


@contextlib.contextmanager
def _to_directory(
    final: Path, names: Sequence[str], old: Sequence[str], options: Options
) -> Iterator[Files]:
    """As `writing`, for the files `names` in the place of `old`."""
    temporary = final.with_name(layout.temporary_name(final.name, layout.new_attempt()))
    with contextlib.ExitStack() as stack:
        # As in `commit`: `remove_abandoned` sees it only once it is locked.
        with local.lock(final.parent, shared=True):
            temporary.mkdir()
            stack.callback(local.remove_tree, temporary)
            stack.enter_context(local.lock(temporary, shared=True))
        yield _Directory(temporary, options.fsync)
        _publish(temporary, final, names, old)
        if options.fsync:
            local.fsync_path(final.parent)


class _Directory:
    """Files in a directory."""

    def __init__(self, path: Path, fsync: bool):
        self._path, self._fsync = path, fsync

    @contextlib.contextmanager
    def file(self, name: str, size: int) -> Iterator[Write]:
        """A new file."""
        del size
        with open(self._path / name, "xb", buffering=0) as file:

            def write(offset: int, data: memoryview) -> None:
                while data:  # a system call writes at most 2 GiB, and may write less
                    count = os.pwrite(file.fileno(), data, offset)
                    data, offset = data[count:], offset + count

            yield write
            if self._fsync:
                os.fsync(file.fileno())


def _publish(temporary: Path, final: Path, names: Sequence[str], old: Sequence[str]) -> None:
    """Moves the files to their place, and removes what was there instead of them."""
    if len(names) > 1 and index_of(final) in old:
        # Files of two exports may have the same names: the old index must not name new ones.
        (final.parent / index_of(final)).unlink()
    with contextlib.ExitStack() as undo:
        for name in names:
            if name in old:
                os.replace(temporary / name, final.parent / name)
            else:
                _move(temporary / name, final.parent / name)
                undo.callback((final.parent / name).unlink)
        undo.pop_all()
    for name in set(old) - set(names):
        (final.parent / name).unlink(missing_ok=True)


def _move(source: Path, target: Path) -> None:
    """Renames a file to a name that nobody else may have taken meanwhile."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise _exists(target) from None
    except OSError:  # there are file systems without links
        os.rename(source, target)


@contextlib.contextmanager
def _to_bucket(final: BucketPath, names: Sequence[str], old: Sequence[str]) -> Iterator[Files]:
    """As `writing`, for the objects `names` in the place of `old`."""
    if len(names) > 1 and index_of(final) in old:
        (final.parent / index_of(final)).delete()
    with contextlib.ExitStack() as undo:
        yield _Objects(final.parent, old, undo)
        undo.pop_all()
    for name in set(old) - set(names):
        (final.parent / name).delete()


class _Objects:
    """Objects next to each other, which `undo` removes."""

    def __init__(self, parent: BucketPath, old: Sequence[str], undo: contextlib.ExitStack):
        self._parent, self._old, self._undo = parent, old, undo

    @contextlib.contextmanager
    def file(self, name: str, size: int) -> Iterator[Write]:
        """An object, which is in memory until all of it is there."""
        memory = io.BytesIO()
        memory.truncate(size)

        def write(offset: int, data: memoryview) -> None:
            memory.seek(offset)
            memory.write(data)

        yield write
        path = self._parent / name
        if name in self._old:
            path.write(memory.getvalue())
        elif not path.create(memory.getvalue()):
            raise _exists(path)
        self._undo.callback(path.delete)


# Writing the arrays of a tree or of a checkpoint into the safetensors format.


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
    header, placed = safetensors.build(entries, metadata)
    if len(header) > safetensors.MAX_BYTES:
        raise ValueError(
            f"the header of {name} would have {len(header)} bytes, of which no reader takes more "
            f"than {safetensors.MAX_BYTES}. Pass a smaller max_shard_bytes."
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
    for start, end in reading.runs(block.region, shape, itemsize):
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
