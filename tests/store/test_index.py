"""Where values lie, against what TensorStore itself reads; and nodes that somebody has changed."""

from __future__ import annotations

import crc32c
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.store import ocdbt
from flaxckpt.store.ocdbt import ValueRef, read_index
from tests.stores import at

NODE_BYTES = 1000  # the least; a few dozen keys then make several levels
CONFIG = {
    "max_inline_value_bytes": 16,
    "max_decoded_node_bytes": NODE_BYTES,
    "manifest_kind": "single",
    "compression": None,
}


def written(path, *transactions, **config):
    """A database with small nodes in `path`, written in `transactions`."""
    base = {"driver": "file", "path": f"{path}/", "file_io_sync": False}
    spec = {"driver": "ocdbt", "base": base, "config": CONFIG | config}
    store = ts.KvStore.open(spec).result()
    for items in transactions:
        transaction = ts.Transaction(atomic=True)
        for key, value in items.items():
            store.with_transaction(transaction).write(key, value)
        transaction.commit_async().result()
    return path


def read(path):
    """Every value by its key, by our reading."""
    return {
        key: bytes(ocdbt.read(at(path), place)) if isinstance(place, ValueRef) else place
        for key, place in read_index(at(path)).items()
    }


def read_by_tensorstore(path):
    """The same, by TensorStore's own."""
    base = {"driver": "file", "path": f"{path}/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    return {key.decode(): store.read(key).result().value for key in store.list().result()}


def newest(path):
    """The newest version in the manifest."""
    base = ts.KvStore.open({"driver": "file", "path": f"{path}/"}).result()
    return ts.ocdbt.dump(base).result()["versions"][-1]


def many(count, value=b"v"):
    """So many keys with something in common."""
    return {f"params/layer_{i:03}/zarr.json": value * (i % 40) for i in range(count)}


KEYS = st.text("ab/é\x00", min_size=1, max_size=6) | st.integers(0, 300).map("k/{:04}".format)
VALUES = st.binary(max_size=40)


@settings(max_examples=40)
@given(st.lists(st.dictionaries(KEYS, VALUES, min_size=1, max_size=80), min_size=1, max_size=4))
def test_the_values_are_those_that_tensorstore_reads(tmp_path_factory, transactions):
    path = written(tmp_path_factory.mktemp("s"), *transactions)
    assert read(path) == read_by_tensorstore(path)
    assert read(path).keys() == {key for items in transactions for key in items}


@pytest.mark.parametrize("compression", [None, {"id": "zstd"}])
@pytest.mark.parametrize(("count", "height"), [(1, 0), (60, 1), (900, 2)])
def test_trees_of_several_levels(tmp_path, count, height, compression):
    written(tmp_path, many(count), compression=compression)
    assert newest(tmp_path)["root_height"] == height
    assert read(tmp_path) == many(count)


def test_a_value_of_a_later_transaction_replaces_one_of_an_earlier(tmp_path):
    written(tmp_path, many(60), {"params/layer_030/zarr.json": b"n" * 99, "z": b""})
    expected = many(60) | {"params/layer_030/zarr.json": b"n" * 99, "z": b""}
    assert read(tmp_path) == expected


def test_more_transactions_than_a_manifest_has_versions(tmp_path):
    written(tmp_path, *({f"k{i}": bytes([i]) * i} for i in range(40)))
    assert read(tmp_path) == {f"k{i}": bytes([i]) * i for i in range(40)}


def test_a_database_of_nothing_is_empty(tmp_path):
    path = written(tmp_path, {"a": b"1"})
    base = {"driver": "file", "path": f"{path}/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    store.write("a", None).result()
    assert read_index(at(path)) == {}


def test_indirect_values_have_their_place(tmp_path):
    written(tmp_path, {"a": b"x" * 16, "b": b"y" * 17})
    index = read_index(at(tmp_path))
    assert index["a"] == b"x" * 16
    file, offset, length = index["b"]
    assert (tmp_path / file).read_bytes()[offset : offset + length] == b"y" * 17
    assert str(index["b"]) == f"{file}, 17 bytes at {offset}"


# Databases that somebody has changed, checksums included


def change(path, location, replace):
    """Rewrites the node at `location` with `replace`, which keeps its size, and its checksum."""
    _, _, file, offset, length = location.split(":")
    offset, length = int(offset), int(length)
    text = bytearray((path / file).read_bytes())
    node = bytes(text[offset : offset + length - 4])
    changed = replace(node)
    assert len(changed) == len(node)
    assert changed != node
    text[offset : offset + length] = changed + crc32c.crc32c(changed).to_bytes(4, "little")
    (path / file).write_bytes(text)


def children(path, location):
    """The entries of a node."""
    base = ts.KvStore.open({"driver": "file", "path": f"{path}/"}).result()
    return ts.ocdbt.dump(base, location).result()["entries"]


def varint(number):
    """As the format has it."""
    text = bytearray()
    while number > 127:
        text.append(number & 127 | 128)
        number >>= 7
    return bytes([*text, number])


def redirected(node, old, new):
    """`node` with the offset and the length of the child `old` replaced by those of `new`."""
    for was, becomes in zip(old.split(":")[-2:], new.split(":")[-2:], strict=True):
        was, becomes = varint(int(was)), varint(int(becomes))
        assert len(was) == len(becomes)
        node = node.replace(was, becomes, 1)
    return node


def refused(path, match):
    """Checks that the database is not read."""
    with pytest.raises(CorruptCheckpointError, match=match) as raised:
        read_index(at(path))
    assert str(path) in str(raised.value)


def test_a_node_that_is_its_own_child(tmp_path):
    written(tmp_path, many(60))
    root = newest(tmp_path)["root"]["location"]
    last = children(tmp_path, root)[-1]["location"]
    change(tmp_path, root, lambda node: redirected(node, last, root))
    assert children(tmp_path, root)[-1]["location"] == root
    refused(tmp_path, "is there twice")


def test_a_node_that_has_two_parents(tmp_path):
    """A few of these would be a tree of any size."""
    written(tmp_path, many(60))
    root = newest(tmp_path)["root"]["location"]
    *_, other, last = (child["location"] for child in children(tmp_path, root))
    change(tmp_path, root, lambda node: redirected(node, last, other))
    refused(tmp_path, "is there twice")


HEIGHT_AT = 14  # after the magic number, the length, the version, and the compression


@pytest.mark.parametrize("height", [1, 2, 255])
def test_a_leaf_node_that_says_it_is_none(tmp_path, height):
    written(tmp_path, many(60))
    root = newest(tmp_path)["root"]["location"]
    first = children(tmp_path, root)[0]["location"]
    change(tmp_path, first, lambda n: n[:HEIGHT_AT] + bytes([height]) + n[HEIGHT_AT + 1 :])
    refused(tmp_path, "Restore another step")


def test_a_node_of_another_height_than_its_place_in_the_tree(tmp_path):
    written(tmp_path, many(900))
    root = newest(tmp_path)["root"]["location"]
    inner = children(tmp_path, root)[0]["location"]
    change(tmp_path, inner, lambda n: n[:HEIGHT_AT] + bytes([7]) + n[HEIGHT_AT + 1 :])
    refused(tmp_path, "has the height 7 instead of 1")


@pytest.mark.parametrize(
    "file",
    ["d/../../../../../../../../etc/host", "/etc/../etc/../etc/../etc/../hosts", "d/" + "G" * 32],
)
def test_a_place_that_leads_out_of_the_database(tmp_path, file):
    written(tmp_path, {"a": b"x" * 99})
    root = newest(tmp_path)["root"]["location"]
    real = root.split(":")[2]
    file = file.ljust(len(real), "x")[: len(real)]
    change(tmp_path, root, lambda node: node.replace(real.encode(), file.encode()))
    refused(tmp_path, "Restore another step")


@pytest.mark.parametrize("count", [1, 60])
def test_every_flipped_byte_of_every_node_is_found(tmp_path, count):
    written(tmp_path, many(count))
    root = newest(tmp_path)["root"]["location"]
    inner = [child["location"] for child in children(tmp_path, root) if "location" in child]
    for location in (root, *inner):
        _, _, file, offset, length = location.split(":")
        text = (tmp_path / file).read_bytes()
        for i in range(int(offset), int(offset) + int(length), 1 if count == 1 else 13):
            (tmp_path / file).write_bytes(text[:i] + bytes([text[i] ^ 0x41]) + text[i + 1 :])
            refused(tmp_path, "Restore another step")
        (tmp_path / file).write_bytes(text)
    assert read(tmp_path) == many(count)


def test_a_data_file_that_ends_within_a_node(tmp_path):
    written(tmp_path, many(60))
    for file in (tmp_path / "d").iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    refused(tmp_path, "Restore another step")


def test_a_database_that_is_not_there(tmp_path):
    refused(tmp_path, "NOT_FOUND")
