"""Checkpoints that big_vision wrote."""

import shutil
import zipfile

import ml_dtypes
import numpy as np
import pytest

import flaxckpt
from flaxckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from flaxckpt.formats import big_vision
from flaxckpt.testing import differences
from tests import stores
from tests.formats.flax_states import SAMPLES, moments, train_state

SAMPLE = SAMPLES / "big_vision"
PARAMS = train_state(0)["params"]
STATE = {
    "params": PARAMS,
    "opt": {"0": {"0": np.array(1, np.int32), "1": moments(0.1), "2": moments(0.001)}},
    "chrono": {"accum_train_time": np.array(1.5, np.float32)},
}


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(SAMPLE, tmp_path / "workdir")


def problem(path):
    with pytest.raises(CorruptCheckpointError) as error:
        flaxckpt.restore(path, as_numpy=True)
    return str(error.value)


@pytest.mark.parametrize(
    "name", ["checkpoint.bv-000000010", "checkpoint.bv-000000005-tmp", "checkpoint.bv"]
)
def test_the_samples_are_read(name):
    assert differences(flaxckpt.restore(SAMPLE / name, as_numpy=True), STATE) == []


def test_the_pointer_decides_which_is_the_last(copy):
    shutil.rmtree(copy / "checkpoint.bv-000000005-tmp/chrono~accum_train_time")
    (copy / "checkpoint.bv-LAST").write_text("000000005-tmp")
    found = flaxckpt.restore(copy / "checkpoint.bv", as_numpy=True)
    assert found.keys() == {"params", "opt"}


@pytest.mark.parametrize("suffix", ["/../../etc", "5", "", "000000010/x"])
def test_the_pointer_leads_nowhere_else(copy, suffix):
    (copy / "checkpoint.bv-LAST").write_text(suffix or " ")
    wanted = f"{copy}/checkpoint.bv-LAST is damaged: {suffix!r} is not the suffix of a checkpoint"
    assert wanted in problem(copy / "checkpoint.bv")


def test_a_pointer_to_what_is_gone_says_so(copy):
    shutil.rmtree(copy / "checkpoint.bv-000000010")
    message = problem(copy / "checkpoint.bv")
    assert message.startswith(f"the big_vision checkpoint at {copy}/checkpoint.bv-000000010 has no")


def test_the_directory_of_all_names_them(copy):
    with pytest.raises(CheckpointNotFoundError, match="big_vision|checkpoint.bv-000000010"):
        flaxckpt.restore(copy)


def test_a_damaged_array_names_the_leaf(copy):
    chunk = copy / "checkpoint.bv-000000010/params~Dense_1~kernel/0.0"
    chunk.write_bytes(chunk.read_bytes()[:-5])
    assert "params/Dense_1/kernel" in problem(copy / "checkpoint.bv")


def test_names_that_collide_are_damage(copy):
    step = copy / "checkpoint.bv-000000010"
    shutil.copytree(step / "opt~0~0", step / "opt~0~0~1")
    assert f"{step} holds no tree: the leaf 'opt~0~0~1' is within another" in problem(step)


def test_the_npz_form_is_read():
    wanted = {"params": PARAMS | {"bf16": np.ones(2, ml_dtypes.bfloat16)}}
    assert differences(flaxckpt.restore(SAMPLE / "params.npz", as_numpy=True), wanted) == []


def test_a_compressed_npz_is_read_array_by_array(tmp_path):
    np.savez_compressed(tmp_path / "x.npz", **{"a/b": np.zeros(10000), "c": np.int32(4)})
    tree = big_vision.read(stores.at(tmp_path / "x.npz"))
    assert tree["a"]["b"].spec.shape == (10000,)
    found = flaxckpt.restore(tmp_path / "x.npz", as_numpy=True)
    wanted = {"a": {"b": np.zeros(10000)}, "c": np.array(4, np.int32)}
    assert differences(found, wanted) == []


def test_an_npz_of_python_objects_is_refused(tmp_path):
    np.savez(tmp_path / "x.npz", a=np.array([{}, None], object))
    assert f"{tmp_path}/x.npz is damaged: a.npy has the dtype object" in problem(tmp_path / "x.npz")


def test_a_truncated_npz_is_damaged(copy):
    data = (copy / "params.npz").read_bytes()
    (copy / "params.npz").write_bytes(data[: len(data) // 2])
    assert problem(copy / "params.npz").startswith(f"{copy}/params.npz is damaged: ")


def test_a_flipped_bit_in_an_npz_is_found(copy):
    path = copy / "params.npz"
    data = bytearray(path.read_bytes())
    data[data.index(np.float32(-0.9546668).tobytes())] ^= 1
    path.write_bytes(data)
    assert "Bad CRC-32 for file 'params/Dense_0/kernel.npy'" in problem(path)


def test_an_npz_that_claims_more_than_it_has_is_refused(tmp_path):
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,), }"
    header += b" " * (117 - len(header)) + b"\n"
    member = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\0" * 16
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("a.npy", member)
    message = problem(tmp_path / "x.npz")
    assert "a.npy does not have the 4398046511104 bytes of its shape" in message
