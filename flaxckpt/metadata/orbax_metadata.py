"""The files that make a checkpoint one of Orbax's too. flaxckpt itself never reads them.

The members are those of orbax-checkpoint 0.12. Leaves that Orbax has no type for (bytes, uint4,
complex Python numbers, ...) are left out, so that it reads the rest.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import orjson

from flaxckpt.leaves.dtypes import storage_of
from flaxckpt.leaves.spec import SCALAR_KINDS, LeafRecord
from flaxckpt.tree.keypaths import KeyPath
from flaxckpt.tree.node import Node

_SEQUENCE, _DICT = 1, 2
_EMPTIES = {"dict": "Dict", "list": "List", "tuple": "Tuple"}


def param_name(path: KeyPath) -> str:
    """Orbax's name of a leaf. It is not unique: `{'a.b': x, 'a': {'b': y}}` has one name twice."""
    return ".".join(str(key.value) for key in path)


def store_names(paths: Sequence[KeyPath]) -> list[str]:
    """A unique name in the key-value store for each leaf: Orbax's own, where it is unique.

    Example:
      >>> from flaxckpt.tree.keypaths import Key
      >>> a, b, ab = (Key("dict", key) for key in ("a", "b", "a.b"))
      >>> store_names([(ab,), (a, b)])
      ['a.b', 'a.b%2']
    """
    taken = set(map(param_name, paths))
    used: set[str] = set()
    names = []
    for path in paths:
        name = candidate = param_name(path)
        count = 1
        while candidate in used or (count > 1 and candidate in taken):
            count += 1
            candidate = f"{name}%{count}"
        used.add(candidate)
        names.append(candidate)
    return names


def visible(path: KeyPath, record: LeafRecord, strings: Mapping[str, Any]) -> bool:
    """Whether Orbax can hold a leaf; `strings` are those of `_strings.json`."""
    if record.array is None:
        return record.spec.kind == "str" and _lookup(strings, param_name(path)) == record.value
    array, kind = record.array, record.spec.kind
    native = storage_of(array.dtype).data_type != "uint8" or array.dtype == "uint8"
    # TensorStore drops a slash at the end of a path, and would look somewhere else.
    found = array.store == param_name(path) and not array.store.endswith("/")
    return native and found and kind in _VALUE_TYPES


_VALUE_TYPES = {"jax": "jax.Array", "prng_key": "jax.Array", "numpy": "np.ndarray"}
_VALUE_TYPES |= dict.fromkeys(SCALAR_KINDS - {"complex"}, "scalar") | {"numpy_scalar": "scalar"}


def tree_metadata(
    paths: Iterable[KeyPath],
    records: Iterable[LeafRecord],
    empties: Iterable[tuple[str, KeyPath, Node]],
    strings: Mapping[str, Any],
) -> dict[str, Any]:
    """The members of `_METADATA` that Orbax reads."""
    entries: dict[str, Any] = {}
    for path, record in zip(paths, records, strict=True):
        if visible(path, record, strings):
            entries[_entry_name(path)] = _entry(path, _value_metadata(record))
    for _, path, node in empties:
        value_type = _EMPTIES.get(node.kind, "None")
        entries[_entry_name(path)] = _entry(
            path, {"value_type": value_type, "skip_deserialize": True}
        )
    return {
        "tree_metadata": entries,
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def _entry_name(path: KeyPath) -> str:
    """The name of an entry: informational, but unique."""
    return str(tuple(str(key.value) for key in path))


def _entry(path: KeyPath, value: dict[str, Any]) -> dict[str, Any]:
    """One entry of the tree metadata."""
    keys = [
        {"key": str(key.value), "key_type": _SEQUENCE if key.kind == "seq" else _DICT}
        for key in path
    ]
    return {"key_metadata": keys, "value_metadata": value}


def _value_metadata(record: LeafRecord) -> dict[str, Any]:
    """What Orbax wants to know of a leaf."""
    if record.array is None:
        return {"value_type": "string", "skip_deserialize": False}
    value_type = _VALUE_TYPES[record.spec.kind]
    data: dict[str, Any] = {"value_type": value_type, "skip_deserialize": False}
    return data | {"write_shape": record.array.chunks} if value_type == "jax.Array" else data


def strings_file(paths: Iterable[KeyPath], records: Iterable[LeafRecord]) -> dict[str, Any]:
    """`_strings.json`: the string leaves, nested where Orbax's JSON pointer would look for them."""
    strings: dict[str, Any] = {}
    for path, record in zip(paths, records, strict=True):
        name = param_name(path)
        if record.spec.kind == "str" and isinstance(record.value, str) and "~" not in name:
            _put(strings, name.split("/"), record.value)
    return strings


def _put(strings: dict[str, Any], keys: list[str], value: str) -> None:
    """Sets the member at `keys`, unless another leaf is in the way."""
    *parents, last = keys
    inner: Any = strings
    for key in parents:
        inner = inner.setdefault(key, {})
        if not isinstance(inner, dict):
            return
    inner.setdefault(last, value)


def _lookup(strings: Mapping[str, Any], name: str) -> Any:
    """The member that `_put` set for `name`, or `None`."""
    found: Any = strings
    for key in name.split("/"):
        found = found.get(key) if isinstance(found, dict) else None
    return found


def sharding_file(shardings: Mapping[str, jax.sharding.Sharding]) -> dict[str, str]:
    """`_sharding`, from names in the key-value store: JSON within JSON, as Orbax has it.

    Without it Orbax cannot restore a jax.Array unless it is told the sharding.
    """
    return {
        base64.urlsafe_b64encode(store.encode()).decode(): orjson.dumps(_sharding(s)).decode()
        for store, s in shardings.items()
    }


def _sharding(sharding: jax.sharding.Sharding) -> dict[str, Any]:
    """A sharding as Orbax writes it; kinds that Orbax does not know as the first device."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        devices: Any = sharding.device_set
        device = min(devices, key=lambda d: d.id)
        # jax before 0.10 called the first CPU TFRT_CPU_0; later Orbax knows both names.
        name = f"TFRT_CPU_{device.id}" if device.platform == "cpu" else str(device)
        return {"sharding_type": "SingleDeviceSharding", "device_str": name}
    mesh: Any = sharding.mesh
    ids = [{"id": device.id} for device in mesh.devices.flat]
    return {
        "sharding_type": "NamedSharding",
        "shape": list(mesh.devices.shape),
        "axis_names": list(mesh.axis_names),
        "axis_types": [f"AxisType.{axis.name}" for axis in mesh.axis_types],
        "partition_spec": [list(p) if isinstance(p, tuple) else p for p in sharding.spec],
        "device_mesh": {"mesh": _nested(ids, mesh.devices.shape)},
    }


def _nested(items: list[Any], shape: tuple[int, ...]) -> Any:
    """`items` as lists in lists of `shape`."""
    if len(shape) <= 1:
        return items
    size = len(items) // shape[0]
    return [_nested(items[i * size : (i + 1) * size], shape[1:]) for i in range(shape[0])]


def array_metadatas_file(records: Iterable[LeafRecord]) -> dict[str, Any]:
    """`array_metadatas/process_0`: where Orbax looks for the implementation of PRNG keys."""
    entries = [
        {
            "array_metadata": {
                "param_name": record.array.store,
                "write_shape": record.array.chunks,
                "chunk_shape": record.array.chunks,
                "ext_metadata": {"random_key_impl": record.spec.impl},
            }
        }
        for record in records
        if record.array is not None and record.spec.kind == "prng_key"
    ]
    return {"array_metadatas": entries}
