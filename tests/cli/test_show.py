"""`flaxckpt show`."""

import numpy as np
import pytest

import flaxckpt
from tests.cli.conftest import without_ages
from tests.cli.shell import SAMPLES


def test_the_tree_with_types_shardings_and_sizes(made, shell):
    lines = without_ages("\n".join(shell.lines("show", made / "2"))).splitlines()
    assert lines == [
        f"{made}/2: flaxckpt, AGE old",
        "metrics: loss=0.1",
        "metadata: {'lang': 'en'}",
        "NAME        TYPE                 SHARDING                              SIZE  SHARE",
        "params                                                              32.8 kB  99.8%",
        "  dense                                                             32.8 kB  99.8%",
        "    bias    float32[200]                                              800 B   2.4%",
        "    kernel  float32[40,200]      P('data', None) of data=4,model=2  32.0 kB  97.4%",
        "  empty     dict (empty)                                                  -      -",
        "rng         key<threefry2x32>[]                                         8 B   0.0%",
        "step        int                                                         8 B   0.0%",
        "text        str 'a'                                                       -      -",
        "item data   json                                                       15 B   0.0%",
        "item ema    tree                                                       24 B   0.1%",
        "  w         int64[3]                                                   24 B   0.1%",
        "6 leaves, 32.9 kB",
    ]


def test_depth_filter_and_order(made, shell):
    def names(*args):
        return [line.split("  ")[0] for line in shell.lines("show", made / "2", *args)[4:-1]]

    assert names("--depth", "1") == ["params", "rng", "step", "text", "item data", "item ema"]
    lines = shell.lines("show", made / "2", "--depth", "1")
    assert [line.split("  ")[1:2] for line in lines[4:5]] == [
        ["  (2 leaves)"]
    ] or "(2 leaves)" in lines[4]
    assert "tree (1 leaf)" in lines[9]
    by_size = [line.split()[0] for line in shell.lines("show", made / "2", "--sort", "size")[4:]]
    assert by_size[:4] == ["params", "dense", "kernel", "bias"]
    by_name = [line.split()[0] for line in shell.lines("show", made / "2", "--sort", "name")[4:]]
    assert by_name[:4] == ["params", "dense", "bias", "kernel"]
    found, _ = shell.json("show", made / "2", "--filter", "params/.*/bias")
    assert [leaf["name"] for leaf in found["leaves"]] == ["params/dense/bias"]
    assert found["items"] == []
    assert "no leaf of" in shell.error("show", made / "2", "--filter", "nope")


def test_the_document(made, shell):
    found, status = shell.json("show", made / "2")
    assert (status, found["format"], found["metrics"]) == (0, "flaxckpt", {"loss": 0.1})
    leaves = {(leaf["item"], leaf["name"]): leaf for leaf in found["leaves"]}
    kernel = leaves[None, "params/dense/kernel"]
    assert (kernel["dtype"], kernel["shape"], kernel["nbytes"]) == ("float32", [40, 200], 32000)
    assert kernel["sharding"]["mesh"] == {"axis_names": ["data", "model"], "shape": [4, 2]}
    assert kernel["share"] == pytest.approx(32000 / found["nbytes"])
    assert leaves[None, "text"]["value"] == "a"
    assert leaves[None, "rng"]["impl"] == "threefry2x32"
    assert ("ema", "w") in leaves
    assert [item["kind"] for item in found["items"]] == ["json", "tree"]
    assert "stats" not in kernel


def test_what_the_values_are_like(tmp_path, shell):
    values = np.array([[1.0, -2.0, np.nan], [np.inf, 0.5, -np.inf]], np.float32)
    import ml_dtypes

    tree = {
        "f": values,
        "i": np.array([2**63 - 1, -(2**63)]),
        "c": np.array([3 + 4j]),
        "b": np.array([True, False]),
        "i4": np.array([1, -8], ml_dtypes.int4),
        "bf": np.array([0.5, 1.5], ml_dtypes.bfloat16),
        "none": np.zeros((0, 3)),
        "nan": np.full(2, np.nan),
        "names": np.array(["a", "b"]),
        "n": 3,
    }
    flaxckpt.save(tmp_path / "x", tree)
    found, _ = shell.json("show", tmp_path / "x", "--stats")
    stats = {leaf["name"]: leaf.get("stats") for leaf in found["leaves"]}
    norm = pytest.approx(np.sqrt(5.25))
    assert stats["f"] == {
        "min": -2.0, "max": 1.0, "mean": pytest.approx(-1 / 6), "norm": norm, "nan": 1, "inf": 2
    }  # fmt: skip
    assert (stats["i"]["min"], stats["i"]["max"]) == (-(2**63), 2**63 - 1)
    assert (stats["c"]["norm"], stats["c"]["min"], stats["c"]["mean"]) == (5.0, None, None)
    assert (stats["b"]["max"], stats["b"]["mean"]) == (1.0, 0.5)
    assert (stats["i4"]["min"], stats["i4"]["max"]) == (-8, 1)
    assert stats["bf"]["mean"] == 1.0
    assert stats["nan"] == {
        "min": None, "max": None, "mean": None, "norm": 0.0, "nan": 2, "inf": 0
    }  # fmt: skip
    assert (stats["n"]["min"], stats["none"], stats["names"]) == (3, None, None)


def test_values_of_an_array_of_many_blocks(tmp_path, shell, monkeypatch):
    from flaxckpt import comparing

    monkeypatch.setattr(comparing, "BLOCK_BYTES", 1000)
    values = np.random.default_rng(0).normal(size=(70, 90))
    flaxckpt.save(tmp_path / "x", {"w": values}, options=flaxckpt.Options(chunk_bytes=5000))
    (leaf,) = shell.json("show", tmp_path / "x", "--stats")[0]["leaves"]
    assert leaf["stats"]["min"] == values.min()
    assert leaf["stats"]["max"] == values.max()
    assert leaf["stats"]["mean"] == pytest.approx(values.mean())
    assert leaf["stats"]["norm"] == pytest.approx(np.linalg.norm(values))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("t5x/checkpoint_1", "T5X"),
        ("orbax/0.6.4/pt", "Orbax"),
        ("safetensors/model.safetensors", "safetensors"),
        ("clu", "CLU"),
        ("levanter/step-7", "levanter"),
        ("flax_legacy/checkpoint_1", "flax"),
    ],
)
def test_other_formats(path, name, shell):
    found, status = shell.json("show", SAMPLES / path, "--stats")
    assert status == 0
    assert name.lower() in found["format"].lower()
    assert found["leaves"]
    assert any("stats" in leaf for leaf in found["leaves"])


def test_names_cannot_move_the_cursor(tmp_path, shell):
    flaxckpt.save(tmp_path / "x", {"a\x1b[2J\n": 1})
    assert "\\x1b[2J\\n" in "\n".join(shell.lines("show", tmp_path / "x"))
    assert shell.json("show", tmp_path / "x")[0]["leaves"][0]["name"] == "a\x1b[2J\n"


def test_a_single_leaf_and_an_empty_tree(tmp_path, shell):
    flaxckpt.save(tmp_path / "x", np.arange(3))
    assert shell.lines("show", tmp_path / "x")[2].startswith("(the whole tree)  int64[3]")
    flaxckpt.save(tmp_path / "y", {})
    assert shell.lines("show", tmp_path / "y")[-1] == "0 leaves, 0 B"


def test_damage_and_a_run_are_errors(damaged, shell):
    assert "params/dense/kernel is damaged" in shell.error("show", damaged / "3", "--stats")
    assert "it is a run with the steps" in shell.error("show", damaged)
