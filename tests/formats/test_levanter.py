"""Checkpoints that levanter wrote."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flaxckpt
from flaxckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from flaxckpt.formats import levanter
from flaxckpt.testing import differences
from tests import stores
from tests.formats.flax_states import SAMPLES, moments, train_state

SAMPLE = SAMPLES / "levanter/step-7"
STATE = {
    "params": train_state(0)["params"],
    "opt": {"0": {"count": np.array(1, np.int32), "mu": moments(0.1), "nu": moments(0.001)}},
    "chrono": {"accum_train_time": np.array(1.5, np.float32)},
}


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(SAMPLE, tmp_path / "step-7")


def problem(path):
    with pytest.raises(CorruptCheckpointError) as error:
        flaxckpt.restore(path, as_numpy=True)
    return str(error.value)


def test_the_sample_is_read():
    assert differences(flaxckpt.restore(SAMPLE, as_numpy=True), STATE) == []


def test_a_target_of_jax_arrays_takes_it():
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), STATE)
    assert differences(flaxckpt.restore(SAMPLE, target), jax.tree.map(jnp.asarray, STATE)) == []


def test_nothing_is_read_before_it_is_asked_for(copy):
    (copy / "params/Dense_0/kernel/0.0").unlink()
    tree = levanter.read(stores.at(copy))
    assert tree["params"]["Dense_0"]["kernel"].array.shape == (3, 2)


def test_without_metadata_it_is_not_committed(copy):
    (copy / "metadata.json").unlink()
    assert not levanter.detect(stores.at(copy))
    with pytest.raises(CheckpointNotFoundError, match="levanter: a directory with a metadata.json"):
        flaxckpt.restore(copy)


def test_other_metadata_are_not_taken_for_it(copy):
    (copy / "metadata.json").write_text('{"model": "x"}')
    assert not levanter.detect(stores.at(copy))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('{"step": 7, "timestamp": ', "is damaged: it is not JSON: Expecting value"),
        ('{"step": "7", "timestamp": "x"}', "is damaged: 'step' is a str, and must be a int"),
        ('["step", "timestamp"]', "is damaged: there is a list where an object with 'step'"),
    ],
    ids=["truncated", "type", "list"],
)
def test_damaged_metadata_are_named(copy, text, wanted):
    (copy / "metadata.json").write_text(text)
    assert f"{copy}/metadata.json {wanted}" in problem(copy)


def test_damaged_arrays_are_named(copy):
    zarray = copy / "opt/0/count/.zarray"
    zarray.write_text(json.dumps(json.loads(zarray.read_text()) | {"dtype": "|O"}))
    assert f"the array 'opt/0/count' of {copy} cannot be read" in problem(copy)


def test_a_truncated_chunk_names_the_leaf(copy):
    chunk = copy / "params/Dense_0/kernel/0.0"
    chunk.write_bytes(chunk.read_bytes()[:-5])
    assert "params/Dense_0/kernel" in problem(copy)


def test_a_checkpoint_without_arrays_is_damaged(tmp_path):
    (tmp_path / "metadata.json").write_text('{"step": 7, "timestamp": "x"}')
    assert problem(tmp_path).endswith("has no arrays. Restore another step.")


def test_an_array_directory_is_not_looked_into(copy):
    shutil.copytree(copy / "opt/0/count", copy / "params/Dense_0/bias/inner")
    assert differences(flaxckpt.restore(copy, as_numpy=True), STATE) == []
