"""Checkpoints of clu.checkpoint."""

import shutil

import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt.formats import clu
from flaxckpt.formats.detect import find_reader
from tests import stores
from tests.formats.flax_states import SAMPLES, train_state
from tests.trees import assert_same

CLU = SAMPLES / "clu"


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(CLU, tmp_path / "clu")


def restored(path):
    return flaxckpt.restore(path, as_numpy=True)


def test_the_directory_is_the_newest():
    assert_same(restored(CLU), train_state(2))


@pytest.mark.parametrize("number", [1, 2])
def test_a_file_is_itself(number):
    assert_same(restored(CLU / f"ckpt-{number}.flax"), train_state(number))


@pytest.mark.parametrize(
    "text",
    [
        'model_checkpoint_path: "ckpt-1"\nall_model_checkpoint_paths: "ckpt-2"\n',
        'model_checkpoint_path: "/elsewhere/run/ckpt-1"\n',
        'model_checkpoint_path:"../ckpt-1"',
    ],
)
def test_the_text_file_decides(copy, text):
    (copy / "checkpoint").write_text(text)
    assert_same(restored(copy), train_state(1))


def test_files_of_tensorflow_do_not_matter(copy):
    (copy / "ckpt-2.index").write_bytes(b"\x00")
    (copy / "ckpt-2.data-00000-of-00001").write_bytes(b"\x00")
    (copy / "ckpt-3.flax").write_bytes(b"not committed")
    assert_same(restored(copy), train_state(2))


def test_what_it_names_may_be_missing(copy):
    (copy / "ckpt-2.flax").unlink()
    with pytest.raises(errors.CorruptCheckpointError, match=r"ckpt-2\.flax is missing"):
        restored(copy)


def test_the_text_file_may_be_damaged(copy):
    (copy / "checkpoint").write_text("model_checkpoint_path: ckpt")
    with pytest.raises(errors.CorruptCheckpointError, match="does not name a checkpoint"):
        restored(copy)


def test_a_cut_file_is_damaged(copy):
    (copy / "ckpt-2.flax").write_bytes((CLU / "ckpt-2.flax").read_bytes()[:100])
    with pytest.raises(errors.CorruptCheckpointError, match=r"ckpt-2\.flax is damaged"):
        restored(copy)


def test_only_such_directories_are_claimed(copy):
    assert find_reader(stores.at(copy)) is clu
    assert find_reader(stores.at(copy / "ckpt-1.flax")) is clu
    assert find_reader(stores.at(copy / "checkpoint")) is None
    (copy / "checkpoint").unlink()
    assert find_reader(stores.at(copy)) is None
    assert not clu.detect(stores.at(copy / "ckpt-9.flax"))
    assert not clu.detect(stores.at(copy / "missing"))


def test_checkpoints_of_tensorflow_are_not_claimed(copy):
    for file in copy.glob("*.flax"):
        file.unlink()
    assert not clu.detect(stores.at(copy))
