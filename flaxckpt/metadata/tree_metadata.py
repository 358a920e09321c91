"""The metadata of a tree: structure, leaves, limits."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.leaves.dtypes import parse_dtype, storage_of
from flaxckpt.leaves.spec import LeafRecord, LeafSpec, StoredArray
from flaxckpt.metadata.sealed_json import (
    MAX_AXES,
    MAX_DEPTH,
    MAX_ELEMENTS,
    MAX_LEAVES,
    SavedFile,
    check_format,
)
from flaxckpt.metadata.step_metadata import PastSave, decode_past, encode_past
from flaxckpt.store import ocdbt, zarr3
from flaxckpt.store.layout import FORMAT_VERSION
from flaxckpt.store.store import Location
from flaxckpt.tree.keypaths import Key, Kind, decode_key, encode_key
from flaxckpt.tree.node import (
    MAPPING_KINDS,
    SEQUENCE_KINDS,
    Node,
    NodeKind,
    named_nodes,
    plain_value,
)


def check_structure(nodes: Sequence[Node | None], records: Sequence[LeafRecord], path: str) -> None:
    """Checks that the nodes are one tree over the leaves, and that the leaves have its names.

    Raises:
      CorruptCheckpointError: when they are not; `path` is named.
    """
    try:
        check_tree(nodes, records)
    except ValueError as error:
        raise CorruptCheckpointError(
            f"{path} does not describe a tree: {error}. Restore another step."
        ) from None


def check_tree(nodes: Sequence[Node | None], records: Sequence[LeafRecord]) -> None:
    """As `check_structure`.

    Raises:
      ValueError: when they are not.
    """
    if len(nodes) > 4 * MAX_LEAVES or len(records) > MAX_LEAVES:
        raise ValueError(f"{len(nodes)} nodes and {len(records)} leaves are too many")
    children = sum(len(node.keys) for node in nodes if node is not None)
    if children != len(nodes) - 1 or _depth(nodes) > MAX_DEPTH:
        raise ValueError("the structure is not one tree, or too deep")
    names = [name for name, node in named_nodes(nodes) if node is None]
    if names != [record.name for record in records] or len(set(names)) != len(names):
        raise ValueError("the names of the leaves are not those of the structure")


def _depth(nodes: Sequence[Node | None]) -> int:
    """How deep a preorder of nodes goes.

    Raises:
      ValueError: when it ends within a node, or goes on after the root.
    """
    open_children = [1]
    depth = 0
    for node in nodes:
        while open_children and not open_children[-1]:
            open_children.pop()
        if not open_children:
            raise ValueError("the structure is not one tree")
        open_children[-1] -= 1
        open_children.append(len(node.keys) if node else 0)
        depth = max(depth, len(open_children))
    return depth


def check_array(array: StoredArray) -> None:
    """Checks the shape of an array.

    Raises:
      ValueError: when it has too many axes or elements.
    """
    elements = math.prod((*array.shape, *storage_of(array.dtype).extra))
    if len(array.shape) > MAX_AXES or elements > MAX_ELEMENTS or max(array.shape, default=0) >> 60:
        raise ValueError(f"an array of shape {array.shape} is too large")


def check_sizes(item: Location, records: Sequence[LeafRecord]) -> None:
    """Checks that the files of a tree can hold the arrays that it claims to have.

    Chunks too large for the nodes of the B-tree lie in data files as they are, so together these
    files are at least as large. Smaller ones cost a byte each or more.

    Raises:
      CorruptCheckpointError: when they cannot, or a file is a link to somewhere else.
    """
    check_claims(item, records, _bytes_on_disk(item))


def check_claims(item: Location, records: Sequence[LeafRecord], on_disk: int) -> None:
    """As `check_sizes`, for files that are known to have `on_disk` bytes."""
    claimed = chunks = 0
    for array in (record.array for record in records if record.array is not None):
        one_chunk = array.shape == array.chunks
        count = 1 if one_chunk else zarr3.chunk_count(array.shape, array.chunks)
        storage = storage_of(array.dtype)
        size = zarr3.encoded_bytes(zarr3.stored_shape(array.chunks, storage), storage)
        chunks += count
        claimed += count * size if size > ocdbt.INLINE_BYTES else 0
    if claimed > on_disk or chunks > on_disk:
        raise CorruptCheckpointError(
            f"the arrays at {item} are said to have {chunks} chunks of {claimed} bytes, but its "
            f"files have {on_disk} bytes. Restore another step."
        )


def _bytes_on_disk(item: Location) -> int:
    """The size of all files of a tree, none of which may lie outside of it."""
    total = 0
    for directory, inner, names in os.walk(item):
        for path in (Path(directory, name) for name in (".", *inner, *names)):
            if path.is_symlink():
                raise CorruptCheckpointError(
                    f"{path} is a symbolic link, and checkpoints have none. Restore another step."
                )
        total += sum(os.stat(os.path.join(directory, name)).st_size for name in names)
    return total


# The `flaxckpt` object of `_METADATA`: the structure of the tree and a record of every leaf.


@dataclasses.dataclass(frozen=True)
class SavedTree:
    """A checkpointed tree without its arrays.

    Attributes:
      nodes: its nodes in preorder, `None` for a leaf.
      records: its leaves, in the same order.
      attempt: the id of the save that wrote it.
      files: the other files beside it, by name.
      past: the saves of the same run before this one, as far as it remembers them.
    """

    nodes: tuple[Node | None, ...]
    records: tuple[LeafRecord, ...]
    attempt: str
    files: Mapping[str, SavedFile]
    past: tuple[PastSave, ...] = ()


def encode_tree(tree: SavedTree) -> dict[str, Any]:
    """`tree` as JSON."""
    structure = encode_structure(tree.nodes, tree.records)
    return with_files(structure, tree.attempt, tree.files, tree.past)


def encode_structure(nodes: Iterable[Node | None], records: Iterable[LeafRecord]) -> dict[str, Any]:
    """What is the same for every save of one kind of state, as JSON."""
    meshes: list[Any] = []
    return {
        "structure": [None if node is None else _encode_node(node) for node in nodes],
        "leaves": [_encode_record(record, meshes) for record in records],
        "meshes": meshes,
    }


def with_files(
    structure: Mapping[str, Any],
    attempt: str,
    files: Mapping[str, SavedFile],
    past: Sequence[PastSave] = (),
) -> dict[str, Any]:
    """The tree of `structure`, from `encode_structure`, as one save wrote it."""
    data = {
        "format": FORMAT_VERSION,
        "attempt": attempt,
        **structure,
        "files": [[name, *file] for name, file in files.items()],
    }
    return data | {"past": encode_past(past)} if past else data


def decode_tree(data: Any, path: str) -> SavedTree:
    """The tree that `encode_tree` wrote.

    Raises:
      UnsupportedFormatError: when a newer flaxckpt wrote it.
      CorruptCheckpointError: when it is not such a tree; `path` is named.
    """
    check_format(data, path)
    try:
        meshes = data["meshes"]
        count = len(data["structure"])
        nodes = tuple(n if n is None else _decode_node(n, count) for n in data["structure"])
        records = tuple(_decode_record(leaf, meshes) for leaf in data["leaves"])
        files = {str(name): SavedFile(size, crc) for name, size, crc in data["files"]}
        past = decode_past(data.get("past", ()))
        return SavedTree(nodes, records, str(data["attempt"]), files, past)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise CorruptCheckpointError(
            f"{path} does not describe a tree: {type(error).__name__}: {error}. "
            "Restore another step."
        ) from None


def _encode_node(node: Node) -> dict[str, Any]:
    """A node as JSON; what is empty is left out."""
    data: dict[str, Any] = {"kind": node.kind}
    if node.kind in SEQUENCE_KINDS:
        data["size"] = len(node.keys)
    elif _key_kind(node.kind):
        data["keys"] = [encode_key(key.value) for key in node.keys]
    else:
        data["keys"] = [[key.kind, encode_key(key.value)] for key in node.keys]
    optional = {"class": node.class_name, "static": list(node.static), "extra": node.extra}
    return data | {key: value for key, value in optional.items() if value}


def _key_kind(kind: NodeKind) -> Kind | None:
    """The kind that all keys of a node have, where its own kind says so."""
    if kind in MAPPING_KINDS:
        return "dict"
    return "attr" if kind == "namedtuple" else None


def _decode_node(data: Any, count: int) -> Node:
    """The node that `_encode_node` wrote, of a tree of `count` nodes."""
    kind: NodeKind = _one_of(data["kind"], get_args(NodeKind))
    if kind in SEQUENCE_KINDS:
        if data["size"] >= count:
            raise ValueError(f"a {kind} of {data['size']} in a tree of {count} nodes")
        keys = tuple(Key("seq", i) for i in range(data["size"]))
    elif key_kind := _key_kind(kind):
        keys = tuple(Key(key_kind, decode_key(key)) for key in data["keys"])
    else:
        keys = tuple(Key(_one_of(k, get_args(Kind)), decode_key(v)) for k, v in data["keys"])
    static = tuple(map(str, data.get("static", ())))
    return Node(kind, keys, str(data.get("class", "")), static, _checked_extra(kind, data))


def _checked_extra(kind: NodeKind, data: Any) -> Any:
    """What a node of `kind` says beside its keys, when it is of the form that such a node has."""
    extra = data.get("extra")
    if kind == "box":
        for item in (extra or {}).values():
            plain_value(item)
    elif not (extra is None or (kind == "defaultdict" and isinstance(extra, str))):
        raise ValueError(f"a {kind} with {extra!r:.80}")
    return extra


def _encode_record(record: LeafRecord, meshes: list[Any]) -> dict[str, Any]:
    """A record as JSON; its mesh is put into `meshes`, once."""
    spec, array = record.spec, record.array
    data: dict[str, Any] = {"name": record.name, "kind": spec.kind}
    if spec.impl:
        data["impl"] = spec.impl
    if spec.weak_type:
        data["weak_type"] = True
    if array is None:
        return data | {"value": record.value}
    data |= {"store": array.store, "dtype": array.dtype, "shape": array.shape}
    data["chunks"] = array.chunks
    if array.sharding is not None:
        mesh, partition = array.sharding["mesh"], array.sharding["spec"]
        if mesh not in meshes:
            meshes.append(mesh)
        data |= {"mesh": meshes.index(mesh), "spec": partition}
    return data


def _decode_record(data: Any, meshes: list[Any]) -> LeafRecord:
    """The record that `_encode_record` wrote."""
    name, kind, impl = data["name"], str(data["kind"]), str(data.get("impl", ""))
    if not isinstance(name, str):
        raise ValueError(f"not a name: {name!r}")
    if "store" not in data:
        return LeafRecord(name, LeafSpec(kind, impl=impl), value=data["value"])
    shape = _shape(data["shape"])
    chunks = shape if data["chunks"] == data["shape"] else _shape(data["chunks"])
    if len(shape) != len(chunks) or 0 in chunks:
        raise ValueError(f"the chunks {chunks} do not fit the shape {shape} of {name}")
    parse_dtype(data["dtype"])
    sharding = {"mesh": meshes[data["mesh"]], "spec": data["spec"]} if "mesh" in data else None
    array = StoredArray(str(data["store"]), data["dtype"], shape, chunks, sharding)
    check_array(array)
    return LeafRecord(name, spec_of(kind, array, data.get("weak_type") is True, impl), array)


def spec_of(kind: str, array: StoredArray, weak_type: bool, impl: str) -> LeafSpec:
    """The spec of a leaf of `kind` whose data are `array`."""
    if kind == "prng_key":
        return LeafSpec(kind, shape=array.shape[:-1], impl=impl)
    if kind in ("jax", "numpy", "numpy_scalar"):
        return LeafSpec(kind, array.dtype, array.shape, weak_type)
    return LeafSpec(kind, impl=impl)


def _one_of(value: Any, allowed: tuple[str, ...]) -> Any:
    """`value`, when it is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{value!r} is not one of {allowed}")
    return value


def _shape(data: Any) -> tuple[int, ...]:
    """A shape of non-negative integers."""
    if not all(type(n) is int and n >= 0 for n in data):
        raise ValueError(f"not a shape: {data!r}")
    return tuple(data)
