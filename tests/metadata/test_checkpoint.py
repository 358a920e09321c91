from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flaxckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FlaxckptError,
    InvalidMetricError,
    UnsupportedFormatError,
)
from flaxckpt.metadata import sealed_json
from flaxckpt.metadata.step_metadata import (
    CheckpointMetadata,
    check_metadata,
    check_metrics,
    encode,
    read,
)
from flaxckpt.store.layout import CHECKPOINT_METADATA
from tests import stores

EXAMPLE = CheckpointMetadata("0123456789ab", 1, 2**60, {"loss": 0.5}, {"git": "abc", "n": [1, {}]})
_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@pytest.fixture
def file(tmp_path):
    """The file of a checkpoint that is in order."""
    file = tmp_path / CHECKPOINT_METADATA
    file.write_bytes(encode(EXAMPLE))
    return file


def test_what_was_written_is_read(file):
    assert read(stores.at(file.parent)) == EXAMPLE


@given(st.dictionaries(st.text(), st.floats()), st.dictionaries(st.text(max_size=3), _json))
def test_all_metrics_and_metadata_come_back(tmp_path_factory, metrics, metadata):
    path = tmp_path_factory.mktemp("c")
    written = CheckpointMetadata("0123456789ab", 1, 2, metrics, metadata)
    (path / CHECKPOINT_METADATA).write_bytes(encode(written))
    assert repr(read(stores.at(path))) == repr(written)


def test_every_changed_byte_is_found(file):
    text = file.read_bytes()
    for at in range(len(text)):
        file.write_bytes(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :])
        with pytest.raises(FlaxckptError):
            read(stores.at(file.parent))


def test_every_truncation_is_found(file):
    text = file.read_bytes()
    for end in range(len(text)):
        file.write_bytes(text[:end])
        with pytest.raises(FlaxckptError):
            read(stores.at(file.parent))


def test_orbax_finds_its_members(file):
    data = orjson.loads(file.read_bytes())
    assert {"item_handlers", "metrics", "init_timestamp_nsecs", "custom_metadata"} <= data.keys()


@pytest.mark.parametrize("name", ["missing", "file/below"])
def test_where_there_is_no_file_there_is_no_checkpoint(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointNotFoundError, match="holds no checkpoint of flaxckpt"):
        read(stores.at(tmp_path / name))


def test_a_checkpoint_of_orbax_is_not_ours(file):
    file.write_bytes(b'{"item_handlers": {}, "metrics": {}, "custom_metadata": {}}')
    with pytest.raises(CheckpointNotFoundError, match="was not written by flaxckpt"):
        read(stores.at(file.parent))


def test_a_newer_format_is_refused_as_such(file):
    data = orjson.loads(encode(EXAMPLE))
    ours = {"format": 99, "attempt": "x"}
    file.write_bytes(sealed_json.seal({"custom_metadata": {"flaxckpt": ours}}))
    with pytest.raises(UnsupportedFormatError, match="is of format 99"):
        read(stores.at(file.parent))
    assert data["custom_metadata"]["flaxckpt"]["format"] == 1


@pytest.mark.parametrize(
    "change",
    [{"metrics": []}, {"metrics": {"a": "x"}}, {"init_timestamp_nsecs": None},
     {"commit_timestamp_nsecs": "x"}, {"metrics": {"a": None}}],
)  # fmt: skip
def test_members_of_the_wrong_type_are_corrupt(file, change):
    data = orjson.loads(encode(EXAMPLE))
    del data["custom_metadata"]["flaxckpt"]["crc32c"]
    data |= change
    data["custom_metadata"] = data.pop("custom_metadata")  # the seal goes to its end
    file.write_bytes(sealed_json.seal(data))
    with pytest.raises(CorruptCheckpointError, match="is damaged"):
        read(stores.at(file.parent))


@pytest.mark.parametrize(
    "value", [1, 1.5, True, np.float32(1), np.ones(()), jnp.float32(1), math.nan]
)
def test_a_number_is_a_metric(value):
    (number,) = check_metrics({"a": value}).values()
    assert type(number) is float


@pytest.mark.parametrize("value", ["1.5", b"1", None, [1.0], np.ones(2), jnp.ones((0,)), 1j, {}])
def test_anything_else_is_no_metric(value):
    with pytest.raises(InvalidMetricError, match="the metric 'loss' must be one number, got"):
        check_metrics({"loss": value})


@pytest.mark.parametrize("name", [1, None, ("a",)])
def test_the_name_of_a_metric_is_a_str(name):
    with pytest.raises(InvalidMetricError, match="must be a str"):
        check_metrics({name: 1.0})


@given(st.dictionaries(st.text(), _json))
def test_json_is_metadata(metadata):
    if "flaxckpt" not in metadata:
        assert check_metadata(metadata) == metadata


@pytest.mark.parametrize(
    "value", [object(), (1, 2), math.nan, math.inf, b"a", {1: 2}, 2**70, "\ud800", {1, 2}]
)
def test_what_json_would_change_is_no_metadata(value):
    with pytest.raises(ValueError, match="metadata must be"):
        check_metadata({"a": value})


def test_our_own_name_is_not_the_users():
    with pytest.raises(ValueError, match="flaxckpt's own"):
        check_metadata({"flaxckpt": 1})
