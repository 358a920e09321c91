"""Exports to safetensors: what other readers find in them, what is refused, what is left behind."""

import json
import os
from pathlib import Path
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import safetensors
import safetensors.flax
import safetensors.numpy
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import flaxckpt
from flaxckpt import exporting as export_values
from flaxckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DirectoryError,
    StepExistsError,
    UnsupportedLeafError,
)
from flaxckpt.exporting import export
from flaxckpt.formats.safetensors import DTYPES
from flaxckpt.options import MIB, Options
from tests import processes, stores

SAMPLES = Path(__file__).parent / "samples"
FAST = Options(fsync=False)


def loaded(path):
    """What the library finds, bfloat16 and 8-bit floats included."""
    found = {}
    with safetensors.safe_open(path, "numpy") as file:
        for name in file.keys():  # noqa: SIM118 - it is no dict
            found[name] = (file.get_slice(name).get_dtype(), file.get_slice(name).get_shape())
    data = dict(safetensors.deserialize(Path(path).read_bytes()))
    arrays = {}
    for name, (code, shape) in found.items():
        dtype = np.dtype(getattr(ml_dtypes, DTYPES[code], DTYPES[code]))
        arrays[name] = np.frombuffer(data[name]["data"], dtype).reshape(shape)
    return arrays


def assert_holds(path, expected):
    """Compares what the library finds with arrays by name."""
    found = loaded(path)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        array = np.asarray(array)
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def everything():
    """An array of each dtype that the format has, in several shapes and orders."""
    rng = np.random.default_rng(0)
    tree = {}
    for name in DTYPES.values():
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        cube = rng.integers(1, 3, (2, 3, 4)).astype(dtype)
        tree[name] = {"a": cube, "f": cube.T, "0d": np.ones((), dtype), "e": cube[:0]}
    return tree


def dotted(tree):
    """The leaves by their key paths with dots."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="."): leaf for p, leaf in pairs}


# What is in the file


def test_the_bytes_are_those_of_the_library(tmp_path):
    tree = everything()
    export(tree, tmp_path / "a.safetensors", metadata={"format": "flax"}, options=FAST)
    contiguous = {n: np.ascontiguousarray(a).reshape(a.shape) for n, a in dotted(tree).items()}
    safetensors.numpy.save_file(contiguous, tmp_path / "b.safetensors", {"format": "flax"})
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize("source", ["tree", "checkpoint"])
def test_the_library_reads_a_train_state(tmp_path, source):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "x"))
            return nn.Dense(3, kernel_init=init)(nn.Dense(4, dtype=jnp.bfloat16)(x))

    params = Model().init(jax.random.key(0), np.zeros((1, 2)))["params"]
    params["half"] = jnp.ones((3, 2), jnp.bfloat16) / 3
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
    what = state
    if source == "checkpoint":
        what = tmp_path / "saved"
        flaxckpt.save(what, state, options=FAST)
    file = tmp_path / "model.safetensors"
    export(what, file, options=FAST)
    found = safetensors.flax.load_file(file)
    assert found["params.half"].dtype == jnp.bfloat16
    expected = dotted(nn.unbox(state))
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    assert {"params.Dense_1.kernel", "opt_state.0.mu.Dense_0.bias", "opt_state.0.count"} < set(
        found
    )
    with safetensors.safe_open(file, "flax") as opened:
        assert opened.get_slice("params.half")[1:, :1].tolist() == [[params["half"][0, 0]]] * 2


def test_an_nnx_module_is_exported_by_its_attributes(tmp_path):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)])
            self.tied = self.layers[0].kernel

    model = Model(nnx.Rngs(0))
    export(model, tmp_path / "m.safetensors", options=FAST)
    expected = {
        f"layers.{i}.{name}": getattr(model.layers[i], name)[...]
        for i in range(2)
        for name in ("kernel", "bias")
    }
    assert_holds(tmp_path / "m.safetensors", expected)


def test_numbers_become_arrays_and_empty_nodes_nothing(tmp_path):
    tree = {"i": 3, "f": 0.5, "b": True, "s": np.float16(2), "none": None, "empty": {}, "x": ()}
    tree["list"] = [np.arange(2, dtype=">i4")]
    expected = {
        "i": np.int64(3),
        "f": np.float64(0.5),
        "b": np.bool_(True),
        "s": np.float16(2),
        "list.0": np.arange(2, dtype=np.int32),
    }
    for what in (tree, tmp_path / "saved"):
        flaxckpt.save(tmp_path / "saved", tree, overwrite=True, options=FAST)
        export(what, tmp_path / "a.safetensors", overwrite=True, options=FAST)
        assert_holds(tmp_path / "a.safetensors", expected)


def test_only_floats_get_the_dtype(tmp_path):
    tree = {"f": np.linspace(0, 1, 7), "h": jnp.ones(2, jnp.float16), "i": np.arange(3), "p": 0.1}
    expected = {
        "f": tree["f"].astype(ml_dtypes.bfloat16),
        "h": np.ones(2, ml_dtypes.bfloat16),
        "i": np.arange(3),
        "p": np.array(0.1).astype(ml_dtypes.bfloat16),
    }
    flaxckpt.save(tmp_path / "saved", tree, options=FAST)
    for what, dtype in ((tree, "bfloat16"), (tmp_path / "saved", jnp.bfloat16)):
        export(what, tmp_path / "a.safetensors", dtype=dtype, overwrite=True, options=FAST)
        assert_holds(tmp_path / "a.safetensors", expected)
    with pytest.raises(ValueError, match="dtype must be one of .*bfloat16.*, got int8"):
        export(tree, tmp_path / "b.safetensors", dtype="int8")


def test_another_format_goes_out_as_it_came_in(tmp_path):
    export(SAMPLES / "safetensors", tmp_path / "a.safetensors", options=FAST)
    assert_holds(
        tmp_path / "a.safetensors",
        safetensors.numpy.load_file(SAMPLES / "safetensors/model.safetensors"),
    )
    kinds = SAMPLES / "safetensors" / "kinds.safetensors"
    export(kinds, tmp_path / "k.safetensors", options=FAST)
    assert (tmp_path / "k.safetensors").read_bytes() == kinds.read_bytes()


def test_a_checkpoint_comes_back_from_its_export(tmp_path):
    tree = {"a.b": np.ones(2), "c": {"0": np.zeros((2, 2), np.int8)}}
    export(tree, tmp_path / "a.safetensors", options=FAST)
    restored = flaxckpt.restore(tmp_path / "a.safetensors")
    assert restored.keys() == {"a.b", "c.0"}
    np.testing.assert_array_equal(restored["c.0"], tree["c"]["0"])


# Names


def test_names_can_be_changed_and_left_out(tmp_path):
    tree = {"params": {"w": np.ones(1), "b": np.zeros(1)}, "step": 3}

    def rename(name):
        return name.removeprefix("params.") if name.startswith("params.") else None

    export(tree, tmp_path / "a.safetensors", rename=rename, options=FAST)
    assert_holds(tmp_path / "a.safetensors", {"w": np.ones(1), "b": np.zeros(1)})
    mapping = {"params.w": "weight", "step": None}
    export(tree, tmp_path / "b.safetensors", rename=mapping, options=FAST)
    assert_holds(tmp_path / "b.safetensors", {"weight": np.ones(1), "params.b": np.zeros(1)})


@pytest.mark.parametrize(
    ("tree", "rename", "why"),
    [
        ({"a": {"b": 1}, "a.b": 2}, None, r"leaves a/b and a\.b would both be called 'a.b'"),
        ({"a": 1, "b": 2}, lambda name: "x", "leaves a and b would both be called 'x'"),
        ({"a": 1}, {"c": "x"}, r"names that no leaf has: \['c'\]"),
        ({"a": 1}, {"a": "__metadata__"}, "a cannot be called '__metadata__'"),
        ({"a": 1}, {"a": 5}, "a cannot be called 5"),
        ({"a": 1}, {"a": "\ud800"}, "a cannot be called"),
    ],
)
def test_names_that_cannot_be_are_refused(tmp_path, tree, rename, why):
    with pytest.raises(ValueError, match=why):
        export(tree, tmp_path / "a.safetensors", rename=rename)
    assert not os.listdir(tmp_path)


def test_all_leaves_that_do_not_fit_are_listed(tmp_path):
    tree = {
        "key": jax.random.key(0),
        "text": "x",
        "big": 1 << 70,
        "complex": 1j,
        "c128": np.ones(2, np.complex128),
        "int4": jnp.ones(2, jnp.int4),
        "words": np.array(["a"]),
        "abstract": jax.ShapeDtypeStruct((2,), np.float32),
        "object": object(),
        "fine": np.ones(2),
    }
    with pytest.raises(UnsupportedLeafError) as caught:
        export(tree, tmp_path / "a.safetensors")
    text = str(caught.value)
    assert text.startswith("9 of 10 leaves cannot be written")
    for line in (
        "key: key<threefry2x32>[] is not an array of numbers\n",
        "text: str is not an array of numbers\n",
        "c128: the format has no dtype complex128\n",
        "abstract: it is abstract",
    ):
        assert f"\n  {line}" in text
    assert all(f"\n  {name}: " in text for name in tree if name != "fine")
    assert "rename=" in text
    assert not os.listdir(tmp_path)
    export(tree, tmp_path / "a.safetensors", rename=lambda n: n if n == "fine" else None)
    assert_holds(tmp_path / "a.safetensors", {"fine": np.ones(2)})


def test_the_same_leaves_of_a_checkpoint_are_listed(tmp_path):
    tree = {"key": jax.random.key(0), "text": "x", "big": 1 << 70, "fine": 1}
    flaxckpt.save(tmp_path / "saved", tree, options=FAST)
    with pytest.raises(UnsupportedLeafError, match=r"3 of 4 leaves(.|\n)*big(.|\n)*key(.|\n)*text"):
        export(tmp_path / "saved", tmp_path / "a.safetensors")


# Large arrays, and many files


SHARDINGS = [("x",), (None, "x"), ("x", "y"), (None, "y"), (("x", "y"),), ()]


@pytest.mark.parametrize("source", ["tree", "checkpoint", "export"])
@pytest.mark.parametrize("spec", SHARDINGS)
def test_arrays_go_in_blocks_wherever_they_lie(tmp_path, spec, source):
    array = np.random.default_rng(0).integers(0, 1 << 30, (512, 64, 24), dtype=np.int32)
    mesh = Mesh(np.reshape(jax.devices(), (4, 2)), ("x", "y"))
    placed = jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))
    small = Options(chunk_bytes=64 << 10, max_host_bytes=1 << 20, fsync=False)
    what = {"a": placed, "b": np.arange(5)}
    if source != "tree":
        flaxckpt.save(tmp_path / "saved", what, options=small)
        what = tmp_path / "saved"
    if source == "export":
        export(what, tmp_path / "first.safetensors", options=small)
        what = tmp_path / "first.safetensors"
    export(what, tmp_path / "a.safetensors", options=small)
    assert_holds(tmp_path / "a.safetensors", {"a": array, "b": np.arange(5)})


def test_no_chunk_is_read_twice(tmp_path):
    mesh = Mesh(np.array(jax.devices()), "x")
    sharding = NamedSharding(mesh, PartitionSpec(None, "x"))
    array = jax.device_put(np.arange(1 << 18, dtype=np.int32).reshape(64, -1), sharding)
    tight = Options(chunk_bytes=16 << 10, max_host_bytes=64 << 10, fsync=False)
    flaxckpt.save(tmp_path / "saved", {"a": array}, options=tight)
    seen = []
    real = export_values.read_each

    def spying(reads, ahead):
        seen.extend(read.regions[0] for read in reads)
        return real(reads, ahead)

    with mock.patch.object(export_values, "read_each", spying):
        export(tmp_path / "saved", tmp_path / "a.safetensors", options=tight)
    assert {region.shape for region in seen} == {(8, 512)}  # chunks, which no block has in common
    assert len(seen) == 64
    assert_holds(tmp_path / "a.safetensors", {"a": np.asarray(array)})


def test_what_is_too_large_for_one_file_goes_into_several(tmp_path):
    tree = {f"layer{i}": {"w": np.full((10, 10), i, np.float32)} for i in range(5)}
    tree["step"] = 7
    file = tmp_path / "model.safetensors"
    export(tree, file, max_shard_bytes=800, metadata={"format": "pt"}, options=FAST)
    parts = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = "model.safetensors.index.json"
    assert sorted(os.listdir(tmp_path)) == [*parts, index]
    assert json.loads((tmp_path / index).read_text()) == {
        "metadata": {"total_size": 2008},
        "weight_map": {
            "layer0.w": parts[0],
            "layer1.w": parts[0],
            "layer2.w": parts[1],
            "layer3.w": parts[1],
            "layer4.w": parts[2],
            "step": parts[2],
        },
    }
    assert_holds(
        tmp_path / parts[1], {"layer2.w": tree["layer2"]["w"], "layer3.w": tree["layer3"]["w"]}
    )
    with safetensors.safe_open(tmp_path / parts[2], "numpy") as opened:
        assert opened.metadata() == {"format": "pt"}
    restored = flaxckpt.restore(tmp_path)
    assert restored.keys() == {"step", *(f"layer{i}.w" for i in range(5))}
    np.testing.assert_array_equal(restored["layer4.w"], tree["layer4"]["w"])

    export(tmp_path, tmp_path / "one" / "m.safetensors", max_shard_bytes=2008, options=FAST)
    assert os.listdir(tmp_path / "one") == ["m.safetensors"]
    export(tree, tmp_path / "tiny" / "m.safetensors", max_shard_bytes=1, options=FAST)
    assert len(os.listdir(tmp_path / "tiny")) == 7


# What is there before and after


def test_what_is_there_is_replaced_only_when_asked(tmp_path):
    file = tmp_path / "m.safetensors"
    (tmp_path / "other.safetensors").write_bytes(b"")
    (tmp_path / "m-2.safetensors").write_bytes(b"")
    keep = {"m-2.safetensors", "other.safetensors"}
    one, two = {"a": np.zeros(4)}, {"a": np.ones(4), "b": np.ones(4), "c": np.ones(4)}
    export(one, file, options=FAST)
    for limit in (None, 32):
        with pytest.raises(StepExistsError, match=r"m\.safetensors already. Pass overwrite=True"):
            export(two, file, max_shard_bytes=limit, options=FAST)
    assert_holds(file, one)
    export(two, file, max_shard_bytes=32, overwrite=True, options=FAST)
    assert len(set(os.listdir(tmp_path)) - keep) == 4
    assert not file.exists()
    for limit in (None, 32):
        with pytest.raises(StepExistsError, match="Pass overwrite=True"):
            export(two, file, max_shard_bytes=limit, options=FAST)
    export(two, file, max_shard_bytes=64, overwrite=True, options=FAST)
    assert set(os.listdir(tmp_path)) - keep == {
        "m-00001-of-00002.safetensors",
        "m-00002-of-00002.safetensors",
        "m.safetensors.index.json",
    }
    export(one, file, overwrite=True, options=FAST)
    assert set(os.listdir(tmp_path)) - keep == {"m.safetensors"}
    assert_holds(file, one)


def test_an_export_can_replace_what_it_reads(tmp_path):
    tree = {f"w{i}": np.arange(1000) + i for i in range(4)}
    export(tree, tmp_path / "model.safetensors", max_shard_bytes=16000, options=FAST)
    again = {"max_shard_bytes": 16000, "overwrite": True, "options": FAST}
    export(tmp_path, tmp_path / "model.safetensors", rename=lambda n: f"x.{n}", **again)
    assert len(os.listdir(tmp_path)) == 3
    restored = flaxckpt.restore(tmp_path)
    assert restored.keys() == {f"x.{name}" for name in tree}
    np.testing.assert_array_equal(restored["x.w3"], tree["w3"])


@pytest.mark.parametrize("fail_at", ["write", "publish"])
@pytest.mark.parametrize("limit", [None, 32])
def test_a_failure_leaves_nothing(tmp_path, limit, fail_at):
    tree = {"a": np.zeros(4), "b": np.ones(4)}
    name, calls = ("pwrite", 2) if fail_at == "write" else ("link", 1 if limit is None else 3)
    real, count = getattr(os, name), 0

    def failing(*args):
        nonlocal count
        count += 1
        if count == calls:
            raise KeyboardInterrupt
        return real(*args)

    with mock.patch.object(os, name, failing), pytest.raises(KeyboardInterrupt):
        export(tree, tmp_path / "m.safetensors", max_shard_bytes=limit, options=FAST)
    assert os.listdir(tmp_path) == []


def test_a_damaged_checkpoint_leaves_nothing(tmp_path):
    export({"a": np.arange(100)}, tmp_path / "in.safetensors", options=FAST)
    flaxckpt.save(tmp_path / "saved", {"a": np.random.default_rng(0).random(1 << 16)}, options=FAST)
    for file in (tmp_path / "saved").rglob("d/*"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="the leaf a is damaged"):
        export(tmp_path / "saved", tmp_path / "out" / "m.safetensors", options=FAST)
    assert os.listdir(tmp_path / "out") == []


def test_somebody_else_may_be_first(tmp_path):
    file = tmp_path / "m.safetensors"
    real = os.link

    def late(source, target):
        target.write_bytes(b"theirs")
        return real(source, target)

    with mock.patch.object(os, "link", late), pytest.raises(StepExistsError):
        export({"a": 1}, file, options=FAST)
    assert file.read_bytes() == b"theirs"
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_what_a_killed_export_left_is_removed(tmp_path):
    code = """
        import os, signal, sys
        import numpy as np
        from flaxckpt.exporting import export
        os.link = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        export({"a": np.ones(3)}, sys.argv[1])
    """
    file = tmp_path / "m.safetensors"
    assert processes.run(code, file)[0] == -9
    (left,) = os.listdir(tmp_path)
    assert left.startswith("m.safetensors.flaxckpt-tmp-")
    with pytest.raises(CheckpointNotFoundError):
        flaxckpt.restore(file)
    export({"a": 1}, file, options=FAST)
    assert os.listdir(tmp_path) == ["m.safetensors"]


@pytest.mark.parametrize("fsync", [True, False])
def test_it_waits_for_the_disk_when_asked(tmp_path, fsync):
    with mock.patch.object(os, "fsync", wraps=os.fsync) as synced:
        export({"a": 1}, tmp_path / "m.safetensors", options=Options(fsync=fsync))
    assert synced.call_count == (2 if fsync else 0)  # the file, and the directory


def test_bad_arguments_are_refused(tmp_path):
    (tmp_path / "d.safetensors").mkdir()
    with pytest.raises(DirectoryError, match="is a directory"):
        export({"a": 1}, tmp_path / "d.safetensors")
    with pytest.raises(ValueError, match=r"ends in \.safetensors"):
        export({"a": 1}, tmp_path / "model.bin")
    with pytest.raises(ValueError, match="max_shard_bytes must be positive"):
        export({"a": 1}, tmp_path / "m.safetensors", max_shard_bytes=0)
    with pytest.raises(ValueError, match="strings by name, got"):
        export({"a": 1}, tmp_path / "m.safetensors", metadata={"step": 1})
    with pytest.raises(CheckpointNotFoundError):
        export(str(tmp_path / "none"), tmp_path / "m.safetensors")
    assert os.listdir(tmp_path) == ["d.safetensors"]


def test_a_bucket_gets_objects(tmp_path):
    tree = {"a": np.arange(1000), "b": np.ones((10, 100), np.float32)}
    with stores.opened("gcs", tmp_path) as store:
        options = store.options()
        url = store.url("out/m.safetensors")
        export(tree, url, options=options)
        with pytest.raises(StepExistsError, match="Pass overwrite=True"):
            export(tree, url, options=options)
        assert store.objects("out") == ["m.safetensors"]
        (tmp_path / "m.safetensors").write_bytes(store.read("out", "m.safetensors"))
        assert_holds(tmp_path / "m.safetensors", tree)
        export(tree, url, max_shard_bytes=8000, overwrite=True, options=options)
        parts = [f"m-0000{i}-of-00002.safetensors" for i in (1, 2)]
        assert sorted(store.objects("out")) == [*parts, "m.safetensors.index.json"]
        with pytest.raises(ValueError, match="to its own place in a bucket"):
            export(store.url("out"), url, overwrite=True, options=options)
        export(store.url("out"), store.url("other/m.safetensors"), options=options)
        (tmp_path / "m.safetensors").write_bytes(store.read("other", "m.safetensors"))
        assert_holds(tmp_path / "m.safetensors", tree)


MEMORY = """
    import json, sys
    import numpy as np
    import flaxckpt
    from flaxckpt.exporting import export
    from tests.memory_child import MIB, make, peak

    directory, kind = sys.argv[1:]
    options = flaxckpt.Options(max_host_bytes=64 * MIB, fsync=False)
    shapes = [(128, MIB // 4), *[(512, 1024)] * 64]
    shapes = [(256, MIB // 4), *shapes] if kind == "saved" else shapes
    what = [make(kind if kind != "saved" else "numpy", shape) for shape in shapes]
    export([make("numpy", (8, 8))], f"{directory}/tiny.safetensors", options=options)
    if kind == "saved":
        flaxckpt.save(f"{directory}/saved", what, options=options)
        what = f"{directory}/saved"
    print(peak(lambda: export(what, f"{directory}/m.safetensors", options=options))[0])
    if kind == "saved":
        what, last = f"{directory}/m.safetensors", f"{directory}/bf16.safetensors"
        print(peak(lambda: export(what, last, dtype="bfloat16", options=options))[0])
"""


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="this system does not tell peaks"
)
@pytest.mark.parametrize(("kind", "devices"), [("saved", 1), ("jax", 8), ("numpy", 1)])
def test_an_export_keeps_its_budget(tmp_path, kind, devices):
    code, out, errors = processes.run_fresh(MEMORY, tmp_path, kind, devices=devices)
    assert code == 0, errors
    for grown in map(int, out.split()):
        assert grown < 100 * MIB
    size = (tmp_path / "m.safetensors").stat().st_size
    assert size > (512 if kind == "saved" else 256) * MIB


def test_what_is_spread_over_processes_is_refused(tmp_path):
    array = jnp.ones(3)
    spread = mock.patch.object(type(array), "is_fully_addressable", False)
    with spread, pytest.raises(UnsupportedLeafError, match="a: it is spread over several proc"):
        export({"a": array}, tmp_path / "m.safetensors")
    assert not os.listdir(tmp_path)
