"""Finding the reader of a path, and what a foreign checkpoint has in common with one of ours."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.numpy
from flax import serialization

import flaxckpt
from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.formats import detect
from tests.processes import run_fresh


def test_every_format_says_what_it_is_and_what_it_looks_for():
    names = [reader.NAME for reader in detect.readers()]
    assert len(set(names)) == len(detect.FORMATS)
    assert all(reader.LOOKS_FOR for reader in detect.readers())


def test_where_there_is_nothing_no_reader_is_imported(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "another").write_bytes(b"x")
    code = """
        import sys
        from flaxckpt.formats.detect import find_reader
        from flaxckpt.options import Options
        from flaxckpt.store.locate import locate
        root = locate(sys.argv[1], Options())
        print([find_reader(root / name) for name in ("empty", "missing")])
        heavy = {"numpy", "jax", "tensorstore", "flaxckpt.formats.orbax"}
        print(sorted(heavy & sys.modules.keys()))
        print(find_reader(root / "another"), "numpy" in sys.modules)
    """
    assert run_fresh(code, tmp_path) == (0, "[None, None]\n[]\nNone True\n", "")


def test_leaves_know_the_key_path_that_they_were_saved_at(tmp_path):
    state = {"params": {"w": np.ones(3)}, "step": 7}
    (tmp_path / "f").write_bytes(serialization.to_bytes(state))
    flaxckpt.save(tmp_path / "ours", state)
    for path in (tmp_path / "f", tmp_path / "ours"):
        assert {n: leaf.origin for n, leaf in flaxckpt.lazy(path).items()} == {
            "params/w": "params/w",
            "step": "step",
        }


def test_a_file_that_goes_away_while_it_is_read_is_called_missing(tmp_path):
    file = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({"w": np.ones(3)}, file)
    leaf = flaxckpt.lazy(file)["w"]
    file.unlink()
    with pytest.raises(CorruptCheckpointError, match=r"is incomplete: .* is missing"):
        leaf.read()
