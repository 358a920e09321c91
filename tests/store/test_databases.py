from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.store import ocdbt
from flaxckpt.store.ocdbt import (
    INLINE_BYTES,
    ValueRef,
    check_versions,
    create_store,
    read_index,
    write_all,
)
from tests.stores import at

BUFFER = 1 << 20


def written(path, items, buffer=BUFFER):
    """The directory of a database with `items`."""
    write_all(create_store(at(path, fsync=False)), items, buffer)
    return path


def read(path):
    """Every key with its value, from the disk."""
    return {
        key: bytes(ocdbt.read(at(path), place)) if isinstance(place, ValueRef) else place
        for key, place in read_index(at(path)).items()
    }


@settings(max_examples=25)
@given(
    st.dictionaries(st.text(min_size=1, max_size=5), st.binary(max_size=9) | st.just(b"x" * 3000)),
    st.integers(1, 5000),
)
def test_what_was_written_is_read_whatever_the_buffer(tmp_path_factory, items, buffer):
    path = written(tmp_path_factory.mktemp("s"), items.items(), buffer)
    assert (read(path) if items else {}) == items


def test_a_missing_value_is_not_an_empty_one(tmp_path):
    assert read(written(tmp_path, [("a", b"")])) == {"a": b""}


def test_keys_are_listed_in_order(tmp_path):
    path = written(tmp_path, [("b", b"1"), ("é/c", b""), ("a", b"2")])
    assert list(read_index(at(path))) == ["a", "b", "é/c"]


def test_small_values_lie_in_one_file_beside_the_manifest(tmp_path):
    written(tmp_path, [(str(i), b"x" * INLINE_BYTES) for i in range(20)])
    assert len([p for p in tmp_path.rglob("*") if p.is_file()]) == 2
    assert not any(isinstance(place, ValueRef) for place in read_index(at(tmp_path)).values())


def test_larger_values_lie_in_data_files(tmp_path):
    (place,) = read_index(at(written(tmp_path, [("a", b"x" * (INLINE_BYTES + 1))]))).values()
    assert isinstance(place, ValueRef)
    assert place.length == INLINE_BYTES + 1


def test_a_database_without_its_manifest_is_corrupt(tmp_path):
    written(tmp_path, [("a", b"1")])
    (tmp_path / "manifest.ocdbt").unlink()
    with pytest.raises(CorruptCheckpointError, match="the arrays at .* are damaged: NOT_FOUND"):
        read_index(at(tmp_path))


@pytest.mark.parametrize("pattern", ["manifest.ocdbt", "d/*"])
def test_every_flipped_byte_of_a_node_is_found(tmp_path, pattern):
    # Values outside of the nodes have their own checksum, in `zarr3`.
    written(tmp_path, [("a", b"1")])
    for file in tmp_path.glob(pattern):
        text = file.read_bytes()
        for i in range(len(text)):
            file.write_bytes(text[:i] + bytes([text[i] ^ 0x55]) + text[i + 1 :])
            with pytest.raises(CorruptCheckpointError):
                read_index(at(tmp_path))
        file.write_bytes(text)
    assert read(tmp_path) == {"a": b"1"}


def test_a_truncated_node_is_corrupt(tmp_path):
    written(tmp_path, [("a", b"1")])
    (node,) = tmp_path.glob("d/*")
    node.write_bytes(node.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError) as raised:
        read_index(at(tmp_path))
    assert re.fullmatch(
        r"the arrays at .* are damaged: .* Restore another step.", str(raised.value)
    )


def test_a_node_of_zeros_is_corrupt(tmp_path):
    written(tmp_path, [("a", b"1")])
    (node,) = tmp_path.glob("d/*")
    node.write_bytes(bytes(len(node.read_bytes())))
    with pytest.raises(CorruptCheckpointError, match="the arrays at .* are damaged"):
        read_index(at(tmp_path))


def test_a_missing_data_file_is_corrupt(tmp_path):
    written(tmp_path, [("a", b"1")])
    (node,) = tmp_path.glob("d/*")
    node.unlink()
    with pytest.raises(CorruptCheckpointError):
        read_index(at(tmp_path))


def test_damage_to_what_only_older_versions_have_is_found(tmp_path):
    items = [(str(i), bytes([i]) * 100) for i in range(4)]
    written(tmp_path, items, 100)  # a transaction for each
    check_versions(at(tmp_path))
    noticed = 0
    for file in tmp_path.glob("d/*"):
        text = file.read_bytes()
        file.write_bytes(text[: len(text) // 2])
        with pytest.raises(CorruptCheckpointError, match="are damaged"):
            check_versions(at(tmp_path))
            read_index(at(tmp_path))
        noticed += 1
        file.write_bytes(text)
    assert noticed > 1
    assert read(tmp_path) == dict(items)


def test_an_error_of_the_source_is_raised(tmp_path):
    def items():
        yield "a", b"1"
        raise KeyError("source")

    with pytest.raises(KeyError, match="source"):
        write_all(create_store(at(tmp_path)), items(), 1)
