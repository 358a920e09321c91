"""One checkpoint in several calls: as if it had been saved at once, or as if nobody had tried."""

import contextlib
import errno
import itertools
import json
import os
import signal
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import freeze
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt import Options, PartialSave, errors
from flaxckpt.store import local, ocdbt
from flaxckpt.store.local import LocalStore
from tests import stores
from tests.durability import disks
from tests.processes import run, run_fresh, start
from tests.trees import assert_same

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import orbax.checkpoint as ocp
    from orbax.checkpoint import v1

FAST = Options(fsync=False)
# An `add` waits until what it was given is taken, but for so much.
SMALL = Options(fsync=False, chunk_bytes=4096, max_host_bytes=4 * 4096)
PARAMS = {"dense": {"kernel": np.ones((4, 8)), "bias": np.zeros(8)}}


def save_in_parts(path, *parts, options=FAST, **how):
    """Saves `parts`, one by one."""
    with PartialSave(path, options=options, **how) as saving:
        for part in parts:
            saving.add(part)


def assert_nothing_at(path):
    """There is no checkpoint at `path`, nor anything that somebody left beside it."""
    assert not path.exists()
    assert os.listdir(path.parent) == []
    with pytest.raises(errors.CheckpointNotFoundError):
        flaxckpt.restore(path)


def metadata_of(path):
    """What a checkpoint says of its tree, but for what differs from save to save."""
    found = json.loads((path / "state/_METADATA").read_text())
    return found["tree_metadata"], {
        name: value
        for name, value in found["flaxckpt"].items()
        if name not in ("attempt", "files", "crc32c")
    }


@contextlib.contextmanager
def held_up(directory):
    """Saves into `directory` do not get on during the block: a save first locks it."""
    with local.lock(directory, shared=False):
        yield


# As if saved at once


def trained():
    return TrainState.create(apply_fn=None, params=PARAMS, tx=optax.adamw(1e-3))


def on_mesh(array, *spec):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


# The whole tree, and the parts that make it.
TREES = {
    "levels": lambda: (
        {"a": {"b": {"c": jnp.ones(3), "d": np.zeros(2)}, "e": 1}, "f": "text"},
        [{"a": {"b": {"c": jnp.ones(3)}}}, {"f": "text"}, {"a": {"b": {"d": np.zeros(2)}, "e": 1}}],
    ),
    "another order": lambda: (
        {"a": jnp.ones(3), "b": jnp.zeros(2), "c": np.ones(1)},
        [{"c": np.ones(1)}, {"b": jnp.zeros(2)}, {"a": jnp.ones(3)}],
    ),
    "empty nodes": lambda: (
        {"a": {"b": {}, "c": 1}, "none": None, "list": [], "tuple": (), "d": {"e": {}}},
        [{"a": {}}, {"a": {"b": {}}}, {"a": {"c": 1}}, {"none": None, "list": []}, {"tuple": ()},
         {"d": {"e": {}}}, {"d": {"e": {}}}, {}],
    ),
    "kinds": lambda: (
        {"key": jax.random.key(1), "n": 7, "x": 0.1, "b": True, "s": np.float32(2), "t": b"x",
         "u": np.array(["a", "b"]), "g": np.random.default_rng(3), "w": jnp.asarray(1.0)},
        [{"key": jax.random.key(1), "n": 7}, {"x": 0.1, "b": True}, {"s": np.float32(2)},
         {"t": b"x", "u": np.array(["a", "b"])}, {"g": np.random.default_rng(3)},
         {"w": jnp.asarray(1.0)}],
    ),
    "inner nodes that are no dicts": lambda: (
        {"train": trained(), "ema": freeze(PARAMS), "list": [jnp.ones(2), {"a": 1}],
         "box": nn.Partitioned(jnp.ones(2), ("x",)), "model": nnx.Linear(2, 3, rngs=nnx.Rngs(0))},
        [{"model": nnx.Linear(2, 3, rngs=nnx.Rngs(0))}, {"train": trained()},
         {"list": [jnp.ones(2), {"a": 1}]}, {"ema": freeze(PARAMS)},
         {"box": nn.Partitioned(jnp.ones(2), ("x",))}],
    ),
    "integer keys": lambda: (
        {10: jnp.ones(2), 9: jnp.zeros(2)},
        [{10: jnp.ones(2)}, {9: jnp.zeros(2)}],
    ),
    "sharded": lambda: (
        {"a": on_mesh(jnp.arange(16.0), "x"), "b": on_mesh(jnp.ones((4, 4)), None, "y")},
        [{"b": on_mesh(jnp.ones((4, 4)), None, "y")}, {"a": on_mesh(jnp.arange(16.0), "x")}],
    ),
    "large": lambda: (
        {"a": np.arange(30_000.0), "b": jnp.arange(50_000.0).reshape(50, 1000)},
        [{"a": np.arange(30_000.0)}, {"b": jnp.arange(50_000.0).reshape(50, 1000)}],
    ),
    "one part": lambda: (trained(), [trained()]),
    "an array": lambda: (jnp.arange(5.0), [jnp.arange(5.0)]),
    "a module": lambda: (nnx.Linear(2, 3, rngs=nnx.Rngs(0)), [nnx.Linear(2, 3, rngs=nnx.Rngs(0))]),
}  # fmt: skip


@pytest.mark.parametrize("options", [FAST, SMALL], ids=["fast", "small"])
@pytest.mark.parametrize("name", TREES)
def test_it_is_the_checkpoint_of_one_save(name, options, tmp_path):
    whole, parts = TREES[name]()
    flaxckpt.save(tmp_path / "at once", whole, options=options)
    save_in_parts(tmp_path / "in parts", *parts, options=options)
    assert metadata_of(tmp_path / "in parts") == metadata_of(tmp_path / "at once")
    files = [
        {str(f.relative_to(p)) for f in p.rglob("*") if f.is_file() and f.parent.name != "d"}
        for p in (tmp_path / "in parts", tmp_path / "at once")
    ]
    assert files[0] == files[1]
    assert flaxckpt.verify(tmp_path / "in parts", strict=True).problems == ()
    assert_same(flaxckpt.restore(tmp_path / "in parts", whole), whole)
    assert_same(flaxckpt.restore(tmp_path / "in parts"), flaxckpt.restore(tmp_path / "at once"))


names = st.sampled_from("abc")
trees = st.recursive(
    st.integers(0, 9), lambda inner: st.dictionaries(names, inner, max_size=3), max_leaves=8
).filter(lambda tree: isinstance(tree, dict))


def divided(tree, number, count, place=()):
    """The part of `tree` with every leaf whose place is `number`'s; empty nodes in all."""
    part = {}
    for key, value in tree.items():
        where = (*place, key)
        if isinstance(value, dict):
            part[key] = divided(value, number, count, where)
        elif sum(map(ord, "".join(where))) % count == number:
            part[key] = np.full(value + 1, value)
    return part


@given(trees, st.integers(2, 4))
@settings(max_examples=25)
def test_any_dicts_within_dicts_in_parts_are_the_whole(tmp_path_factory, tree, count):
    path = tmp_path_factory.mktemp("parts")
    save_in_parts(path / "x", *[divided(tree, number, count) for number in range(count)])
    assert_same(flaxckpt.restore(path / "x"), divided(tree, 0, 1))


@pytest.mark.filterwarnings("ignore")
def test_orbax_reads_it(tmp_path):
    whole, parts = TREES["sharded"]()
    whole, parts = whole | {"key": jax.random.key(3)}, [*parts, {"key": jax.random.key(3)}]
    save_in_parts(tmp_path / "x", *parts)
    with ocp.StandardCheckpointer() as checkpointer:
        assert_same(checkpointer.restore(tmp_path / "x/state", whole), whole)
    assert_same(v1.load(tmp_path / "x")["key"], jax.random.key(3))


def test_metadata_and_the_times_are_kept(tmp_path):
    save_in_parts(tmp_path / "x", {"a": 1}, metadata={"from": "elsewhere"})
    described = json.loads((tmp_path / "x/_CHECKPOINT_METADATA").read_text())
    assert described["custom_metadata"]["from"] == "elsewhere"
    assert 0 < described["init_timestamp_nsecs"] <= described["commit_timestamp_nsecs"]


@pytest.mark.parametrize("options", [FAST, SMALL], ids=["fast", "little memory"])
def test_items_are_saved_as_they_are_when_the_block_is_entered(options, tmp_path):
    ema, config, rng = np.arange(30_000.0), {"layers": 12}, np.random.default_rng(3)
    items = {"ema": {"w": ema, "on_device": jnp.arange(9)}, "config": config, "rng": rng}
    expected = rng.bit_generator.state
    with PartialSave(tmp_path / "x", items=items, options=options) as parts:
        ema[:], config["layers"] = -1, 13
        rng.random()
        parts.add({"params": {"kernel": np.ones(2000)}})
        parts.add({"step": 7})
    assert_same(flaxckpt.restore(tmp_path / "x"), {"params": {"kernel": np.ones(2000)}, "step": 7})
    found = flaxckpt.restore_items(tmp_path / "x", dict.fromkeys(items))
    assert_same(found["ema"], {"w": np.arange(30_000.0), "on_device": jnp.arange(9)})
    assert found["config"] == {"layers": 12}
    assert found["rng"].bit_generator.state == expected
    assert flaxckpt.verify(tmp_path / "x")


def test_an_item_that_cannot_be_saved_leaves_nothing(tmp_path):
    with pytest.raises(errors.ItemError, match="the item config: .*nan"):
        PartialSave(tmp_path / "x", items={"config": {"a": float("nan")}}).__enter__()
    assert_nothing_at(tmp_path / "x")
    with pytest.raises(errors.ItemError, match="state is reserved"):
        PartialSave(tmp_path / "x", items={"state": 1})
    assert_nothing_at(tmp_path / "x")


def test_a_manager_takes_it_for_a_step(tmp_path):
    save_in_parts(tmp_path / "run/7", {"a": jnp.ones(2)}, {"b": 1})
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        assert ckpt.steps() == [7]
        assert_same(ckpt.restore(), {"a": jnp.ones(2), "b": 1})


def test_without_any_part_nothing_is_saved(tmp_path):
    with pytest.raises(errors.ManagerError, match="no part of .*/x was added"):
        save_in_parts(tmp_path / "x")
    assert_nothing_at(tmp_path / "x")


def test_parts_are_added_within_the_block(tmp_path):
    saving = PartialSave(tmp_path / "x", options=FAST)
    with pytest.raises(errors.ManagerError, match="within a with block"):
        saving.add({"a": 1})
    assert_nothing_at(tmp_path / "x")
    with saving:
        saving.add({"a": 1})
    with pytest.raises(errors.ManagerError, match="within a with block"):
        saving.add({"b": 1})
    assert flaxckpt.restore(tmp_path / "x") == {"a": 1}


# Parts that change once they were added


@pytest.mark.parametrize("size", [10, 20_000], ids=["small", "in many chunks"])
def test_a_part_may_change_and_go_once_it_was_added(size, tmp_path):
    host, device, donated = np.arange(size), jnp.arange(size), jnp.arange(size) * 2
    part = {"host": host, "device": device, "donated": donated, "list": [1]}
    options = Options(fsync=False, chunk_bytes=1 << 14)
    with PartialSave(tmp_path / "x", options=options) as saving:
        with held_up(tmp_path):
            saving.add({"part": part})
            host[:] = -1
            device.delete()
            jax.jit(lambda x: x + 1, donate_argnums=0)(donated)
            part["list"].append(2)
            part["more"] = 3
        saving.add({"other": 4})
    expected = {"host": np.arange(size), "device": jnp.arange(size), "list": [1]}
    expected["donated"] = jnp.arange(size) * 2
    assert_same(flaxckpt.restore(tmp_path / "x"), {"part": expected, "other": 4})


def test_a_generator_is_saved_as_it_was(tmp_path):
    generator = np.random.default_rng(0)
    with PartialSave(tmp_path / "x", options=FAST) as saving:
        saving.add({"rng": generator})
        first = generator.random()
    assert flaxckpt.restore(tmp_path / "x")["rng"].random() == first


# Parts that are refused

OVERLAPS = {
    "the same leaf": ({"a": {"b": 2}}, "a/b"),
    "a leaf in place of a dict": ({"a": 2}, "a"),
    "a dict in place of a leaf": ({"a": {"b": {"c": 2}}}, "a/b"),
    "None in place of a leaf": ({"a": {"b": None}}, "a/b"),
    "a leaf in place of None": ({"none": 1}, "none"),
    "two lists": ({"list": [1]}, "list"),
    "a FrozenDict": ({"a": freeze({"z": 2})}, "a"),
    "an array in place of all": (np.ones(2), "the root"),
    "another dict class": (freeze({"z": 2}), "the root"),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_what_another_part_has_is_refused_and_the_rest_goes_on(name, tmp_path):
    part, where = OVERLAPS[name]
    with PartialSave(tmp_path / "x", options=FAST) as saving:
        saving.add({"a": {"b": np.ones(5)}, "none": None, "list": [0]})
        with pytest.raises(errors.UnsupportedKeyError) as raised:
            saving.add(part)
        assert str(raised.value) == (
            f"two parts have something at {where} that is no dict in both. Parts are joined by the "
            "keys of their dicts, so give each leaf in one part only."
        )
        saving.add({"a": {"z": 3}})
    assert flaxckpt.verify(tmp_path / "x", strict=True).problems == ()
    expected = {"a": {"b": np.ones(5), "z": 3}, "none": None, "list": [0]}
    assert_same(flaxckpt.restore(tmp_path / "x"), expected)


def test_of_a_part_that_is_refused_nothing_is_kept(tmp_path):
    """Not even that of it which could have been, and not as a name that is taken."""
    with PartialSave(tmp_path / "x", options=FAST) as saving:
        saving.add({"a": np.ones(2)})
        with pytest.raises(errors.UnsupportedKeyError):
            saving.add({"new": np.ones(3), "a": np.zeros(2)})
        with pytest.raises(errors.UnsupportedLeafError, match="the leaf odd is a builtins.object"):
            saving.add({"new": np.ones(3), "odd": object()})
        deleted = jnp.ones(3)
        deleted.delete()
        with pytest.raises(errors.UnsupportedLeafError, match="the leaf new: its buffer was"):
            saving.add({"new": deleted})
        saving.add({"new": np.ones(4)})
    assert_same(flaxckpt.restore(tmp_path / "x"), {"a": np.ones(2), "new": np.ones(4)})


@pytest.mark.parametrize("dotted_first", [True, False])
def test_two_arrays_of_one_name_to_orbax_are_refused(dotted_first, tmp_path):
    parts = [{"a.b": np.ones(3)}, {"a": {"b": np.zeros(3)}}]
    first, second = parts if dotted_first else parts[::-1]
    with PartialSave(tmp_path / "x", options=FAST) as saving:
        saving.add(first)
        with pytest.raises(errors.UnsupportedKeyError) as raised:
            saving.add(second)
        assert str(raised.value) == (
            "two parts have an array that Orbax calls 'a.b'. Save them in one part, or rename one."
        )
        saving.add({"c": 1})
    assert_same(flaxckpt.restore(tmp_path / "x"), first | {"c": 1})
    save_in_parts(tmp_path / "y", parts[0] | parts[1], {"c": 1})
    assert_same(flaxckpt.restore(tmp_path / "y"), parts[0] | parts[1] | {"c": 1})


@pytest.mark.parametrize("value", ["text", 2**70, None])
def test_what_is_no_array_may_have_the_name_of_one(value, tmp_path):
    save_in_parts(tmp_path / "x", {"a.b": value}, {"a": {"b": np.zeros(3)}})
    assert flaxckpt.verify(tmp_path / "x").problems == ()
    assert_same(flaxckpt.restore(tmp_path / "x"), {"a.b": value, "a": {"b": np.zeros(3)}})


def test_keys_that_cannot_be_sorted_together_are_an_error_by_the_end(tmp_path):
    (tmp_path / "here").mkdir()
    with pytest.raises(errors.UnsupportedKeyError, match="the root cannot be sorted"):
        save_in_parts(tmp_path / "here/x", {1: np.ones(2)}, {"a": np.ones(2)})
    assert_nothing_at(tmp_path / "here/x")


# Blocks that fail


@pytest.mark.parametrize("error", [KeyError("the user's"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("added", [0, 1, 8])
def test_a_block_that_raises_leaves_nothing(error, added, tmp_path):
    (tmp_path / "here").mkdir()
    with (
        pytest.raises(type(error)) as raised,
        PartialSave(tmp_path / "here/x", options=SMALL) as saving,
    ):
        for number in range(added):
            saving.add({str(number): np.arange(5000)})
        raise error
    assert raised.value is error
    assert_nothing_at(tmp_path / "here/x")
    save_in_parts(tmp_path / "here/x", {"a": 1})
    assert os.listdir(tmp_path / "here") == ["x"]


def test_what_is_to_be_replaced_lives_until_the_end(tmp_path):
    flaxckpt.save(tmp_path / "x", {"a": 1})
    with pytest.raises(errors.StepExistsError, match="a checkpoint already exists at"):
        PartialSave(tmp_path / "x").__enter__()
    with (
        pytest.raises(KeyError),
        PartialSave(tmp_path / "x", overwrite=True, options=FAST) as saving,
    ):
        saving.add({"a": np.ones(3000)})
        raise KeyError
    assert flaxckpt.restore(tmp_path / "x") == {"a": 1}
    with PartialSave(tmp_path / "x", overwrite=True, options=FAST) as saving:
        saving.add({"a": 2})
        assert flaxckpt.restore(tmp_path / "x") == {"a": 1}
    assert flaxckpt.restore(tmp_path / "x") == {"a": 2}
    assert os.listdir(tmp_path) == ["x"]


def test_of_two_writers_the_second_is_told(tmp_path):
    with pytest.raises(errors.StepExistsError, match="another writer"):
        with PartialSave(tmp_path / "x", options=FAST) as saving:
            saving.add({"a": 1})
            flaxckpt.save(tmp_path / "x", {"a": 2}, options=FAST)
    assert flaxckpt.restore(tmp_path / "x") == {"a": 2}
    assert os.listdir(tmp_path) == ["x"]


def test_what_is_no_checkpoint_is_left_alone(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir/file").write_text("mine")
    for name, overwrite in itertools.product(("file", "dir"), (False, True)):
        with pytest.raises(errors.DirectoryError):
            PartialSave(tmp_path / name, overwrite=overwrite).__enter__()
    with pytest.raises(ValueError, match="metadata must be JSON"):
        PartialSave(tmp_path / "x", metadata={"a": object()})
    assert sorted(os.listdir(tmp_path)) == ["dir", "file"]


def full(*args, **kwargs):
    """A disk without room, to whoever writes."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_failure_in_the_background_is_raised_by_the_next_part(monkeypatch, tmp_path):
    real = ocdbt.write_all

    def fill(store, values, *args):
        real(store, itertools.islice(values, 3), *args)
        full()

    monkeypatch.setattr(ocdbt, "write_all", fill)
    added = []
    (tmp_path / "here").mkdir()
    with (
        pytest.raises(OSError, match="No space left on device"),
        PartialSave(tmp_path / "here/x", options=SMALL) as saving,
    ):
        for number in range(100):
            saving.add({str(number): np.arange(5000)})
            added.append(number)
    assert len(added) < 10
    assert_nothing_at(tmp_path / "here/x")


@pytest.mark.parametrize("broken", ["_METADATA", "_CHECKPOINT_METADATA"])
def test_a_failure_after_the_last_part_is_raised_at_the_end(broken, monkeypatch, tmp_path):
    real = LocalStore.create

    def create(self, at, data):
        return (full if at.name == broken else real)(self, at, data)

    monkeypatch.setattr(LocalStore, "create", create)
    (tmp_path / "here").mkdir()
    saving = PartialSave(tmp_path / "here/x", options=FAST).__enter__()
    saving.add({"a": np.ones(3)})
    with pytest.raises(OSError, match="No space left on device"):
        saving.__exit__(None, None, None)
    assert_nothing_at(tmp_path / "here/x")


def test_a_failure_in_the_background_does_not_hide_that_of_the_block(monkeypatch, tmp_path):
    monkeypatch.setattr(ocdbt, "write_all", full)
    with pytest.raises(KeyError), PartialSave(tmp_path / "x", options=FAST) as saving:
        saving.add({"a": 1})
        raise KeyError
    assert os.listdir(tmp_path) == []


def test_a_disk_that_is_really_full(tmp_path):
    with disks.tmpfs(tmp_path / "disk", 4 * disks.MIB) as disk:
        with (
            pytest.raises((OSError, ValueError), match="No space left on device"),
            PartialSave(disk / "x", options=SMALL) as saving,
        ):
            for number in range(100):
                saving.add({str(number): np.random.default_rng(number).bytes(1 << 18)})
                saving.add({f"array {number}": np.random.default_rng(number).random(1 << 15)})
        assert_nothing_at(disk / "x")
        save_in_parts(disk / "x", {"a": 1})


def test_a_part_after_the_end_is_refused(tmp_path):
    """What would be lost without a word."""
    with PartialSave(tmp_path / "x", options=FAST) as saving:
        saving.add({"a": 1})
    for part in ({"b": np.ones(3)}, {"b": 1}):
        with pytest.raises((errors.FlaxckptError, RuntimeError)):
            saving.add(part)
    with pytest.raises(KeyError), PartialSave(tmp_path / "y", options=FAST) as saving:
        raise KeyError
    with pytest.raises((errors.FlaxckptError, RuntimeError)):
        saving.add({"b": 1})
    assert flaxckpt.restore(tmp_path / "x") == {"a": 1}


# Options


def test_floats_are_saved_with_fewer_bits(tmp_path):
    options = Options(fsync=False, save_dtype={"params/.*": "bfloat16"})
    parts = {"params": {"w": jnp.ones(3)}}, {"params": {"b": np.ones(2, "f4")}}, {"x": jnp.ones(2)}
    save_in_parts(tmp_path / "x", *parts, options=options)
    restored = flaxckpt.restore(tmp_path / "x")
    kinds = [str(restored[a][b].dtype) for a, b in (("params", "w"), ("params", "b"))]
    assert kinds == ["bfloat16", "bfloat16"]
    assert restored["x"].dtype == jnp.float32


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="this system does not tell peaks"
)
def test_a_tree_that_is_never_whole_in_memory(tmp_path):
    """Of 160 MiB in parts of 40 MiB: a part and the budget, and what allocators keep.

    What is smaller than 32 MiB, the C library may not give back at once.
    """
    code = """
        import sys, flaxckpt
        from tests.memory_child import MIB, TIGHT, make, peak

        def convert(name, kind, rows, count):
            with flaxckpt.PartialSave(f"{sys.argv[1]}/{name}", options=TIGHT) as saving:
                for number in range(count):
                    saving.add({str(number): make(kind, (rows, MIB // 4))})

        convert("tiny", "jax", 1, 2)
        for kind in ("jax", "numpy"):
            print(peak(lambda: convert(kind, kind, 40, 4))[0] // MIB)
    """
    status, out, err = run_fresh(code, tmp_path)
    assert status == 0, err
    of_jax, of_numpy = map(int, out.split())
    assert of_jax < 2 * 40 + 16 + 28, out  # it is made of a numpy array
    assert of_numpy < 40 + 16 + 28, out


# Buckets


def test_a_bucket(tmp_path):
    with stores.opened("s3", tmp_path) as store:
        options = store.options(timeout_secs=60, chunk_bytes=4096)
        url = f"{store.url('run')}/3"
        big = {"big": np.arange(9000)}
        with pytest.raises(KeyError), PartialSave(url, options=options) as saving:
            saving.add(big)
            raise KeyError
        with pytest.raises(errors.CheckpointNotFoundError):
            flaxckpt.restore(url, options=options)
        save_in_parts(url, big, {"a": {"b": jnp.ones(3)}}, {"a": {"c": "text"}}, options=options)
        assert flaxckpt.verify(url, strict=True, options=options).problems == ()
        expected = big | {"a": {"b": jnp.ones(3), "c": "text"}}
        assert_same(flaxckpt.restore(url, options=options), expected)
        assert store.strays("run") == []
        with pytest.raises(errors.StepExistsError):
            PartialSave(url, options=options).__enter__()


# Processes that end

KILLED = """
    import os, signal, sys, numpy as np, flaxckpt
    from flaxckpt.store import local
    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)
    options = flaxckpt.Options(chunk_bytes=4096, max_host_bytes=4 * 4096)
    with flaxckpt.PartialSave(sys.argv[1], overwrite=True, options=options) as saving:
        for number in range(4):
            saving.add({str(number): np.arange(9000)})
        if sys.argv[2] == "between two parts":
            die()
        local._make_visible = die
"""


@pytest.mark.parametrize(
    ("when", "is_there"), [("between two parts", False), ("before the commit", True)]
)
def test_a_kill_leaves_nothing_visible_and_the_next_save_cleans_up(when, is_there, tmp_path):
    path = tmp_path / "here/x"
    if is_there:
        flaxckpt.save(path, {"a": 1})
    status, _, err = run(KILLED, path, when)
    assert status == -signal.SIGKILL, err
    (left,) = (name for name in os.listdir(path.parent) if name != "x")
    assert ".flaxckpt-tmp-" in left
    assert path.exists() == is_there
    if is_there:
        assert flaxckpt.restore(path) == {"a": 1}
        assert flaxckpt.verify(path).problems == ()
    save_in_parts(path, {"a": 2}, overwrite=True)
    assert os.listdir(path.parent) == ["x"]
    assert flaxckpt.restore(path) == {"a": 2}


FORGOTTEN = """
    import sys, numpy as np, flaxckpt
    saving = flaxckpt.PartialSave(sys.argv[1])
    saving.add({"a": np.ones(3)})
"""


def test_a_script_that_does_not_end_its_save_does_not_hang(tmp_path):
    """It forgot the `with`. Refused or not: it ends, and there is no checkpoint."""
    process = start(FORGOTTEN, tmp_path / "x")
    try:
        process.communicate(timeout=20)
    finally:
        process.kill()
        process.communicate()
    assert not Path(tmp_path / "x").exists()
    save_in_parts(tmp_path / "x", {"a": 2})
    assert os.listdir(tmp_path) == ["x"]
