"""Checkpoints that Orbax wrote: those of old versions, and what the installed one writes now."""

import json
import math
import shutil
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import optax
import pytest
from google.protobuf import struct_pb2, text_format
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from flaxckpt.formats import orbax
from flaxckpt.formats.zarr import ZarrArray
from flaxckpt.testing import differences
from tests import stores
from tests.formats.flax_states import SAMPLES, f32

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import orbax.checkpoint as ocp
    from orbax.checkpoint import v1
    from orbax.checkpoint._src.metadata.pytree_metadata_options import PyTreeMetadataOptions

pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = SAMPLES / "orbax"

# The tree of the samples; before `_METADATA` there was no telling numbers from arrays.
T = {
    "a": f32([0, 1, 2, 3]),
    "b": {"c": np.ones((2, 2), ml_dtypes.bfloat16)},
    "n": np.array([0, 1, 2]),
    "i": 3,
    "f": 2.5,
    "none": None,
    "e": {},
    "l": [f32([1]), 2],
    "t": [f32([0])],
}
OLD_T = T | {"i": np.array(3), "f": np.array(2.5), "l": [f32([1]), np.array(2)]}
KERNEL = f32(
    [
        [1.199439525604248, 0.08757378906011581, 0.2025197446346283],
        [-0.6613278985023499, 0.5143314599990845, 1.1461018323898315],
    ]
)
MOMENT = {"bias": f32([0, 0, 0]), "kernel": f32([[0, 0, 0], [0, 0, 0]])}
TRAIN_STATE = {
    "step": 0,
    "params": {"bias": f32([0, 0, 0]), "kernel": KERNEL},
    "opt_state": [{"count": np.array(0, np.int32), "mu": MOMENT, "nu": MOMENT}, None, None],
}
STRINGS = {"s": "hello", "a": f32([1])}
SAMPLE_TREES = {
    "0.2.7/agg": T,
    "0.2.7/flaxmsgpack/checkpoint_0": T,
    "0.2.7/mgr/3": OLD_T,
    "0.2.7/mgr/3/default": OLD_T,
    "0.2.7/mgr2/3": {"params": OLD_T, "meta": {"x": 1}},
    "0.2.7/ocdbt": OLD_T,
    "0.2.7/pt": OLD_T,
    "0.2.7/ts": TRAIN_STATE | {"step": np.array(0)},
    **{
        f"{version}/{name}": tree
        for version in ("0.4.4", "0.6.4")
        for name, tree in {
            "agg": T,
            "flaxmsgpack/checkpoint_0": T,
            "mgr/3": T,
            "mgr/3/default": T,
            "mgr2/3": {"params": T, "meta": {"x": 1}},
            "ocdbt": T,
            "pt": T,
            "pt_str": STRINGS,
            "ts": TRAIN_STATE,
        }.items()
    },
}


class Pair(NamedTuple):
    mu: Any
    nu: Any


def written():
    """A tree with everything that Orbax can hold."""
    return {
        "a": jnp.arange(4.0),
        "b": {"c": jnp.ones((2, 2), jnp.bfloat16), "a.b": np.int8([1])},
        "scalar": jnp.int32(7),
        "n": np.arange(3),
        "low": [jnp.ones(3, jnp.float8_e4m3fn), jnp.ones(3, jnp.int4)],
        "numbers": [True, 3, 2.5, 1 << 63, -1],
        "half": np.float32(2),
        "empty": [None, {}, [], (), optax.EmptyState()],
        "pair": Pair((jnp.ones(2), 1), None),
        "keys": [jax.random.key(3), jax.random.split(jax.random.key(1, impl="rbg"), 2)],
        "s": "hello",
        "x/y": "z",
        "p~0q": "w",
        "long": np.arange(5000),
    }


def expected():
    """`written` as it comes back on the device."""
    return written() | {
        "half": 2.0,
        "empty": [None, {}, [], (), None],
        "pair": {"mu": [jnp.ones(2), 1], "nu": None},
    }


def save(path, tree, **settings):
    """A flat checkpoint of `PyTreeCheckpointHandler`."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**settings)) as checkpointer:
        checkpointer.save(path, tree)
    return path


def restored(path):
    return flaxckpt.restore(path, as_numpy=True)


def problem(path):
    """What a restore of a damaged checkpoint says, in one line."""
    with pytest.raises(CorruptCheckpointError) as error:
        flaxckpt.restore(path, as_numpy=True)
    assert "\n" not in str(error.value)
    return str(error.value)


def edit(path, change):
    """Changes a JSON file."""
    data = json.loads(path.read_text())
    path.write_text(json.dumps(change(data) or data))


# Samples


@pytest.mark.parametrize("name", SAMPLE_TREES)
def test_samples_of_old_versions_are_read(name):
    found = restored(ROOT / name)
    assert differences(found, SAMPLE_TREES[name]) == []
    assert jax.tree.structure(found) == jax.tree.structure(SAMPLE_TREES[name])


def test_every_sample_is_in_the_table():
    found = {str(p.relative_to(ROOT)) for p in ROOT.glob("**/") if orbax.detect(stores.at(p))}
    inside = {name for name in found if name.endswith("mgr2/3/params")}
    assert found - inside == SAMPLE_TREES.keys()


def test_failed_saves_are_no_checkpoints():
    (failed,) = ROOT.glob("0.2.7/pt_str.orbax-checkpoint-tmp-*")
    assert not orbax.detect(stores.at(failed))
    with pytest.raises(CheckpointNotFoundError, match="Orbax: a directory with _METADATA"):
        flaxckpt.restore(failed)


def test_a_run_names_its_steps():
    with pytest.raises(CheckpointNotFoundError, match="holds checkpoints of another library: 3"):
        flaxckpt.restore(ROOT / "0.6.4/mgr")


# What the installed Orbax writes


@pytest.mark.parametrize(
    "settings", [{}, {"use_ocdbt": False}, {"use_zarr3": True}], ids=["ocdbt", "plain", "zarr3"]
)
def test_all_that_orbax_can_hold_comes_back(tmp_path, settings):
    path = save(tmp_path / "x", written(), **settings)
    assert differences(flaxckpt.restore(path), expected()) == []


def test_rich_types_tell_tuples_and_namedtuples(tmp_path):
    rich = PyTreeMetadataOptions(support_rich_types=True)
    path = save(tmp_path / "x", written(), pytree_metadata_options=rich)
    pair = {"mu": (jnp.ones(2), 1), "nu": None}
    wanted = expected() | {"pair": pair, "empty": [None, {}, [], (), {}]}
    found = flaxckpt.restore(path)
    assert differences(found, wanted) == []
    assert jax.tree.structure(found) == jax.tree.structure(wanted)


def test_standard_checkpoints(tmp_path):
    tree = {"w": jnp.ones((2, 3)), "step": 4, "n": np.arange(2)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "x", tree)
    assert differences(flaxckpt.restore(tmp_path / "x"), tree) == []


def test_a_tree_that_is_one_array(tmp_path):
    for name, settings in {"ocdbt": {}, "plain": {"use_ocdbt": False}}.items():
        path = save(tmp_path / name, jnp.arange(3), **settings)
        assert restored(path).tolist() == [0, 1, 2]


def test_a_deep_tree(tmp_path):
    tree = jnp.ones(1)
    for i in range(60):
        tree = {"d": [tree]} if i % 2 else [{"x": tree}]
    path = save(tmp_path / "x", tree)
    assert differences(flaxckpt.restore(path), tree) == []


def test_a_manager_of_one_item(tmp_path):
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        manager.save(3, args=ocp.args.StandardSave({"w": jnp.ones(3)}), metrics={"loss": 0.5})
    wanted = {"w": f32([1, 1, 1])}
    assert differences(restored(tmp_path / "3"), wanted) == []
    assert differences(restored(tmp_path / "3/default"), wanted) == []


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A step of a manager with an item of each kind."""
    path = tmp_path_factory.mktemp("many")
    np.random.seed(0)
    message = struct_pb2.Struct()
    message["x"] = 1
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(path, options=options) as manager:
        manager.save(
            3,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave({"w": jnp.ones(3)}),
                tree=ocp.args.PyTreeSave({"checkpoint": jnp.ones(1)}),
                meta=ocp.args.JsonSave({"x": 1, "l": [1.5, None, "s", True]}),
                array=ocp.args.ArraySave(jnp.arange(3)),
                key=ocp.args.JaxRandomKeySave(jax.random.key(1)),
                old_key=ocp.args.JaxRandomKeySave(jax.random.PRNGKey(1)),
                numpy=ocp.args.NumpyRandomKeySave(np.random.get_state()),
                numpy_dict=ocp.args.NumpyRandomKeySave(np.random.get_state(legacy=False)),
                proto=ocp.args.ProtoSave(message),
            ),
            metrics={"loss": 0.5},
        )
    return path / "3"


def test_a_manager_of_many_items(many):
    found = flaxckpt.restore(many)
    _, words, pos, has_gauss, gauss = np.random.RandomState(0).get_state()
    state = {"key": words, "pos": pos}
    wanted = {
        "state": {"w": jnp.ones(3)},
        "tree": {"checkpoint": jnp.ones(1)},
        "meta": {"x": 1, "l": [1.5, None, "s", True]},
        "array": jnp.arange(3),
        "key": jax.random.key(1),
        "old_key": jax.random.PRNGKey(1),
        "numpy": ("MT19937", words, pos, has_gauss, gauss),
        "numpy_dict": {
            "bit_generator": "MT19937", "state": state, "has_gauss": has_gauss, "gauss": gauss,
        },
        "proto": found["proto"],
        "metrics": {"loss": 0.5},
    }  # fmt: skip
    assert differences(found, wanted) == []
    assert type(found["numpy"]) is tuple
    np.random.set_state(found["numpy"])
    assert text_format.Parse(found["proto"], struct_pb2.Struct())["x"] == 1


def test_keys_of_a_kind_that_is_not_stored_come_back_as_words(tmp_path):
    with jax.default_prng_impl("rbg"), ocp.CheckpointManager(tmp_path, item_names=("k",)) as run:
        run.save(3, args=ocp.args.Composite(k=ocp.args.JaxRandomKeySave(jax.random.key(1))))
    wanted = jax.random.key_data(jax.random.key(1, impl="rbg"))
    assert differences(flaxckpt.restore(tmp_path / "3"), {"k": wanted}) == []


def test_v1_checkpoints(tmp_path):
    v1.save(tmp_path / "one", {"w": jnp.ones(3), "l": [1, (2.0,)]})
    assert differences(
        flaxckpt.restore(tmp_path / "one"), {"w": jnp.ones(3), "l": [1, [2.0]]}
    ) == []  # fmt: skip
    v1.save_checkpointables(tmp_path / "two", {"a": {"w": jnp.ones(2)}, "b": {"s": "x"}})
    wanted = {"a": {"w": jnp.ones(2)}, "b": {"s": "x"}}
    assert differences(flaxckpt.restore(tmp_path / "two"), wanted) == []


def test_v1_json_items(tmp_path, many):
    path = shutil.copytree(many, tmp_path / "3")
    (path / "meta/metadata").rename(path / "meta/data.json")
    assert restored(path)["meta"]["x"] == 1


def test_v1_partial_saves(tmp_path):
    v1.partial.save(tmp_path / "p", {"a": jnp.arange(600.0), "b": {"c": jnp.ones(2)}})
    v1.partial.save(tmp_path / "p", {"b": {"d": jnp.zeros(700)}, "i": 1})
    pending = list(tmp_path.glob("p.partial_save/*"))
    assert len(pending) == 2
    states = [path / "state" for path in pending]
    assert not any(
        orbax.detect(stores.at(path)) for path in (*pending, *states, tmp_path / "p.partial_save")
    )
    v1.partial.finalize(tmp_path / "p")
    assert len(list((tmp_path / "p/state").glob("ocdbt.process_*"))) == 2
    wanted = {"a": jnp.arange(600.0), "b": {"c": jnp.ones(2), "d": jnp.zeros(700)}, "i": 1}
    assert differences(flaxckpt.restore(tmp_path / "p"), wanted) == []


def test_items_of_unknown_classes_are_left_out(tmp_path, many):
    path = shutil.copytree(many, tmp_path / "3")
    (path / "stateful").mkdir()
    (path / "stateful/position.bin").write_bytes(b"x")
    assert "stateful" not in restored(path)
    for item in path.glob("*/"):
        if item.name != "stateful":
            shutil.rmtree(item)
    assert "has no item that can be read (only stateful)" in problem(path)


def test_an_item_that_is_being_deleted_is_gone(tmp_path, many):
    path = shutil.copytree(many, tmp_path / "3")
    (path / "_CHECKPOINT_DELETION").write_text('{"checkpointable_name": "state"}')
    shutil.rmtree(path / "state/d")
    assert "state" not in restored(path)
    (path / "_CHECKPOINT_DELETION").write_text("{}")
    assert "_CHECKPOINT_DELETION is damaged: 'checkpointable_name' is missing" in problem(path)


def test_unfinished_items_are_left_out(tmp_path, many):
    path = shutil.copytree(many, tmp_path / "3")
    (path / "state").rename(path / "state.orbax-checkpoint-tmp")
    assert "state" not in " ".join(restored(path))
    assert not orbax.detect(stores.at(path / "state.orbax-checkpoint-tmp"))


# Old forms that the samples lack


def test_the_strings_of_orbax_0_3(tmp_path):
    save(tmp_path / "x", {"a": jnp.ones(2)}, use_ocdbt=False)
    (tmp_path / "x/_METADATA").unlink()
    structure = {"a": "PLACEHOLDER://a", "s": ["AGGREGATED://s.0", "PLACEHOLDER://s.1"], "n": 1}
    (tmp_path / "x/checkpoint").write_bytes(msgpack.packb(structure))
    (tmp_path / "x/s.0").mkdir()
    (tmp_path / "x/s.0/_strings.json").write_text('{"s.0": "hello", "s.1": "there"}')
    wanted = {"a": f32([1, 1]), "s": ["hello", "there"], "n": 1}
    assert differences(restored(tmp_path / "x"), wanted) == []


def test_missing_chunks_of_files_that_do_not_say_are_zeros(tmp_path):
    path = save(tmp_path / "x", {"a": jnp.ones(2)}, use_ocdbt=False)
    (path / "a/0").unlink()
    assert "the leaf a is damaged" in problem(path)
    edit(path / "_METADATA", lambda d: d.pop("store_array_data_equal_to_fill_value") and None)
    assert restored(path)["a"].tolist() == [0, 0]


def test_files_that_do_not_say_whether_there_is_a_database(tmp_path):
    for name, settings in {"ocdbt": {}, "plain": {"use_ocdbt": False}}.items():
        path = save(tmp_path / name, {"a": jnp.ones(2)}, **settings)
        edit(path / "_METADATA", lambda d: {"tree_metadata": d["tree_metadata"]})
        assert restored(path)["a"].tolist() == [1, 1]


def test_the_item_of_an_array_is_known_without_the_class(tmp_path, many):
    path = shutil.copytree(many, tmp_path / "3")
    (path / "_CHECKPOINT_METADATA").unlink()
    found = restored(path)
    assert found["array"].tolist() == [0, 1, 2]
    assert found["tree"]["checkpoint"].tolist() == [1]


# Reading in parts, and from buckets


@pytest.mark.parametrize("scheme", stores.BUCKETS)
@pytest.mark.parametrize("name", ["0.2.7/pt", "0.6.4/mgr2/3"])
def test_checkpoints_in_buckets(tmp_path, scheme, name):
    with stores.opened(scheme, None) as store:
        for file in (p for p in (ROOT / name).rglob("*") if p.is_file()):
            store.write("run/3", str(file.relative_to(ROOT / name)), file.read_bytes())
        if scheme == "gcs":  # where nothing is renamed, this is what finishes a save
            with pytest.raises(CheckpointNotFoundError):
                flaxckpt.restore(store.url("run/3"), options=store.options(retries=0))
            store.write("run/3", "commit_success.txt", b"")
        found = flaxckpt.restore(store.url("run/3"), as_numpy=True, options=store.options())
        assert differences(found, SAMPLE_TREES[name]) == []
        chunk = "a/0" if name == "0.2.7/pt" else "params/manifest.ocdbt"
        store.write("run/3", chunk, b"damaged")
        with pytest.raises(CorruptCheckpointError):
            flaxckpt.restore(store.url("run/3"), as_numpy=True, options=store.options())


def test_a_sharded_target_reads_every_element_once(tmp_path, monkeypatch):
    values = np.arange(64.0, dtype=np.float32).reshape(16, 4)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    sharded = jax.device_put(values, NamedSharding(mesh, P("x")))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "x", {"w": sharded})
    regions = []
    read = ZarrArray.read
    monkeypatch.setattr(
        ZarrArray, "read", lambda self, wanted: regions.extend(wanted) or read(self, wanted)
    )
    other = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(other, P("x", "y"))
    target = {"w": jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=sharding)}
    found = flaxckpt.restore(tmp_path / "x", target)["w"]
    assert found.sharding == sharding
    assert np.array_equal(found, values)
    assert sum(math.prod(region.shape) for region in regions) == values.size


def test_a_train_state_takes_its_own_types():
    tx = optax.adamw(1e-3)
    params = {"bias": jnp.ones(3), "kernel": jnp.ones((2, 3))}
    target = {"step": 5, "params": params, "opt_state": tx.init(params)}
    found = flaxckpt.restore(ROOT / "0.6.4/ts", target)
    assert jax.tree.structure(found) == jax.tree.structure(target)
    assert np.array_equal(found["params"]["kernel"], KERNEL)
    assert found["step"] == 0


# Damage


@pytest.fixture
def flat(tmp_path):
    return save(tmp_path / "x", written(), use_ocdbt=False)


def entry(data, name):
    """The entry of a leaf in `_METADATA`."""
    return data["tree_metadata"][name]


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda d: d.pop("tree_metadata"), "'tree_metadata' is missing, and must be a dict"),
        (lambda d: {"tree_metadata": []}, "'tree_metadata' is a list, and must be a dict"),
        (lambda d: {"tree_metadata": {}}, "'tree_metadata' has no leaves"),
        (lambda d: [d], "there is a list where an object with 'tree_metadata' belongs"),
        (lambda d: d.update(use_zarr3="no"), "'use_zarr3' is a str, and must be a bool"),
        (lambda d: d.update(use_ocdbt=1), "'use_ocdbt' is a int, and must be a bool"),
        (
            lambda d: entry(d, "('a',)").pop("key_metadata") and None,
            "'key_metadata' is missing, and must be a list",
        ),
        (
            lambda d: entry(d, "('a',)")["key_metadata"][0].update(key=3),
            "'key' is a int, and must be a str",
        ),
        (
            lambda d: entry(d, "('a',)")["key_metadata"][0].update(key_type=1),
            "the key 'a' of type 1 is neither an index nor a name",
        ),
        (
            lambda d: entry(d, "('a',)")["key_metadata"][0].update(key="0", key_type=1),
            "a container has indices and names",
        ),
        (
            lambda d: entry(d, "('a',)")["key_metadata"][0].update(key="b"),
            "'b.a.b' is within another leaf",
        ),
        (
            lambda d: entry(d, "('a',)").update(key_metadata=[{"key": "k", "key_type": 2}] * 200),
            "a leaf is 200 levels deep",
        ),
        (
            lambda d: entry(d, "('a',)")["key_metadata"][0].update(key="n"),
            "it has two leaves of the same key path",
        ),
        (
            lambda d: entry(d, "('a',)").update(value_metadata={"value_type": None}),
            "'value_type' is a NoneType, and must be a str",
        ),
        (lambda d: d.update(value_metadata_tree="{"), "it is not JSON: Expecting property name"),
    ],
    ids=range(15),
)
def test_damaged_metadata_say_what_is_wrong(flat, change, wanted):
    def changed(data):
        result = change(data)
        return result if isinstance(result, list) or "tree_metadata" in (result or ()) else None

    edit(flat / "_METADATA", changed)
    assert f"{flat}/_METADATA is damaged: {wanted}" in problem(flat)


@pytest.mark.parametrize("text", ["", "{", "null", "[" * 100_000, "ÿ", '{"a": ' * 600])
def test_metadata_that_are_no_json(flat, text):
    (flat / "_METADATA").write_text(text, "latin-1")
    assert problem(flat).startswith(f"{flat}/_METADATA is damaged: ")


def test_metadata_cut_at_every_length(flat):
    data = (flat / "_METADATA").read_bytes()
    for length in range(0, len(data) - 1, 97):
        (flat / "_METADATA").write_bytes(data[:length])
        assert problem(flat).startswith(f"{flat}/_METADATA is damaged: it is not JSON")


@pytest.mark.parametrize("key", ["../outside", "..", "/etc/passwd", "a/../../b"])
def test_no_name_leads_out_of_the_checkpoint(flat, key):
    edit(flat / "_METADATA", lambda d: entry(d, "('a',)")["key_metadata"][0].update(key=key))
    assert f"names {key!r}, which is not inside of it" in problem(flat)


@pytest.mark.parametrize("name", ["../outside", "/etc"])
def test_no_placeholder_leads_out_of_the_checkpoint(flat, name):
    (flat / "_METADATA").unlink()
    (flat / "checkpoint").write_bytes(msgpack.packb({"a": f"PLACEHOLDER://{name}"}))
    assert f"names {name!r}, which is not inside of it" in problem(flat)


def test_missing_metadata_are_named(tmp_path):
    path = save(tmp_path / "x", {"a": jnp.ones(2)})
    (path / "_METADATA").unlink()
    assert f"{path} is incomplete: _METADATA is missing" in problem(path)


def test_a_missing_database_is_named(tmp_path):
    path = save(tmp_path / "x", {"a": jnp.ones(2)})
    (path / "manifest.ocdbt").unlink()
    assert f"{path} is incomplete: manifest.ocdbt is missing" in problem(path)


def test_pruned_files_of_processes_are_missed(tmp_path):
    path = save(tmp_path / "x", {"a": np.random.default_rng(0).random(3000), "b": 1})
    shutil.rmtree(path / "ocdbt.process_0")
    assert "the leaf a is damaged: the array 'a' of" in problem(path)


def test_missing_and_damaged_strings(flat):
    (flat / "_strings.json").write_text('{"s": 1}')
    assert f"{flat}/_strings.json is damaged: it has no string " in problem(flat)
    (flat / "_strings.json").unlink()
    assert f"is incomplete: {flat}/_strings.json is missing" in problem(flat)


@pytest.mark.parametrize("text", ["{}", "[1]", '{"array_metadatas": [3]}', "{"])
def test_damaged_array_metadata(flat, text):
    (flat / "array_metadatas/process_0").write_text(text)
    assert f"{flat}/array_metadatas/process_0 is damaged: " in problem(flat)


def test_keys_that_are_no_keys(flat):
    def wrong(data):
        metadata = data["array_metadatas"][0]["array_metadata"]
        metadata["ext_metadata"] = {"random_key_impl": "rbg"}

    edit(flat / "array_metadatas/process_0", wrong)
    assert f"{flat}/a is said to be a PRNG key, but is float32[4]" in problem(flat)


@pytest.mark.parametrize("name", ["0.2.7/pt", "0.2.7/agg", "0.4.4/agg"])
def test_truncated_msgpack(tmp_path, name):
    path = shutil.copytree(ROOT / name, tmp_path / "x")
    data = (path / "checkpoint").read_bytes()
    for length in (1, len(data) // 2, len(data) - 1):
        (path / "checkpoint").write_bytes(data[:length])
        assert f"the msgpack file {path}/checkpoint is damaged: " in problem(path)


def test_an_inline_value_that_is_missing(tmp_path):
    path = shutil.copytree(ROOT / "0.4.4/agg", tmp_path / "x")
    (path / "checkpoint").write_bytes(msgpack.packb({"b": 1}))
    assert f"{path}/checkpoint is damaged: it has no value 'a'" in problem(path)


def test_damaged_items(tmp_path, many):
    for name, text, wanted in (
        ("meta/metadata", "{", "meta/metadata is damaged: it is not JSON"),
        ("key/jax_random_key_metadata/metadata", "{}", "'typed' is missing, and must be a bool"),
        ("_CHECKPOINT_METADATA", "3", "_CHECKPOINT_METADATA is damaged: it is not a JSON object"),
        ("proto/proto.pbtxt", "ÿ", "proto.pbtxt is damaged: it is not text"),
    ):
        path = shutil.copytree(many, tmp_path / name.replace("/", "-") / "3")
        (path / name).write_text(text, "latin-1")
        assert wanted in problem(path)


# What is not Orbax's


def test_flaxckpt_and_others_are_left_alone(tmp_path):
    flaxckpt.save(tmp_path / "ours", {"w": jnp.ones(2)})
    assert not orbax.detect(stores.at(tmp_path / "ours"))
    assert not orbax.detect(stores.at(tmp_path / "ours/state"))
    for path in SAMPLES.rglob("*"):
        if ROOT not in path.parents:
            assert not orbax.detect(stores.at(path)), path


def test_a_damaged_checkpoint_of_ours_is_still_ours(tmp_path):
    flaxckpt.save(tmp_path / "ours", {"w": jnp.ones(2)})
    metadata = tmp_path / "ours/state/_METADATA"
    metadata.write_bytes(metadata.read_bytes()[:-3])
    assert not orbax.detect(stores.at(tmp_path / "ours"))
    assert not orbax.detect(stores.at(tmp_path / "ours/state"))
