"""Checkpoints of T5X before it used Orbax."""

import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import optax
import pytest
import tensorstore as ts
from flax import serialization
from flax.training import train_state
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt import errors
from flaxckpt.formats import t5x
from flaxckpt.formats.detect import find_reader
from flaxckpt.sharding.chunks import Region
from flaxckpt.source.leaf import Leaf
from tests import stores
from tests.formats.flax_states import SAMPLES, f32, moments
from tests.trees import assert_same

T5X = SAMPLES / "t5x"

# They were saved as bfloat16 and are float32: T5X casts parameters.
PARAMS = {
    "Dense_0": {
        "bias": f32([-0.0009994507] * 2),
        "kernel": f32([[-0.953125, 0.43554688], [-0.796875, -0.4921875], [0.53125, 0.73828125]]),
    },
    "Dense_1": {
        "bias": f32([-0.0009994507] * 3),
        "kernel": f32(
            [
                [0.0006637573, 0.15917969, 0.08935547],
                [-0.421875, 0.3203125, 0.43554688],
                [-0.55859375, -0.36132812, 0.37109375],
                [0.23925781, 0.21972656, 0.328125],
            ]
        ),
    },
}
SAMPLE = {
    "params": PARAMS,
    "step": np.int32(1),
    "opt_state": {"0": {"count": np.array(1, np.int32), "mu": moments(0.1), "nu": moments(0.001)}},
    "flax_mutables": {"batch_stats": {"mean": f32([0, 0, 0])}},
}
# The first row of T5X's own test data, by its bits.
KERNEL = "38e1e61fc93fc33ff2cc5ebd466ce63f6f46532d1b13e03f7f891fa999a4e53f8e0156bae0c3da3f"


def spec(name, data, *, dtype=None, driver="file", old=False):
    """What T5X writes into the msgpack file for an array."""
    found = {
        "driver": "zarr",
        "dtype": dtype or data.dtype.name,
        "kvstore": {"driver": driver} | ({} if old else {"path": name}),
        "metadata": {
            "chunks": [max(1, n // 2) for n in data.shape],
            "compressor": {"id": "gzip", "level": 1},
            "shape": list(data.shape),
        },
    }
    return found | ({"path": name} if old else {})


def write_array(directory, name, data, chunks):
    """A zarr array, with other chunks and another compression than the spec says."""
    metadata = {"chunks": list(chunks), "compressor": {"id": "zstd"}, "shape": list(data.shape)}
    store = ts.open(
        {
            "driver": "zarr",
            "dtype": data.dtype.name,
            "kvstore": {"driver": "file", "path": str(directory / name)},
            "metadata": metadata,
        },
        create=True,
    ).result()
    store.write(data).result()


def write(directory, optimizer, version=3):
    directory.mkdir(exist_ok=True)
    tree = {"version": version, "optimizer": optimizer}
    (directory / "checkpoint").write_bytes(serialization.msgpack_serialize(tree, in_place=True))
    return directory


BIG = np.arange(64 * 16, dtype=np.float32).reshape(64, 16)


@pytest.fixture
def step(tmp_path):
    """A step with one partitioned parameter of 8 x 2 chunks."""
    state = {"step": np.int32(5), "param_states": {"0": {"mu": {"w": None}}}}
    path = write(
        tmp_path / "checkpoint_5", {"target": {"w": spec("target.w/", BIG)}, "state": state}
    )
    write_array(path, "target.w", BIG, (8, 8))
    return path


def restored(path):
    return flaxckpt.restore(path, as_numpy=True)


@pytest.mark.parametrize("path", ["checkpoint_1", "checkpoint_1/checkpoint"])
def test_sample(path):
    assert_same(restored(T5X / path), SAMPLE)


def test_sample_of_t5x_itself():
    found = restored(T5X / "real_tiny_t5" / "checkpoint_1")
    kernel = found["opt_state"].pop("kernel")
    state = {"bias": f32([1] * 5), "step": np.array(1, np.int32)}
    assert_same(found, {"params": {}, "opt_state": state, "step": np.int32(1)})
    assert (kernel.dtype, kernel.shape) == (np.float64, (10, 5))
    assert_same(kernel[0], np.frombuffer(bytes.fromhex(KERNEL)))
    assert kernel[9, 4] == 0.9327678691391378


def test_only_t5x_is_claimed(step, tmp_path):
    assert find_reader(stores.at(step)) is t5x
    assert find_reader(stores.at(step / "checkpoint")) is t5x
    assert find_reader(stores.at(T5X / "real_tiny_t5" / "checkpoint_1")) is t5x
    assert not t5x.detect(stores.at(tmp_path))
    for sample in ("flax_legacy/checkpoint_1", "clu", "orbax/0.2.7/pt", "orbax/0.2.7/agg"):
        assert not t5x.detect(stores.at(SAMPLES / sample))


@pytest.mark.parametrize(
    "tree", [{"version": 3, "optimizer": {}, "x": 1}, {"version": 3, "params": 1}, {"optimizer": 3}]
)
def test_other_keys_are_not_claimed(tmp_path, tree):
    (tmp_path / "checkpoint").write_bytes(serialization.to_bytes(tree))
    assert not t5x.detect(stores.at(tmp_path))


def test_unfinished_directories_are_not_claimed(step):
    path = step.rename(f"{step}.tmp-1700000000")
    assert find_reader(stores.at(path)) is None


def test_chunks_and_compression_are_those_of_the_array(step):
    expected = {"params": {"w": BIG}, "step": np.int32(5)}
    assert_same(restored(step), expected | {"opt_state": {"0": {"mu": {"w": None}}}})


@pytest.mark.parametrize("driver", ["file", "gfile", "gcs"])
@pytest.mark.parametrize("old", [False, True], ids=["kvstore", "top level"])
def test_paths_are_relative_whatever_the_driver(step, driver, old):
    array = spec("target.w", BIG, driver=driver, old=old)
    array["kvstore"]["bucket"] = "t5x-dummy-bucket"
    assert_same(restored(write(step, {"target": array})), {"params": BIG})


def test_the_spec_stands_in_for_missing_metadata(step):
    array = spec("target.w/", BIG)
    array["metadata"] |= {"chunks": [8, 8], "compressor": {"id": "zstd"}}
    (step / "target.w" / ".zarray").unlink()
    assert_same(restored(write(step, {"target": array})), {"params": BIG})


def test_other_files_are_tolerated(step):
    (step / "train_ds-000-of-004.index").write_bytes(b"x")
    (step / "train_ds-000-of-004.data-00000-of-00001").write_bytes(b"x")
    (step / "PINNED").touch()
    assert_same(restored(step)["params"]["w"], BIG)


@pytest.mark.parametrize("version", [2, 3])
def test_bfloat16_as_uint16(step, version):
    values = np.array([[1, -2], [0.5, 3]], ml_dtypes.bfloat16)
    write_array(step, "words", values.view(np.uint16), (1, 2))
    dtype = "uint16" if version == 2 else "bfloat16"
    found = restored(write(step, {"target": spec("words", values, dtype=dtype)}, version))
    assert_same(found, {"params": values})


def test_bfloat16_in_parts(step):
    values = np.arange(8, dtype=ml_dtypes.bfloat16).reshape(4, 2)
    write_array(step, "words", values.view(np.uint16), (1, 2))
    leaf = t5x.read(stores.at(write(step, {"target": spec("words", values, dtype="uint16")}, 2)))[
        "params"
    ]
    assert (leaf.spec.dtype, leaf.array.shape, leaf.array.chunks) == ("bfloat16", (4, 2), (1, 2))
    assert leaf.array.sharding is None
    (part,) = leaf.array.read([Region((2, 1), (2, 1))])
    assert_same(np.array(part), values[2:, 1:])


def test_uint16_of_version_3_stays(step):
    values = np.arange(4, dtype=np.uint16)
    write_array(step, "words", values, (2,))
    assert_same(restored(write(step, {"target": spec("words", values)})), {"params": values})


def test_native_bfloat16(step):
    values = np.arange(4, dtype=ml_dtypes.bfloat16)
    write_array(step, "b", values, (2,))
    assert_same(restored(write(step, {"target": spec("b/", values)})), {"params": values})


def test_names_of_a_train_state(step):
    optimizer = {
        "target": {"w": 1},
        "state": {"step": 2, "param_states": {"0": {"mu": 3}}, "more": 4},
        "flax_mutables": {"batch_stats": 5},
    }
    assert restored(write(step, optimizer)) == {
        "params": {"w": 1},
        "step": 2,
        "opt_state": {"0": {"mu": 3}},
        "state": {"more": 4},
        "flax_mutables": {"batch_stats": 5},
    }


def test_onto_a_train_state():
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), PARAMS)
    new = train_state.TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))
    # The state has no place for `flax_mutables`; a target must have one.
    target = {
        "step": np.int32(0),
        "params": params,
        "opt_state": {"0": new.opt_state[0]},
        "flax_mutables": {"batch_stats": {"mean": jnp.ones(3)}},
    }
    found = flaxckpt.restore(T5X / "checkpoint_1", target)
    assert type(found["opt_state"]["0"]) is type(new.opt_state[0])
    assert_same(jax.tree.map(np.asarray, found["params"]), PARAMS)
    assert_same(
        np.asarray(found["opt_state"]["0"].mu["Dense_0"]["kernel"]),
        moments(0.1)["Dense_0"]["kernel"],
    )


def test_onto_a_mesh_each_chunk_is_read_once(step):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("x"))
    target = {
        "params": {"w": jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=rows)},
        "step": np.int32(0),
        "opt_state": {"0": {"mu": {"w": None}}},
    }
    before = chunk_reads()
    found = flaxckpt.restore(step, target)
    # 16 chunks, and the metadata.
    assert chunk_reads() - before == 16 + 1
    assert found["params"]["w"].sharding == rows
    assert_same(np.asarray(found["params"]["w"]), BIG)


def chunk_reads():
    """How many files TensorStore has read."""
    name = "/tensorstore/kvstore/file/open_read"
    found = ts.experimental_collect_matching_metrics(name)
    return sum(value["value"] for metric in found for value in metric["values"])


def test_only_the_chunks_that_are_needed_are_read(step):
    leaf = t5x.read(stores.at(step))["params"]["w"]
    assert isinstance(leaf, Leaf)
    assert leaf.array.chunks == (8, 8)
    before = chunk_reads()
    parts = leaf.array.read([Region((8, 0), (8, 16)), Region((60, 3), (4, 2))])
    assert chunk_reads() - before == 3
    assert_same([np.array(p) for p in parts], [BIG[8:16], BIG[60:, 3:5]])


def test_nothing_is_read_before_it_is_needed(step):
    for file in (step / "target.w").glob("[0-9]*"):
        file.unlink()
    leaf = t5x.read(stores.at(step))["params"]["w"]
    with pytest.raises(errors.CorruptCheckpointError, match=r"target\.w"):
        leaf.array.read([Region((0, 0), (1, 1))])


@pytest.mark.parametrize("name", ["target.w/7.1", "target.w/.zarray", "target.w", "checkpoint"])
def test_cut_and_missing_files(step, name):
    path = step / name
    if path.is_file() and name != "checkpoint":
        path.write_bytes(path.read_bytes()[:-5])
        with pytest.raises(errors.CorruptCheckpointError, match=r"target\.w"):
            restored(step)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    error = "CheckpointNotFoundError" if name == "checkpoint" else "CorruptCheckpointError"
    if name == "target.w/.zarray":
        return  # the spec stands in for it, with other chunks
    with pytest.raises(getattr(errors, error)):
        restored(step)


def test_missing_metadata_with_a_spec_of_other_chunks(step):
    (step / "target.w" / ".zarray").unlink()
    with pytest.raises(errors.CorruptCheckpointError):
        restored(step)


@pytest.mark.parametrize("name", ["../checkpoint_5/target.w", "/etc/", "a/../../b", "..", "", "/"])
def test_paths_that_leave_the_directory(step, name):
    with pytest.raises(errors.CorruptCheckpointError):
        restored(write(step, {"target": spec(name, BIG)}))


@pytest.mark.parametrize(
    "change",
    [
        {"driver": "n5"},
        {"driver": np.ones(2)},
        {"kvstore": "file:///etc/"},
        {"kvstore": {"driver": "file", "path": 3}},
        {"kvstore": {"driver": "file", "path": np.ones(2)}},
        {"metadata": {"shape": [64, 15]}},
        {"metadata": {"shape": [64, 16, 1]}},
    ],
    ids=str,
)
def test_specs_that_are_damaged(step, change):
    with pytest.raises(errors.CorruptCheckpointError):
        restored(write(step, {"target": spec("target.w", BIG) | change}))


@pytest.mark.parametrize("change", [{"dtype": np.ones(2)}, {"metadata": 3}], ids=str)
def test_what_the_array_itself_knows_is_not_needed(step, change):
    found = restored(write(step, {"target": spec("target.w", BIG) | change}))
    assert_same(found, {"params": BIG})


@pytest.mark.parametrize("version", [0, 1, 4, "3", 3.0, np.arange(2)], ids=str)
def test_other_versions(step, version):
    write(step, {"target": 1}, version)
    with pytest.raises(errors.UnsupportedFormatError, match="reads 2 and 3"):
        t5x.read(stores.at(step))


@pytest.mark.parametrize("optimizer", [1, {"state": 3}, None], ids=str)
def test_no_state(step, optimizer):
    with pytest.raises(errors.CorruptCheckpointError, match="not hold a state"):
        restored(write(step, optimizer))


def test_a_damaged_file(step):
    data = (step / "checkpoint").read_bytes()
    (step / "checkpoint").write_bytes(data[:-1])
    with pytest.raises(errors.CorruptCheckpointError, match="checkpoint is damaged"):
        restored(step)
    (step / "checkpoint").write_bytes(msgpack.packb([1]))
    with pytest.raises(errors.CorruptCheckpointError, match="not what T5X writes"):
        t5x.read(stores.at(step))
