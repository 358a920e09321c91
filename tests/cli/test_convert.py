"""`flaxckpt convert` and `flaxckpt export`."""

import json

import jax
import numpy as np
import pytest

import flaxckpt
from flaxckpt.testing import differences
from tests.cli.shell import SAMPLES


@pytest.mark.parametrize(
    "path",
    [
        "t5x/checkpoint_1",
        "orbax/0.6.4/pt",
        "safetensors/model.safetensors",
        "clu",
        "levanter/step-7",
    ],
)
def test_all_formats(path, shell, tmp_path):
    source = SAMPLES / path
    found, status = shell.json("convert", source, tmp_path / "x")
    assert status == 0
    assert found["leaves"] == len(flaxckpt.lazy(source))
    assert flaxckpt.verify(tmp_path / "x")
    assert shell("diff", source, tmp_path / "x").status == 0
    metadata = shell.json("show", tmp_path / "x")[0]["metadata"]
    assert metadata == {"converted_from": str(source), "format": found["format"]}


def test_all_kinds_of_leaves_in_several_parts(shell, tmp_path, monkeypatch):
    from flaxckpt.cli import convert

    monkeypatch.setattr(convert, "PART_BYTES", 100)
    tree = {
        "a": {"b": [np.arange(20.0), (1, 2.5)], "c": {"0": "text", "": b"bytes"}},
        "key": jax.random.key(3),
        "rng": np.random.default_rng(1),
        "none": None,
        "empty": {"x": {}, "y": ()},
        "big": 2**100,
    }
    flaxckpt.save(tmp_path / "x", tree, metadata={"lang": "en"})
    shell.lines("convert", tmp_path / "x", tmp_path / "y")
    assert shell("diff", tmp_path / "x", tmp_path / "y").status == 0
    restored = flaxckpt.restore(tmp_path / "y")
    assert restored["a"]["b"][1] == {0: 1, 1: 2.5}
    assert differences(flaxckpt.restore(tmp_path / "y", tree), tree) == []
    flaxckpt.save(tmp_path / "one", np.arange(3))
    shell.lines("convert", tmp_path / "one", tmp_path / "two")
    assert flaxckpt.restore(tmp_path / "two").tolist() == [0, 1, 2]


def test_what_cannot_be_converted(made, damaged, shell, tmp_path):
    assert "only flaxckpt cp keeps" in shell.error("convert", made / "1", tmp_path / "x")
    flaxckpt.save(tmp_path / "there", {"x": 1})
    sample = SAMPLES / "t5x/checkpoint_1"
    assert "--overwrite" in shell.error("convert", sample, tmp_path / "there")
    shell.lines("convert", sample, tmp_path / "there", "--overwrite")
    assert "params" in flaxckpt.restore(tmp_path / "there")


def test_export(shell, tmp_path):
    sample, out = SAMPLES / "t5x/checkpoint_1", tmp_path / "model.safetensors"
    found, status = shell.json(
        "export", sample, out, "--dtype", "bfloat16", "--rename", "params.Dense_0.bias=b", "step="
    )
    assert (status, found) == (0, {"from": str(sample), "to": str(out)})
    names = flaxckpt.lazy(out)
    assert "b" in names
    assert "step" not in names
    assert names["b"].dtype == "bfloat16"
    assert "--overwrite" in shell.error("export", sample, out)
    shell.lines("export", sample, out, "--overwrite", "--max-shard-bytes", "100B")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1


def test_wrong_arguments_of_export(made, shell, tmp_path):
    sample, out = SAMPLES / "t5x/checkpoint_1", tmp_path / "model.safetensors"
    assert "no leaf has" in shell.error("export", sample, out, "--rename", "nope=x")
    assert "OLD=NEW" in shell.error("export", sample, out, "--rename", "nope")
    assert "dtype" in shell.error("export", sample, out, "--dtype", "nope")
    assert "ends in .safetensors" in shell.error("export", sample, tmp_path / "x")
    assert "is not a size" in shell.error("export", sample, out, "--max-shard-bytes", "many")
    assert "rng" in shell.error("export", made / "1", out)
