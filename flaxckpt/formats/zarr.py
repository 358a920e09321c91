"""zarr 2 and 3 arrays of other libraries."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from flaxckpt.errors import CorruptCheckpointError, FlaxckptError
from flaxckpt.formats.reading import MAX_TREE_DEPTH
from flaxckpt.leaves.dtypes import dtype_name, parse_dtype
from flaxckpt.leaves.lazy_array import nbytes_of
from flaxckpt.metadata.sealed_json import MAX_AXES, MAX_ELEMENTS
from flaxckpt.sharding.chunks import Region, Shape
from flaxckpt.source.leaf import Leaf, array_leaf
from flaxckpt.store.store import Location

# Arrays that other libraries keep as zarr v2 or v3, in a directory or in an OCDBT database.


# The nodes of the B-tree of a database hold many small values; each is decoded once.
_CACHE = {"cache_pool#ocdbt": {"total_bytes_limit": 256 << 20}}
# No array has more, or TensorStore could not handle it.
_MAX_CHUNKS = 1 << 20
# zstd makes one value repeated smaller by up to 2 ** 15, and no codec more. Of what is smaller
# than the second number the claims are believed: chunks of zeros need no file at all.
_MAX_RATIO, _SMALL = 1 << 16, 1 << 28
# What the operating system refuses is no damage.
_REFUSED = {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO}


class ZarrName(NamedTuple):
    """Which array to open.

    Attributes:
      name: its directory, relative to that of the checkpoint, or its prefix in the database.
      assume: members of TensorStore's spec (`dtype`, `metadata`) that stand for its metadata file
        if there is none; by default it must have one.
    """

    name: str
    assume: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class ZarrArray:
    """A zarr array that was opened, and of which nothing was read; a `LazyArray`.

    Attributes:
      directory: where it lies, or its database.
      name: what it is called there.
      store: the array, to TensorStore.
      sharding: how it was sharded when it was saved, where that is known.
    """

    directory: Location
    name: str
    store: ts.TensorStore
    sharding: Any = None

    @property
    def dtype(self) -> str:
        """The name of its dtype."""
        name = dtype_name(self.store.dtype.numpy_dtype)
        assert name is not None, "that was looked at as it was opened"
        return name

    @property
    def shape(self) -> Shape:
        """Its shape."""
        return tuple(self.store.shape)

    @property
    def chunks(self) -> Shape:
        """The shape of the smallest part that can be read alone."""
        return _read_chunk(self.store)

    def read(self, regions: Sequence[Region]) -> Sequence[np.ndarray]:
        """The elements of each of `regions`; only the chunks that they touch are read.

        Raises:
          CorruptCheckpointError: when a chunk is missing or damaged.
        """
        with explained(self.directory, self.name):
            reading = [self.store[region.slices].read() for region in regions]
            timeout = self.directory.store.timeout_secs
            found = [np.asarray(future.result(timeout=timeout)) for future in reading]
        return [part.astype(parse_dtype(self.dtype), copy=False) for part in found]


def open_zarr(directory: Location, wanted: str | ZarrName, **settings: bool) -> ZarrArray:
    """One array in `directory`; see `open_all`."""
    return open_all(directory, [wanted], **settings)[0]


def open_all(
    directory: Location,
    wanted: Sequence[str | ZarrName],
    *,
    ocdbt: bool = False,
    zarr3: bool = False,
    missing_as_zero: bool = False,
) -> list[ZarrArray]:
    """The arrays `wanted` in `directory`, all opened at once.

    Args:
      directory: where they or their database lie.
      wanted: their names.
      ocdbt: whether they are in an OCDBT database in `directory`.
      zarr3: whether they are zarr v3, not v2.
      missing_as_zero: whether a chunk that is not there is zeros; by default it is damage.

    Raises:
      CorruptCheckpointError: when one is missing or damaged, or would lie outside of `directory`.
    """
    names = [w if isinstance(w, ZarrName) else ZarrName(w) for w in wanted]
    if not ocdbt:
        for name in names:
            check_inside(directory, name.name)
    with explained(directory, "its database"):
        opener = _Opener(directory, ocdbt=ocdbt, zarr3=zarr3, missing_as_zero=missing_as_zero)
    opening = [opener.start(name) for name in names]
    arrays = [opener.finish(*pair) for pair in zip(names, opening, strict=True)]
    _check_claims(directory, sum(nbytes_of(array) for array in arrays))
    return arrays


class _Opener:
    """Opens the arrays of one directory."""

    def __init__(
        self, directory: Location, *, ocdbt: bool, zarr3: bool, missing_as_zero: bool
    ) -> None:
        """Opens the database, if there is one."""
        self._directory = directory
        self._context = ts.Context(_CACHE, directory.store.context(None))
        self._base = directory.store.kvstore(directory, self._context)
        if ocdbt:
            self._base = _open_database(directory, self._base, self._context)
        self._spec = {
            "driver": "zarr3" if zarr3 else "zarr",
            "fill_missing_data_reads": missing_as_zero,
        }

    def start(self, wanted: ZarrName, assumed: Mapping[str, Any] | None = None) -> Any:
        """Begins to open an array, whose metadata are not read when they are `assumed`."""
        base = self._base / f"{wanted.name}/" if wanted.name else self._base
        with explained(self._directory, wanted.name):
            spec = {**self._spec, **(assumed or {})}
            # As a member of the spec `assume_metadata` would be undone by `open`.
            mode: dict[str, Any] = {
                "open": True,
                "read": True,
                "assume_metadata": assumed is not None,
            }
            return ts.open(spec, kvstore=base, context=self._context, **mode)

    def finish(self, wanted: ZarrName, opening: Any) -> ZarrArray:
        """The array, whose metadata is assumed when there is none but `wanted` has some."""
        with explained(self._directory, wanted.name):
            try:
                store = self._result(opening)
            except ValueError as error:
                if wanted.assume is None or not str(error).startswith("NOT_FOUND"):
                    raise
                store = self._result(self.start(wanted, _assumed(wanted.assume)))
            _check(store)
        return ZarrArray(self._directory, wanted.name, store)

    def _result(self, opening: Any) -> ts.TensorStore:
        """What `opening` gives, within the time that a bucket has."""
        return opening.result(timeout=self._directory.store.timeout_secs)


def _open_database(directory: Location, base: ts.KvStore, context: ts.Context) -> ts.KvStore:
    """The OCDBT database that lies in `base`."""
    spec = {"driver": "ocdbt", "base": base.spec().to_json(), "cache_pool": "cache_pool#ocdbt"}
    return ts.KvStore.open(spec, context=context).result(timeout=directory.store.timeout_secs)


def _assumed(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """The members of `metadata` that describe an array; nothing else in it has a say."""
    return {key: metadata[key] for key in ("dtype", "metadata") if key in metadata}


def _read_chunk(store: ts.TensorStore) -> Shape:
    """The shape of the smallest part of an array that can be read alone."""
    found = store.chunk_layout.read_chunk.shape or store.shape
    return tuple(c or n for c, n in zip(found, store.shape, strict=True))


def _check(store: ts.TensorStore) -> None:
    """Checks what an array says about itself before anything is allocated for it."""
    shape = store.shape
    if len(shape) > MAX_AXES or math.prod(shape) > MAX_ELEMENTS:
        raise ValueError(f"its shape {tuple(shape)} is too large")
    if dtype_name(store.dtype.numpy_dtype) is None:
        raise ValueError(f"its dtype {store.dtype.name} is not one of jax or numpy")
    pairs = zip(shape, _read_chunk(store), strict=True)
    if (count := math.prod(-(-n // max(1, c)) for n, c in pairs)) > _MAX_CHUNKS:
        raise ValueError(f"it is said to have {count} chunks")


def _check_claims(directory: Location, claimed: int) -> None:
    """Checks that the files in `directory` can hold arrays of `claimed` bytes, compressed.

    That ends at the first files, unless they are wrong. A bucket does not tell sizes at once.

    Raises:
      CorruptCheckpointError: when they cannot.
    """
    if not directory.store.can.sizes:
        return
    on_disk = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            on_disk += os.lstat(os.path.join(parent, name)).st_size
            if claimed <= on_disk * _MAX_RATIO + _SMALL:
                return
    if claimed > _SMALL:
        raise CorruptCheckpointError(
            f"the arrays at {directory} are said to have {claimed} bytes, but its files have "
            f"{on_disk}. Restore another step."
        )


def check_inside(directory: Location, name: str) -> None:
    """Checks that `name`, which comes from a file, is that of something below `directory`.

    Raises:
      CorruptCheckpointError: when it is absolute, or goes up.
    """
    parts = name.split("/")
    if name.startswith("/") or "\0" in name or {".", ".."} & set(parts):
        raise CorruptCheckpointError(
            f"the checkpoint at {directory} names {name!r}, which is not inside of it. "
            "It is damaged, or was made to read other files. Restore another one."
        )


@contextlib.contextmanager
def explained(directory: Location, name: str) -> Iterator[None]:
    """Turns what TensorStore says about damage of the array `name` into the error for it.

    Raises:
      CorruptCheckpointError: when it is damaged.
      StoreError: when the bucket cannot be reached.
      OSError: when the operating system does not let it be read.
    """
    try:
        with directory.store.reached():
            yield
    except FlaxckptError:
        raise
    except (ValueError, TypeError, IndexError, NotImplementedError, OverflowError) as error:
        text = _one_line(str(error))
        if (found := re.search(r"os_error_code='(\d+)'", str(error))) and int(found[1]) in _REFUSED:
            raise OSError(int(found[1]), text) from None
        what = f"the array {name!r} of" if name else "the array"
        raise CorruptCheckpointError(
            f"{what} {directory} cannot be read: {text}. Restore another step."
        ) from None


def _one_line(message: str) -> str:
    """What TensorStore says, without where in its source it says so."""
    return " ".join(re.sub(r"\s*\[[a-z_ ]+='.*", "", message, flags=re.DOTALL).split())


# Trees that are one zarr directory for each leaf, in directories of directories.


METADATA = ".zarray"


def array_names(path: Location) -> list[str]:
    """The names of all zarr v2 directories below `path`, relative to it, sorted."""
    if path.store.can.latency:  # where one listing is faster than a walk
        ending, names = f"/{METADATA}", path.store.names(path)
        return sorted(name.removesuffix(ending) for name in names if name.endswith(ending))
    found = []
    for directory, below, names in os.walk(path):
        if METADATA in names:
            below.clear()  # an array has chunks, and nothing else
            found.append(Path(directory).relative_to(path).as_posix())
    return sorted(name for name in found if name != ".")


def read_arrays(path: Location, names: Sequence[str]) -> dict[str, Leaf]:
    """The arrays `names` below `path`; which of them were numpy's is not known.

    Raises:
      CorruptCheckpointError: when one is damaged.
    """
    # Chunks that are all zeros are left out by zarr's own default.
    arrays = open_all(path, names, missing_as_zero=True)
    return {array.name: array_leaf(array) for array in arrays}


def nested(leaves: Mapping[str, Any], separator: str, path: Location) -> dict[str, Any]:
    """The tree of dicts whose leaves have the names of `leaves`.

    Raises:
      CorruptCheckpointError: when a leaf lies within another, or too deep; `path` is named.
    """
    root: dict[str, Any] = {}
    for name, leaf in sorted(leaves.items()):
        *parents, last = name.split(separator)
        node = _descend(root, parents) if len(parents) < MAX_TREE_DEPTH else None
        if node is None or last in node:
            raise CorruptCheckpointError(
                f"{path} holds no tree: the leaf {name!r} is within another one, or too deep. "
                "Restore another step."
            )
        node[last] = leaf
    return root


def _descend(node: dict[str, Any], keys: Iterable[str]) -> dict[str, Any] | None:
    """The dict at `keys` of `node`, made where it is missing; `None` where there is a leaf."""
    for key in keys:
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            return None
        node = child
    return node
