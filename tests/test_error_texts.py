"""What each error says, as a whole: what happened, where, both sides, and one thing to do.

Texts that other tests assert as a whole are not here again.
"""

import inspect
import json
import re
import shutil
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt import errors
from flaxckpt.leaves import kinds as leaf_handler
from flaxckpt.multihost import ProcessGroup
from flaxckpt.run.writer import Background
from flaxckpt.saving import writing
from flaxckpt.testing import assert_bitwise_resume
from tests.multihost.memory import MemoryKeyValueStore

OPTIONS = flaxckpt.Options(fsync=False)
SAMPLES = Path(__file__).parent / "samples"
TREE = {"w": jnp.arange(3.0)}
TWO, OTHER_TWO, THREE = jnp.zeros(2), jnp.ones(2), jnp.zeros(3)


# What provokes them


def save(path, tree=TREE, **how):
    flaxckpt.save(path, tree, options=OPTIONS, **how)
    return path


def restore(saved, target, **how):
    """Restores what is saved of one tree into another."""
    return lambda path: flaxckpt.restore(save(path, saved), target, **how)


def transform(rule, **tree):
    return restore(tree, None, transforms=[rule])


def file(path, content=b"x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def run(path, *steps, **how):
    ckpt = flaxckpt.CheckpointManager(path, options=OPTIONS, async_=False, **how)
    for step in steps:
        ckpt.save(step, TREE)
    return ckpt


def save_metrics(metrics, **how):
    return lambda path: run(path, **how).save(1, TREE, metrics=metrics)


def item(saved, target=None):
    def provoke(path):
        save(path, items={"it": saved})
        flaxckpt.restore_items(path, {"it": target})

    return provoke


def without(name):
    """Restores what lacks a file."""

    def provoke(path):
        (save(path) / name).unlink()
        flaxckpt.restore(path)

    return provoke


def mixed(name):
    """Restores a checkpoint that has a file or directory of another one."""

    def provoke(path):
        save(path / "other")
        save(path / "x")
        for place in [name] if isinstance(name, str) else name:
            source, target = path / "other" / place, path / "x" / place
            if source.is_dir():
                shutil.rmtree(target)
                shutil.copytree(source, target)
            else:
                shutil.copy(source, target)
        flaxckpt.restore(path / "x")

    return provoke


def linked(path):
    (save(path) / "state" / "link").symlink_to(__file__)
    flaxckpt.restore(path)


def unsealed(path):
    file(save(path) / "state" / "_METADATA", b"")
    flaxckpt.restore(path)


def safetensors(header, data=b""):
    """Reads a file."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = len(header).to_bytes(8, "little") + header + data
    return lambda path: flaxckpt.restore(file(path / "m.safetensors", content))


def tensor(dtype, size, **more):
    return {"a": {"dtype": dtype, "shape": [2], "data_offsets": [0, size]} | more}


def index(content):
    return lambda path: flaxckpt.restore(file(path / "model.safetensors.index.json", content))


def t5x(path, version):
    tree = {"version": version, "optimizer": {}}
    file(path / "checkpoint_1" / "checkpoint", serialization.msgpack_serialize(tree, in_place=True))
    return path / "checkpoint_1"


def sample(name, *gone):
    """Reads a sample of another library that lacks some files."""

    def provoke(path):
        shutil.copytree(SAMPLES / name, path)
        for file_name in gone:
            (path / file_name).unlink()
        flaxckpt.restore(path)

    return provoke


def deleted(path):
    array = jnp.ones(3)
    array.delete()
    save(path, {"w": array})


def handled(encode):
    """Saves a leaf that a handler encodes."""

    def provoke(path):
        flaxckpt.register_leaf_handler("for_texts", complex, encode, complex)
        try:
            save(path, {"a": 1j})
        finally:
            del leaf_handler._REGISTERED["for_texts"]

    return provoke


def failing(*args):
    raise RuntimeError("the disk is gone")


class Stateful:
    def __init__(self, get=lambda: 1, set_=lambda state: None):
        self.get_state, self.set_state = get, set_


class Plain:
    def __repr__(self):
        return "Plain()"


class Files:
    """An iterator that writes files of these ends."""

    def __init__(self, *ends):
        self.ends = ends

    def save(self, path):
        for end in self.ends:
            Path(f"{path}{end}").touch()

    def restore(self, path):
        pass


@jax.tree_util.register_pytree_with_keys_class
class Twins:
    """A node whose children have one key."""

    def tree_flatten_with_keys(self):
        key = jax.tree_util.DictKey("a")
        return ((key, 1), (key, 2)), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls()


def shard(shape, spec):
    def provoke(path):
        def init(rng):
            return {"w": jnp.zeros(shape)}

        mesh = jax.make_mesh((1,), ("x",))
        flaxckpt.abstract_state(init, jax.random.key(0), mesh=mesh, specs={"w": spec})

    return provoke


def use_part(path):
    flaxckpt.PartialSave(path, options=OPTIONS).add(TREE)


def no_part(path):
    with flaxckpt.PartialSave(path, options=OPTIONS):
        pass


def closed(path):
    ckpt = run(path)
    ckpt.close()
    ckpt.save(1, TREE)


def read_only(path):
    flaxckpt.CheckpointManager(path, read_only=True).save(1, TREE)


def pinned(path):
    ckpt = run(path, 1)
    ckpt.pin(1)
    ckpt.delete(1)


def export_twice(path):
    for _ in range(2):
        flaxckpt.export(TREE, file(path / "beside").parent / "m.safetensors")


def export_to_directory(path):
    (path / "m.safetensors").mkdir(parents=True)
    flaxckpt.export(TREE, path / "m.safetensors")


def unreached(path):
    store = flaxckpt.ObjectStore(
        endpoint="http://127.0.0.1:9", region="r", credentials="anonymous", retries=0
    )
    flaxckpt.save("s3://bucket/x", TREE, options=flaxckpt.Options(storage=store))


def equal(*others):
    """What two processes say of their trees."""
    first, second = ({"tree": 1, "local": {}} | other for other in others)
    made = [writing.TreeManifest(**part, files={}, is_written=True) for part in (first, second)]
    return lambda path: writing.check_equal(made, "saving step 3")


def same_items(path):
    shares = [writing.ProcessManifest([], {}, {"config": n}) for n in (1, 2)]
    writing.check_items(shares, "saving step 3")


def other_operation(path):
    store = MemoryKeyValueStore()
    ProcessGroup(0, 2, store, 1.0).collective("saving step 3").publish("broadcast", 1)
    ProcessGroup(1, 2, store, 1.0).collective("saving step 4").wait_for("broadcast")


def failed_elsewhere(path):
    store = MemoryKeyValueStore()
    with (
        pytest.raises(RuntimeError),
        ProcessGroup(1, 2, store, 1.0).collective("saving step 3").sharing_errors(),
    ):
        failing()
    ProcessGroup(0, 2, store, 1.0).collective("saving step 3").gather()


def alone(count):
    group = ProcessGroup(0, count, MemoryKeyValueStore(), 0.01)
    return lambda path: group.collective("saving step 3").gather()


def slow(path):
    background, go_on = Background(0.01), threading.Event()
    background.start("saving step 3", go_on.wait)
    try:
        background.join()
    finally:
        go_on.set()


def in_background(error):
    def fail():
        raise error

    def provoke(path):
        background = Background(9)
        background.start("saving step 3", fail)
        background.join()
        background.raise_failure()

    return provoke


def other_each_time(path):
    made = []

    def make_loop(directory):
        made.append(directory)
        return lambda steps: {"w": np.float32(len(made))}

    assert_bitwise_resume(make_loop, steps=4, stop_at=2)


CASES = {
    errors.CheckpointNotFoundError: {
        "no directory": (
            lambda path: flaxckpt.restore(path / "no"),
            (
                "{path}/no holds no checkpoint of flaxckpt: there is no such directory. Check the "
                "path."
            ),
        ),
        "a file": (
            lambda path: flaxckpt.verify(file(path)),
            (
                "{path} holds no checkpoint of flaxckpt: it is a file. Give the directory that was "
                "saved to."
            ),
        ),
        "a run": (
            lambda path: flaxckpt.inspect(run(path, 1, 2).directory),
            (
                "{path} holds no checkpoint of flaxckpt: it is a run with the steps 1 to 2. Use "
                "{path}/2 for the newest, or flaxckpt.CheckpointManager('{path}')."
            ),
        ),
        "within one": (
            lambda path: flaxckpt.restore(save(path) / "state"),
            (
                "{path}/state holds no checkpoint of flaxckpt: it lies within a checkpoint. Use "
                "{path}."
            ),
        ),
        "half of one": (
            without("_CHECKPOINT_METADATA"),
            (
                "{path} holds no checkpoint of flaxckpt: it is half of one, whose save never "
                "ended. Restore another step."
            ),
        ),
        "another library's": (
            lambda path: flaxckpt.restore(SAMPLES / "t5x"),
            (
                "{samples}/t5x holds checkpoints of another library: checkpoint_1. Give the path "
                "of one."
            ),
        ),
        "another step": (
            lambda path: run(path, 1, 2).restore(step=5),
            "{path} has no step 5. It has 1, 2. Ask for one of these.",
        ),
        "another of many steps": (
            lambda path: run(path, *range(21)).restore(step=50),
            "{path} has no step 50. It has 0, 1, 2, ..., 18, 19, 20. Ask for one of these.",
        ),
        "no step": (
            lambda path: run(path).restore(),
            "{path} has no step. Check the path, or save a step first.",
        ),
        "another item": (
            lambda path: flaxckpt.restore_items(save(path, items={"a": 1}), {"b": None}),
            (
                "the checkpoint at {path} has no item b. It has a. Leave b out, or restore a step "
                "that has it."
            ),
        ),
        "no item": (
            lambda path: flaxckpt.restore_items(save(path), {"b": None}),
            (
                "the checkpoint at {path} has no item b. It has none. Leave b out, or restore a "
                "step that has it."
            ),
        ),
    },
    errors.CorruptCheckpointError: {
        "no checksum": (
            unsealed,
            (
                "{path}/state/_METADATA is damaged: it does not end in a checksum (0 bytes). "
                "Restore another step."
            ),
        ),
        "a file is missing": (
            without("state/_METADATA"),
            (
                "the checkpoint at {path} is incomplete: {path}/state/_METADATA is missing. "
                "Restore another step."
            ),
        ),
        "two saves": (
            mixed("state/_METADATA"),
            (
                "the files at {path}/x are of two different saves ({save} and {save}). Restore "
                "another step."
            ),
        ),
        "arrays of another save": (
            mixed(["state/d", "state/manifest.ocdbt"]),
            (
                "the arrays at {path}/x/state are of the save {save}, and its metadata of the save "
                "{save}. Restore another step."
            ),
        ),
        "a link": (
            linked,
            (
                "{path}/state/link is a symbolic link, and checkpoints have none. Restore another "
                "step."
            ),
        ),
        "clu: no file": (
            sample("clu", "ckpt-2.flax"),
            (
                "the clu checkpoint at {path} is incomplete: {path}/ckpt-2.flax is missing. "
                "Restore another step."
            ),
        ),
        "big_vision: the last": (
            lambda path: flaxckpt.restore(file(path / "c.bv-LAST", b"10").with_name("c.bv")),
            (
                "{path}/c.bv-LAST is damaged: '10' is not the suffix of a checkpoint. Restore "
                "another step."
            ),
        ),
        "msgpack": (
            lambda path: flaxckpt.restore(file(path / "checkpoint_1", b"\x81\xa1a\xc1")),
            ("the msgpack file {path}/checkpoint_1 is damaged: FormatError. Restore another step."),
        ),
        "safetensors: header": (
            lambda path: flaxckpt.restore(
                file(path / "m.safetensors", bytes([99, *[0] * 7]) + b"{}")
            ),
            "{path}/m.safetensors ends within its header. Get the file again.",
        ),
        "safetensors: short": (
            safetensors(tensor("F32", 8), b"1234"),
            "{path}/m.safetensors has 73 bytes, but its header tells of 77. Get the file again.",
        ),
        "safetensors: a list": (
            safetensors(b"[1, 2]  "),
            (
                "{path}/m.safetensors is damaged: its header begins with b'[' and not with b'{'. "
                "Get the file again."
            ),
        ),
        "safetensors: no place": (
            safetensors({"a": {"dtype": "F32"}}),
            (
                "{path}/m.safetensors is damaged: its tensor 'a' has no dtype, shape and "
                "data_offsets. Get the file again."
            ),
        ),
        "safetensors: dtype": (
            safetensors(tensor("F31", 8), b"12345678"),
            (
                "{path}/m.safetensors is damaged: its tensor 'a' is of the dtype 'F31', which is "
                "not known. Get the file again."
            ),
        ),
        "safetensors: index": (
            index(b"{}"),
            "{path}/model.safetensors.index.json has no weight_map. Get the file again.",
        ),
        "safetensors: elsewhere": (
            index(b'{"weight_map": {"a": "../x"}}'),
            (
                "{path}/model.safetensors.index.json says that the tensor 'a' is in '../x', which "
                "is not the name of a *.safetensors file next to it. Get the file again."
            ),
        ),
    },
    errors.UnsupportedFormatError: {
        "t5x": (
            lambda path: flaxckpt.restore(t5x(path, 9)),
            (
                "{path}/checkpoint_1 is a T5X checkpoint of version 9; flaxckpt reads 2 and 3. "
                "Save it again with T5X of today."
            ),
        ),
    },
    errors.UnsupportedLeafError: {
        "abstract": (
            lambda path: save(path, {"a": {"w": jax.eval_shape(lambda: THREE)}}),
            (
                "the leaf a/w: it is abstract (ShapeDtypeStruct) and has no values. Save outside "
                "of jit, and a state that was initialised."
            ),
        ),
        "traced": (
            lambda path: jax.jit(lambda w: save(path, {"w": w}))(THREE),
            (
                "the leaf w: it is abstract (DynamicJaxprTracer) and has no values. Save outside "
                "of jit, and a state that was initialised."
            ),
        ),
        "deleted": (
            deleted,
            (
                "the leaf w: its buffer was deleted, most likely by a jit that donated it. Save "
                "the state that the train step returned, not the one it was given."
            ),
        ),
        "objects": (
            lambda path: save(path, {"w": np.array([None])}),
            (
                "the leaf w is a numpy.ndarray of dtype object, which no checkpoint can hold. Take "
                "it out of the tree, make it static, or call flaxckpt.register_leaf_handler(kind, "
                "ndarray, encode, decode)."
            ),
        ),
        "a handler's value": (
            handled(lambda value: Plain()),
            (
                "the handler of the leaf a encoded it as Plain(), which is neither an array nor "
                "what JSON can hold exactly. Let it return str, int, list or dict."
            ),
        ),
        "a handler fails": (
            handled(failing),
            (
                "the leaf a: its handler failed: RuntimeError: the disk is gone. Fix the "
                "encode= that register_leaf_handler was given."
            ),
        ),
        "export": (
            lambda path: flaxckpt.export(
                {"a": "text", "b": jnp.zeros(2, "int4"), "c": TWO}, path / "m.safetensors"
            ),
            (
                "2 of 3 leaves cannot be written to safetensors:\n"
                "  a: str is not an array of numbers\n"
                "  b: the format has no dtype int4\n"
                "Pass rename=, a function that returns None for the names of these, to leave them "
                "out."
            ),
        ),
        "safetensors: less than a byte": (
            safetensors(tensor("F4", 1), b"1"),
            (
                "the tensor a in {path}/m.safetensors is of dtype F4, whose values have less than "
                "a byte each. Convert it to another dtype with the library that wrote it."
            ),
        ),
    },
    errors.ItemError: {
        "no JSON": (
            item({"a": [float("nan")]}),
            (
                "the item it: it does not survive a JSON round trip: ['a'][0] is nan, which JSON "
                "cannot represent. Use plain dicts, lists, strings and finite numbers."
            ),
        ),
        "a name": (
            lambda path: save(path, items={"a-b": 1}),
            (
                "'a-b' cannot be an item name: it needs a letter first, and at most 64 ASCII "
                "letters, digits and underscores. Rename the item."
            ),
        ),
        "a reserved name": (
            lambda path: save(path, items={"metrics": 1}),
            "metrics is reserved and cannot be an item name. Rename the item.",
        ),
        "its state fails": (
            item(Stateful(get=failing)),
            (
                "the item it cannot be saved: RuntimeError: the disk is gone. Fix the cause, or "
                "omit the item."
            ),
        ),
        "its state is no JSON": (
            item(Stateful(get=lambda: {"at": (1, 2)})),
            (
                "the item it: its get_state() result does not survive a JSON round trip: ['at'] is "
                "a tuple, (1, 2). Return bytes, a str, or plain dicts, lists and numbers; or call "
                "flaxckpt.register_item_handler."
            ),
        ),
        "no files": (
            item(Files()),
            (
                "the item it: its save(path) wrote nothing. A TfDatasetIterator needs "
                "checkpoint=True."
            ),
        ),
        "files elsewhere": (
            item(Files("-1")),
            (
                "the item it: its save(path) wrote state-1, and nothing under the name it was "
                "given, state, so it would not find it again. Call flaxckpt.register_item_handler."
            ),
        ),
        "no generator": (
            item(np.random.default_rng(0), 3),
            (
                "the item it is a numpy Generator with bit generator PCG64, but its target is int. "
                "Pass None as target and use the new object in `items`."
            ),
        ),
        "another generator": (
            item(np.random.default_rng(0), np.random.Generator(np.random.MT19937(0))),
            (
                "the item it is a numpy Generator with bit generator PCG64, but its target is "
                "MT19937. Pass None as target and use the new object in `items`."
            ),
        ),
        "no object": (
            item(Stateful(), Plain()),
            (
                "the item it is the state of an object, and its target Plain() has no set_state. "
                "Pass an object like the saved one."
            ),
        ),
        "it cannot be set": (
            item(Stateful(), Stateful(set_=failing)),
            (
                "the item it cannot be restored: RuntimeError: the disk is gone. Fix the cause, or "
                "omit the item from items=."
            ),
        ),
    },
    errors.UnsupportedKeyError: {
        "unsortable": (
            lambda path: save(path, {"a": {1: 1, "b": 2}}),
            (
                "the keys of the dict at a cannot be sorted, so jax cannot flatten it: '<' not "
                "supported between instances of 'str' and 'int'. Use keys of one type, or an "
                "OrderedDict."
            ),
        ),
        "of a type": (
            lambda path: save(path, {"a": {frozenset(): 1}}),
            (
                "in a: a dict key of type frozenset cannot be saved: frozenset(). Use str, int, "
                "bool, float, bytes, None or tuples of these as keys."
            ),
        ),
        "no unicode": (
            lambda path: save(path, {"a": {"\ud800": 1}}),
            (
                "in a: the dict key '\\ud800' is not valid unicode and cannot be saved. Rename the "
                "key."
            ),
        ),
        "twice": (
            lambda path: save(path, {"x": Twins()}),
            (
                "two leaves of the tree have the key path 'x/a'. Give the children of that node "
                "different keys (jax.tree_util.register_pytree_with_keys)."
            ),
        ),
    },
    errors.RuleError: {
        "only": (
            restore({"params": TREE}, None, only="parms"),
            (
                "only='parms' selects nothing of the checkpoint at {path}. It has params, "
                "params/w. Correct the path."
            ),
        ),
        "unexpected": (
            restore(TREE, TREE, unexpected={"b": "ignore"}),
            "unexpected: 'b' matches no key path as a whole. The closest are w. Fix the pattern.",
        ),
        "glob": (
            restore({"params": TREE}, None, only="params/*"),
            (
                "only='params/*': 'params/*' matches no key path as a whole. Patterns are regular "
                "expressions, not globs: use 'params/.*'."
            ),
        ),
        "missing": (
            restore(TREE, TREE, missing={"(": "init"}),
            (
                "missing: '(' is not a valid regular expression: missing ), unterminated "
                "subpattern at position 0. Fix the pattern."
            ),
        ),
        "no expression": (
            transform(flaxckpt.Rename("(", "b"), a=TWO),
            (
                "Rename(pattern='(', replacement='b', optional=False): '(' is not a valid regular "
                "expression: missing ), unterminated subpattern at position 0. Fix the pattern."
            ),
        ),
        "no such group": (
            transform(flaxckpt.Rename("a", r"\2"), a=TWO),
            (
                "Rename(pattern='a', replacement='\\\\2', optional=False): '\\\\2' does not fit "
                "its pattern: invalid group reference 2 at position 1. Name a group that the "
                "pattern has."
            ),
        ),
        "no leaf": (
            transform(flaxckpt.Drop("b"), a=TWO),
            (
                "Drop(pattern='b', optional=False): 'b' matches no key path as a whole. The "
                "closest are a. Fix the pattern, or pass optional=True."
            ),
        ),
        "a key path": (
            transform(lambda saved, target: {3: TWO}, a=TWO),
            (
                "the transform {function} returned 3 as a key path. It must return a dict from key "
                "paths, which are strings, to leaves or values."
            ),
        ),
        "cast of text": (
            transform(flaxckpt.Cast("a", "bfloat16"), a="text"),
            (
                "Cast(pattern='a', dtype='bfloat16', optional=False) cannot be used for a, which "
                "is str. Let its pattern match arrays only."
            ),
        ),
        "cast of strings": (
            transform(flaxckpt.Cast("a", "bfloat16"), a=np.array(["x"])),
            (
                "Cast(pattern='a', dtype='bfloat16', optional=False) cannot be used for a, which "
                "is <U1[1]. Let its pattern match arrays of numbers only."
            ),
        ),
        "cast to nothing": (
            transform(flaxckpt.Cast("a", "bfloat61"), a=TWO),
            (
                "Cast(pattern='a', dtype='bfloat61', optional=False) names no dtype that a "
                "checkpoint can hold. Give one of numpy or ml_dtypes, such as 'bfloat16'."
            ),
        ),
        "apply": (
            transform(flaxckpt.Apply(inputs=("[ab]", "a"), output="c", fn=failing), a=TWO, b=TWO),
            (
                "Apply(pattern=None, fn={function}, inputs=('[ab]', 'a'), output='c', keep=False, "
                "optional=False) must find one leaf for each of its inputs, and makes c of a, b. "
                "Give inputs whose groups lead to one output each."
            ),
        ),
        "a layer twice": (
            transform(flaxckpt.Stack(r"(?P<index>\d).*", "w"), **{"0a": TWO, "0b": TWO}),
            (
                "Stack(pattern='(?P<index>\\\\d).*', output='w', axis=0, optional=False) finds "
                "layer 0 twice, in 0a and 0b. Let its pattern match one of them, or give them two "
                "outputs."
            ),
        ),
        "a layer is missing": (
            transform(flaxckpt.Stack(r"l(?P<index>\d)", "w"), l0=TWO, l2=TWO),
            (
                "Stack(pattern='l(?P<index>\\\\d)', output='w', axis=0, optional=False) finds the "
                "layers [0, 2] for w: some are missing. Let its pattern match all of them, counted "
                "from 0."
            ),
        ),
        "layers differ": (
            transform(flaxckpt.Stack(r"l(?P<index>\d)", "w"), l0=TWO, l1=THREE),
            (
                "Stack(pattern='l(?P<index>\\\\d)', output='w', axis=0, optional=False) finds "
                "layers of different types for w:\n"
                "  l0  float32[2]\n"
                "  l1  float32[3]\n"
                "Make them the same first, with flaxckpt.Cast or flaxckpt.Apply(pattern, fn)."
            ),
        ),
        "an axis": (
            transform(flaxckpt.Stack(r"l(?P<index>\d)", "w", axis=3), l0=TWO, l1=TWO),
            (
                "Stack(pattern='l(?P<index>\\\\d)', output='w', axis=3, optional=False) has no "
                "axis 3 among 2. Give another axis=, or let its pattern match other leaves."
            ),
        ),
        "a layer's number": (
            transform(flaxckpt.Stack("l(?P<index>.)", "w"), lx=TWO),
            (
                "Stack(pattern='l(?P<index>.)', output='w', axis=0, optional=False): 'x' in lx is "
                "not the number of a layer. Let the group match digits, as in (?P<index>[0-9]+)."
            ),
        ),
        "no number": (
            transform(flaxckpt.Stack("l.", "w"), lx=TWO),
            (
                "Stack(pattern='l.', output='w', axis=0, optional=False) has no group "
                "(?P<index>...) for the layer's number. Write one into its pattern, such as "
                "(?P<index>[0-9]+)."
            ),
        ),
        "no place for it": (
            transform(flaxckpt.Unstack("a", "b"), a=TWO),
            (
                "Unstack(pattern='a', output='b', axis=0, optional=False) has no {index} in its "
                "output, where the layer's number goes. Write it there."
            ),
        ),
        "a fallback": (
            restore(
                {"a": TWO},
                {"a": TWO, "b": np.zeros(2, "int8")},
                transforms=[flaxckpt.Fallback("b", 300)],
            ),
            (
                "Fallback(pattern='b', value=300, optional=False) does not fit b, which is "
                "int8[2]: Python integer 300 out of bounds for int8. Give a value that it can hold."
            ),
        ),
    },
    errors.ShardingError: {
        "no axis": (
            shard((3,), P("y")),
            (
                "w cannot be sharded: the mesh has no axis 'y', only x.\n"
                "  spec:  P('y',)\n"
                "  shape: (3,)\n"
                "  mesh:  {'x': 1}\n"
                "Change the spec (its annotation, the logical axis rules, or specs=) or the mesh."
            ),
        ),
        "axes": (
            shard((3,), P(None, "x")),
            (
                "w cannot be sharded: the spec has 2 entries, the array 1 axes.\n"
                "  spec:  P(None, 'x')\n"
                "  shape: (3,)\n"
                "  mesh:  {'x': 1}\n"
                "Change the spec (its annotation, the logical axis rules, or specs=) or the mesh."
            ),
        ),
        "twice": (
            shard((2, 2), P("x", "x")),
            (
                "w cannot be sharded: the mesh axis 'x' is used twice.\n"
                "  spec:  P('x', 'x')\n"
                "  shape: (2, 2)\n"
                "  mesh:  {'x': 1}\n"
                "Change the spec (its annotation, the logical axis rules, or specs=) or the mesh."
            ),
        ),
    },
    errors.ArgumentError: {
        "unknown": (
            lambda path: flaxckpt.save(path, TREE, force=True),
            "save() has no argument 'force'. Use overwrite=.",
        ),
        "of another type": (
            lambda path: flaxckpt.CheckpointManager(path, keep=3),
            "CheckpointManager(keep=...) takes a Keep, got 3. Pass Keep(last=3).",
        ),
        "no count": (
            lambda path: flaxckpt.Every(steps=2.5),
            "Every.steps must be an integer, got 2.5. Pass an int.",
        ),
    },
    errors.InvalidStepError: {
        "text": (lambda path: run(path, "7"), "a step must be an integer, got '7'. Pass an int."),
        "a float": (
            lambda path: run(path, 1.5),
            "a step must be an integer, got 1.5. Pass an int.",
        ),
        "negative": (
            lambda path: run(path, -1),
            "a step must not be negative, got -1. Count from 0.",
        ),
    },
    errors.InvalidMetricError: {
        "a name": (save_metrics({1: 2.0}), "the name of a metric must be a str, got 1. Rename it."),
        "text": (
            save_metrics({"loss": "low"}),
            "the metric 'loss' must be one number, got 'low'. Give its mean, or leave it out.",
        ),
        "an array": (
            save_metrics({"loss": np.arange(2)}),
            (
                "the metric 'loss' must be one number, got array([0, 1]). Give its mean, or leave "
                "it out."
            ),
        ),
        "which": (
            save_metrics({"loss": 1, "acc": 2}, keep=flaxckpt.Keep(best=1, mode="min")),
            (
                "this save has the metrics loss, acc, and Keep does not say which of them ranks "
                "steps. Pass Keep(metric=...)."
            ),
        ),
        "another": (
            save_metrics({"loss": 1}, keep=flaxckpt.Keep(metric="acc", mode="max")),
            (
                "Keep(metric='acc') ranks steps, and this save only has the metrics loss. Pass "
                "'acc' in metrics=, or another Keep(metric=...)."
            ),
        ),
    },
    errors.StepExistsError: {
        "a checkpoint": (
            lambda path: save(save(path)),
            "a checkpoint already exists at {path}. Pass overwrite=True to replace it.",
        ),
        "a step": (
            lambda path: run(path, 1, 1),
            "a checkpoint already exists at {path}/1. Pass overwrite=True to replace it.",
        ),
        "an export": (
            export_twice,
            "there is {path}/m.safetensors already. Pass overwrite=True to replace it.",
        ),
    },
    errors.StepPinnedError: {
        "deleted": (pinned, "step 1 of {path} is pinned. Unpin it first: pin(1, False)."),
    },
    errors.DirectoryError: {
        "a file": (
            lambda path: run(file(path)),
            (
                "cannot create the directory {path}: [Errno 17] File exists: '{path}'. Choose "
                "another one, or change what is in its way."
            ),
        ),
        "below a file": (
            lambda path: run(file(path) / "run"),
            (
                "cannot create the directory {path}/run: [Errno 20] Not a directory: '{path}/run'. "
                "Choose another one, or change what is in its way."
            ),
        ),
        "a scheme": (
            lambda path: save("hdfs://x/y"),
            (
                "hdfs://x/y is neither on a local or mounted file system nor in a bucket (s3://, "
                "gs://). Mount it, or save somewhere else."
            ),
        ),
        "a URL": (
            lambda path: save("s3://b/../y"),
            "s3://b/../y is no URL of an object store. Give s3://bucket/path.",
        ),
        "settings of gs": (
            lambda path: flaxckpt.save(
                "gs://b/y", TREE, options=flaxckpt.Options(storage=flaxckpt.ObjectStore(region="x"))
            ),
            (
                "gs://b takes no endpoint, region or credentials in Options(storage=...): they "
                "come from the environment (TENSORSTORE_GCS_HTTP_URL, Google's default "
                "credentials). Set them there."
            ),
        ),
        "another's": (
            lambda path: save(file(path / "notes.txt").parent),
            (
                "{path} exists but is not a flaxckpt checkpoint, so it was left alone. Save "
                "elsewhere, or remove it first."
            ),
        ),
        "export": (
            export_to_directory,
            "{path}/m.safetensors is a directory. Export to a file in it, or next to it.",
        ),
        "event files": (
            lambda path: flaxckpt.metric_from_tensorboard("loss", "gs://b/events"),
            (
                "event files are read from a directory of this machine, not from gs://b/events. "
                "Mount the bucket, or copy them."
            ),
        ),
    },
    errors.StoreError: {
        "unreached": (
            unreached,
            (
                "s3://bucket cannot be used: {why}. Check the network, the credentials and "
                "Options(storage=...)."
            ),
        ),
    },
    errors.ProcessFailedError: {
        "trees": (
            equal({"tree": 1}, {"tree": 2}),
            (
                "saving step 3: process 1 and process 0 save different trees: structure, types, "
                "shardings, Python numbers or strings differ. Make the trees equal on all "
                "processes."
            ),
        ),
        "values": (
            equal({"local": {"a": "int32 1"}}, {"local": {"a": "int32 2", "bb": "int32 3"}}),
            (
                "saving step 3: process 1 and process 0 have different values in process-local "
                "leaves (2):\n"
                "  a   process 0: int32 1  process 1: int32 2\n"
                "  bb  process 0: -  process 1: int32 3\n"
                "Only process 0's would be saved. Make the values equal, or make them a "
                "global array (jax.make_array_from_process_local_data)."
            ),
        ),
        "items": (
            same_items,
            (
                "saving step 3: process 1 saves different items from process 0: config differ or "
                "are missing. Only process 0's would be saved. Make them equal; only iterators and "
                "random generators may differ."
            ),
        ),
        "calls": (
            other_operation,
            (
                "saving step 4: another process is saving step 3 instead. All processes must make "
                "the same calls in the same order."
            ),
        ),
        "elsewhere": (
            failed_elsewhere,
            (
                "saving step 3 failed on process 1: RuntimeError: the disk is gone. See the log "
                "there."
            ),
        ),
    },
    errors.ProcessTimeoutError: {
        "one": (
            alone(2),
            (
                "saving step 3: process 1 did not reach this barrier within 0.01 s. Check the log "
                "there, or raise Options(timeout_secs=...)."
            ),
        ),
        "many": (
            alone(4),
            (
                "saving step 3: 3 processes: 1, 2, 3 did not reach this barrier within 0.01 s. "
                "Check the log there, or raise Options(timeout_secs=...)."
            ),
        ),
    },
    errors.ManagerError: {
        "closed": (closed, "the manager of {path} is closed. Open another one."),
        "read-only": (
            read_only,
            "the manager of {path} is read-only. Open another one without read_only=True.",
        ),
        "no block": (use_part, "parts of {path} are added within a with block. Open one."),
        "no part": (
            no_part,
            "no part of {path} was added, so nothing is saved. Add one in the with block.",
        ),
    },
    errors.BackgroundSaveError: {
        "an error": (
            in_background(OSError(28, "No space left on device")),
            (
                "saving step 3 failed in the background: OSError: [Errno 28] No space left on "
                "device. Earlier steps are intact. Fix the cause and save again."
            ),
        ),
        "a sentence": (
            in_background(errors.StoreError("no bucket. Create it.")),
            (
                "saving step 3 failed in the background: StoreError: no bucket. Create it. "
                "Earlier steps are intact. Fix the cause and save again."
            ),
        ),
    },
    errors.SaveTimeoutError: {
        "slow": (
            slow,
            (
                "saving step 3 did not finish within 0.01 s and is still running. Wait again, or "
                "raise Options(timeout_secs=...)."
            ),
        ),
    },
    errors.ResumeMismatchError: {
        "other bits": (
            other_each_time,
            (
                "stopped after 2 of 4 steps and resumed, these leaves differ (1):\n"
                "  w: np.float32(1.0) and np.float32(3.0)\n"
                "What differs is not part of what is saved, or not restored before use. Save it "
                "with the state, or as an item."
            ),
        ),
    },
    errors.StructureMismatchError: {
        "empty, saved": (
            restore({"a": ()}, {"a": TWO}),
            (
                "the checkpoint at {path} does not fit the target (1 of 1 leaves)\n"
                "  empty  a  checkpoint: tuple (empty)  target: float32[2]\n"
                "Build the target the way the saved state was built, or take its own value with "
                'transforms=[flaxckpt.Fallback("a", "target")].'
            ),
        ),
        "empty, wanted": (
            restore({"a": TWO}, {"a": ()}),
            (
                "the checkpoint at {path} does not fit the target (1 of 1 leaves)\n"
                "  empty  a  checkpoint: float32[2]  target: tuple (empty)\n"
                "Build the target the way the saved state was built, or leave the array out with "
                'transforms=[flaxckpt.Drop("a")].'
            ),
        ),
        "dtype": (
            restore({"a": TWO}, {"a": TWO.astype("bfloat16")}),
            (
                "the checkpoint at {path} does not fit the target (1 of 1 leaves)\n"
                "  dtype  a  checkpoint: float32[2]  target: bfloat16[2]\n"
                'Give the target the saved dtypes, or pass dtype="saved" to get them, or '
                'dtype="cast" to convert them (dtype="widen" for floats to wider floats only). '
                "64-bit types need jax_enable_x64."
            ),
        ),
        "shape": (
            restore({"a": TWO}, {"a": THREE}),
            (
                "the checkpoint at {path} does not fit the target (1 of 1 leaves)\n"
                "  shape  a  checkpoint: float32[2]  target: float32[3]\n"
                "Build the target with the sizes that the checkpoint was saved with, or change the "
                "arrays with flaxckpt.Resize(pattern, pad=0) or flaxckpt.Apply(pattern, fn)."
            ),
        ),
        "key": (
            restore({"a": jax.random.key(0)}, {"a": jax.random.key(0, impl="rbg")}),
            (
                "the checkpoint at {path} does not fit the target (1 of 1 leaves)\n"
                "  key impl  a  checkpoint: key<threefry2x32>[]  target: key<rbg>[]\n"
                "Make the target's keys with the implementation that the checkpoint has."
            ),
        ),
        "missing": (
            restore({"a": TWO}, {"a": TWO, "b": jnp.zeros((3, 3))}),
            (
                "the checkpoint at {path} does not fit the target (1 of 2 leaves)\n"
                "  missing  b  checkpoint: -  target: float32[3,3]\n"
                "Build the target the way the saved state was built, or allow gaps with "
                'missing="init" and unexpected="ignore".'
            ),
        ),
        "kind": (
            restore({"a": TWO}, {"a": "text"}),
            (
                "the checkpoint at {path} does not fit the target (1 of 1 leaves)\n"
                "  kind  a  checkpoint: float32[2]  target: str\n"
                "Build the target the way the saved state was built, or allow gaps with "
                'missing="init" and unexpected="ignore".'
            ),
        ),
        "optimizer": (
            restore(
                {"opt_state": optax.sgd(1e-3).init(TWO)}, {"opt_state": optax.adam(1e-3).init(TWO)}
            ),
            (
                "the checkpoint at {path} does not fit the target (3 of 3 leaves)\n"
                "  missing  opt_state/0/count  checkpoint: -  target: int32[]\n"
                "  missing  opt_state/0/mu     checkpoint: -  target: float32[2]\n"
                "  missing  opt_state/0/nu     checkpoint: -  target: float32[2]\n"
                "Build the optimizer the way the saved one was built, begin it anew with "
                'opt_state="reset", or allow gaps with missing="init" and unexpected="ignore".'
            ),
        ),
    },
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x"


@pytest.mark.parametrize(
    ("cls", "name"),
    [pytest.param(c, n, id=f"{c.__name__}-{n}") for c, names in CASES.items() for n in names],
)
def test_the_text(cls, name, path):
    provoke, text = CASES[cls][name]
    with pytest.raises(cls) as caught:
        provoke(path)
    assert type(caught.value) is cls
    assert seen(caught.value, path) == text


def seen(error, path):
    """The text of `error`, but for what differs from time to time, or is TensorStore's."""
    text = str(error).replace(str(path), "{path}").replace(str(SAMPLES), "{samples}")
    text = re.sub(r"(?<=cannot be used: ).*(?=\. Check the network)", "{why}", text)
    text = re.sub(r"<function .*? at 0x[0-9a-f]+>", "{function}", text)
    return re.sub(r"\b[0-9a-f]{12}\b", "{save}", text)


def test_every_error_has_a_text():
    every = {c for c in vars(errors).values() if inspect.isclass(c)}
    known = {c for c in every if issubclass(c, errors.FlaxckptError)} - {errors.FlaxckptError}
    assert known == CASES.keys()


def test_every_text_ends_as_a_sentence():
    texts = [text for cases in CASES.values() for _, text in cases.values()]
    assert [t for t in texts if not t.endswith((".", ")")) or re.search(r"\w\.\.(\s|$)", t)] == []
