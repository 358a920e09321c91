"""Checkpoints of T5X, before it used Orbax: a msgpack file, and zarr arrays beside it."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import msgpack
import numpy as np

from flaxckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from flaxckpt.formats import flax_msgpack
from flaxckpt.formats.zarr import ZarrArray, ZarrName, open_all
from flaxckpt.leaves.lazy_array import DerivedArray, LazyArray
from flaxckpt.sharding.chunks import Region
from flaxckpt.store.store import Location

NAME = "T5X"
LOOKS_FOR = "a directory checkpoint_{step} with a msgpack file 'checkpoint' of T5X"

_FILE = "checkpoint"
_KEYS = {"version", "optimizer"}
# 2 kept bfloat16 as uint16; the T5X of today reads 3 only.
_VERSIONS = (2, 3)
_UNFINISHED = re.compile(r".*\.tmp-\d+")
# A dict with these keys is TensorStore's spec of an array. The driver of the key-value store says
# where T5X ran (file, gfile, gcs); the path is always relative to the directory.
_SPEC = {"driver", "kvstore", "metadata"}


def detect(path: Location) -> bool:
    """Whether `path` is a finished directory with a dict of exactly T5X's keys, or its file."""
    directory = _directory(path)
    if _UNFINISHED.fullmatch(directory.name):
        return False
    count, first, rest = flax_msgpack.first_key(directory / _FILE) or (0, "", b"")
    return (count, first) == (2, "version") and msgpack.packb("optimizer") in rest


def read(path: Location) -> Any:
    """The state, under the names that a TrainState of flax has.

    Raises:
      CorruptCheckpointError: when it is damaged.
      UnsupportedFormatError: when its version is another one.
    """
    directory = _directory(path)
    found = flax_msgpack.decode((directory / _FILE).read(), str(directory / _FILE))
    if not isinstance(found, dict) or found.keys() != _KEYS:
        raise CorruptCheckpointError(
            f"{directory / _FILE} is not what T5X writes. Restore another step."
        )
    version = found["version"]
    if type(version) is not int or version not in _VERSIONS:
        raise UnsupportedFormatError(
            f"{directory} is a T5X checkpoint of version {version!r}; flaxckpt reads "
            f"{' and '.join(map(str, _VERSIONS))}. Save it again with T5X of today."
        )
    opener = functools.partial(_open_all, directory, version)
    return _train_state(flax_msgpack.with_arrays(found["optimizer"], _is_spec, opener), directory)


def _directory(path: Location) -> Location:
    """The directory of the step; T5X too takes the path of the file in it."""
    return path.parent if path.name == _FILE and path.is_file() else path


def _train_state(optimizer: Any, directory: Location) -> dict[str, Any]:
    """T5X's optimizer as a TrainState names it.

    `target` is `params`, `state.step` is `step`, `state.param_states` is `opt_state`. Everything
    else keeps its name: `flax_mutables`, and what else there is in `state`.
    """
    state = optimizer.get("state", {}) if isinstance(optimizer, dict) else None
    if not isinstance(state, dict):
        raise CorruptCheckpointError(
            f"{directory / _FILE} does not hold a state of T5X. Restore another step."
        )
    optimizer, state = dict(optimizer), dict(state)
    named = {"params": (optimizer, "target"), "step": (state, "step")}
    named["opt_state"] = (state, "param_states")
    result = {name: part.pop(key) for name, (part, key) in named.items() if key in part}
    optimizer.pop("state", None)
    return {**optimizer, **({"state": state} if state else {}), **result}


def _is_spec(value: Any) -> bool:
    """Whether `value` is TensorStore's spec of an array."""
    return isinstance(value, dict) and value.keys() >= _SPEC


def _open_all(
    directory: Location, version: int, specs: list[dict[str, Any]]
) -> Sequence[LazyArray]:
    """The arrays of `specs`."""
    arrays = open_all(directory, [_zarr_name(spec, directory) for spec in specs])
    return [_typed(*pair, version=version) for pair in zip(arrays, specs, strict=True)]


def _zarr_name(spec: dict[str, Any], directory: Location) -> ZarrName:
    """The directory of the array of `spec`, whose metadata stands for those of the array.

    They only do where the array has none: chunks and compression may differ.
    """
    kvstore = spec["kvstore"] if isinstance(spec["kvstore"], dict) else {}
    path = kvstore.get("path", spec.get("path"))  # TensorStore before 0.1.14 had it outside
    if str(spec["driver"]) != "zarr" or not isinstance(path, str) or not path.strip("/"):
        raise CorruptCheckpointError(
            f"{directory / _FILE} names an array that is not one of T5X's: driver "
            f"{spec['driver']!r}, path {path!r}. Restore another step."
        )
    return ZarrName(path.removesuffix("/"), spec)


def _typed(array: ZarrArray, spec: dict[str, Any], version: int) -> LazyArray:
    """`array` with the shape and the dtype that `spec` says."""
    metadata = spec["metadata"]
    shape = metadata.get("shape") if isinstance(metadata, dict) else None
    if isinstance(shape, list) and shape != list(array.shape):
        raise CorruptCheckpointError(
            f"the array {array.name!r} of {array.directory} has the shape {list(array.shape)}, but "
            f"was saved with {shape!r}. Restore another step."
        )
    is_bfloat16 = version < 3 or str(spec.get("dtype")) == "bfloat16"
    return _bfloat16(array) if array.dtype == "uint16" and is_bfloat16 else array


def _bfloat16(words: ZarrArray) -> LazyArray:
    """An array of bfloat16 whose bytes are stored as uint16."""

    def read(regions: Sequence[Region]) -> Sequence[np.ndarray]:
        return [part.view(ml_dtypes.bfloat16) for part in words.read(regions)]

    return DerivedArray("bfloat16", words.shape, words.chunks, read)
