from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.storage.tensorstore_io import (
    INLINE_BYTES,
    list_keys,
    open_store,
    read_all,
    write_all,
)

BUFFER = 1 << 20


def written(path, items, buffer=BUFFER):
    """A store with `items`, opened for reading."""
    write_all(open_store(path, create=True, fsync=False), items, buffer)
    return open_store(path)


@settings(max_examples=25)
@given(
    st.dictionaries(st.text(min_size=1, max_size=5), st.binary(max_size=9) | st.just(b"x" * 3000)),
    st.integers(1, 5000),
    st.integers(1, 5000),
)
def test_what_was_written_is_read_whatever_the_buffers(tmp_path_factory, items, write, read):
    store = written(tmp_path_factory.mktemp("s"), items.items(), write)
    requests = [(key, len(value)) for key, value in items.items()]
    assert list(read_all(store, requests, read)) == list(items.values())


def test_write_all_returns_the_bytes_of_the_values(tmp_path):
    store = open_store(tmp_path, create=True)
    assert write_all(store, [("a", b"12"), ("b", bytearray(3))], BUFFER) == 5


def test_values_are_read_in_the_order_of_the_requests(tmp_path):
    store = written(tmp_path, [("a", b"1"), ("b", b"2"), ("c", b"3")])
    assert list(read_all(store, [("c", 1), ("a", 1), ("c", 1)], 1)) == [b"3", b"1", b"3"]


def test_a_missing_value_is_none(tmp_path):
    store = written(tmp_path, [("a", b"1")])
    assert list(read_all(store, [("b", 9), ("a", 1)], BUFFER)) == [None, b"1"]


def test_an_empty_value_is_not_a_missing_one(tmp_path):
    assert list(read_all(written(tmp_path, [("a", b"")]), [("a", 0)], BUFFER)) == [b""]


def test_reading_nothing_gives_nothing(tmp_path):
    assert list(read_all(written(tmp_path, [("a", b"1")]), [], BUFFER)) == []


def test_keys_are_listed_in_order(tmp_path):
    assert list_keys(written(tmp_path, [("b", b"1"), ("é/c", b""), ("a", b"2")])) == [
        "a",
        "b",
        "é/c",
    ]


def test_small_values_lie_in_one_file_beside_the_manifest(tmp_path):
    written(tmp_path, [(str(i), b"x" * INLINE_BYTES) for i in range(20)])
    assert len([p for p in tmp_path.rglob("*") if p.is_file()]) == 2


def test_a_database_without_its_manifest_has_no_values(tmp_path):
    written(tmp_path, [("a", b"1")])
    (tmp_path / "manifest.ocdbt").unlink()
    assert list(read_all(open_store(tmp_path), [("a", 1)], BUFFER)) == [None]


def _read_everything(path) -> list[bytes | None]:
    """Every value, from the disk."""
    store = open_store(path)
    list_keys(store)  # raises where a node is damaged
    return list(read_all(store, [("a", 1), ("b", 2000)], BUFFER))


@pytest.mark.parametrize("pattern", ["manifest.ocdbt", "d/*"])
def test_every_flipped_byte_of_a_node_is_found_or_changes_a_value_only(tmp_path, pattern):
    # Values outside of the nodes have their own checksum, in `zarr3`.
    written(tmp_path, [("a", b"1")])
    for file in tmp_path.glob(pattern):
        text = file.read_bytes()
        for at in range(len(text)):
            file.write_bytes(text[:at] + bytes([text[at] ^ 0x55]) + text[at + 1 :])
            with pytest.raises((CorruptCheckpointError, ValueError)):
                _read_everything(tmp_path)
        file.write_bytes(text)
    assert _read_everything(tmp_path) == [b"1", None]


def test_a_truncated_node_is_corrupt(tmp_path):
    written(tmp_path, [("a", b"1")])
    (node,) = tmp_path.glob("d/*")
    node.write_bytes(node.read_bytes()[:-1])
    (found,) = read_all(open_store(tmp_path), [("a", 1)], BUFFER)
    assert isinstance(found, CorruptCheckpointError)
    assert re.fullmatch(r"the arrays are damaged: .* Restore another step.", str(found))


def test_listing_a_damaged_database_is_corrupt(tmp_path):
    written(tmp_path, [("a", b"1")])
    (node,) = tmp_path.glob("d/*")
    node.write_bytes(bytes(len(node.read_bytes())))
    with pytest.raises(CorruptCheckpointError, match="the arrays are damaged"):
        list_keys(open_store(tmp_path))


def test_a_missing_data_file_is_corrupt(tmp_path):
    written(tmp_path, [("a", b"1")])
    (node,) = tmp_path.glob("d/*")
    node.unlink()
    (found,) = read_all(open_store(tmp_path), [("a", 1)], BUFFER)
    assert isinstance(found, CorruptCheckpointError)


def test_an_error_of_the_source_is_raised(tmp_path):
    def items():
        yield "a", b"1"
        raise KeyError("source")

    with pytest.raises(KeyError, match="source"):
        write_all(open_store(tmp_path, create=True), items(), 1)
