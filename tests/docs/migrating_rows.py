"""What surrounds the code of each row of docs/migrating.md.

A row has a generator: it sets names up, yields for the code to be run with them, once or several
times, and checks what came of it. It is used for both sides, unless they differ.
"""

import datetime
import functools
import shutil
import signal
import types
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, serialization, struct
from flax.training import checkpoints
from google.protobuf import struct_pb2
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt.testing import differences
from tests.formats.flax_states import SAMPLES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import grain
    import orbax.checkpoint as ocp
    from orbax.checkpoint import checkpoint_managers, v1

ROWS: dict[tuple[str, str], Callable[["Names"], Iterator[None]]] = {}
STATE = {
    "params": {"kernel": jnp.arange(8.0).reshape(4, 2) / 7, "bias": jnp.ones(2)},
    "step": jnp.int32(7),
}
PARAMS = STATE["params"]
LOSSES = [5.0, 1.0, 4.0, 2.0, 6.0, 3.0]
T5X_STEP = SAMPLES / "t5x" / "checkpoint_1"
ONE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


class Names(types.SimpleNamespace):
    """The names that the code of a row finds and makes."""

    def __init__(self, directory: Path, side: str, shared: "Shared"):
        path = directory / "x"
        super().__init__(
            **{"jax": jax, "jnp": jnp, "np": np, "datetime": datetime},
            **{"flaxckpt": flaxckpt, "ocp": ocp, "v1": v1, "grain": grain},
            **{"checkpoint_managers": checkpoint_managers},
            **{"checkpoints": checkpoints, "serialization": serialization},
            **{"path": path, "step": 3, "state": STATE, "params": PARAMS},
            **{"abstract": abstract(STATE), "init_fn": init_fn},
        )
        self.directory, self.is_before, self.shared = directory / "y", side == "before", shared


class Shared:
    """Checkpoints that many rows begin with; each is made once."""

    def __init__(self, directory: Path):
        self.directory = directory

    @functools.cached_property
    def orbax(self) -> Path:
        """One checkpoint of Orbax."""
        return old(self.directory / "orbax", STATE)

    @functools.cached_property
    def runs(self) -> tuple[Path, Path]:
        """The steps 0, 1 and 2 with losses, by Orbax and by flaxckpt."""
        path = self.directory / "mngr"
        options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
        with ocp.CheckpointManager(path, options=options) as mngr:
            for step in range(3):
                save = ocp.args.StandardSave(at(step))
                mngr.save(step, args=save, metrics={"loss": LOSSES[step]})
        keep = flaxckpt.Keep(metric="loss", mode="min")
        with flaxckpt.CheckpointManager(self.directory / "ckpt", keep=keep) as ckpt:
            for step in range(3):
                ckpt.save(step, at(step), metrics={"loss": LOSSES[step]})
        return path, self.directory / "ckpt"


def at(step):
    return {**STATE, "step": jnp.int32(step)}


def init_fn():
    return jax.tree.map(jnp.zeros_like, STATE)


def abstract(tree, sharding=ONE):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def old(path, tree):
    """What Orbax saved at `path`."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


def same(found, wanted):
    """Whether all bits are equal; one may hold numpy arrays."""
    as_jax = functools.partial(jax.tree.map, jnp.asarray)
    assert differences(as_jax(found), as_jax(wanted)) == []
    return True


def saved_at(path, wanted=STATE):
    """Whether there is a checkpoint, of any library, that holds `wanted`."""
    return same(flaxckpt.restore(path), wanted)


def open_run(n, *, handler=None, **options):
    """A manager of a run of three steps, of the library of this side."""
    theirs, ours = n.shared.runs
    if n.is_before:
        shutil.copytree(theirs, n.path)
        options = ocp.CheckpointManagerOptions(**options)
        n.mngr = ocp.CheckpointManager(n.path, options=options, item_handlers=handler)
    else:
        shutil.copytree(ours, n.path)
        n.ckpt = flaxckpt.CheckpointManager(n.path)


def open_new(n):
    """A manager of a run that has no step."""
    if n.is_before:
        n.mngr = ocp.CheckpointManager(n.path)
    else:
        n.ckpt = flaxckpt.CheckpointManager(n.path)


def close(n):
    n.mngr.close() if n.is_before else n.ckpt.close()


def kept(n):
    """The steps that are there in the end."""
    close(n)
    return sorted(int(step.name) for step in n.path.iterdir() if step.name.isdigit())


def loop(n, steps):
    """The steps that are kept of those of a loop, of which each has a loss."""
    if n.is_before and "options" in vars(n):
        n.mngr = ocp.CheckpointManager(n.path, options=n.options)
    for step in steps:
        metrics = {"loss": LOSSES[step % len(LOSSES)]}
        if n.is_before:
            save = ocp.args.StandardSave(STATE)
            n.mngr.save(step, args=save, metrics=metrics)
        else:
            n.ckpt(step, STATE, metrics=metrics)
    return kept(n)


def row(library, *titles):
    """Makes a generator that of rows."""

    def register(function):
        for title in titles:
            assert (library, title) not in ROWS, title
            ROWS[library, title] = function
        return function

    return register


orbax, t5x = functools.partial(row, "Orbax"), functools.partial(row, "T5X")
flax, clu = functools.partial(row, "flax.training.checkpoints"), functools.partial(row, "CLU")


# Orbax: one checkpoint


@orbax("Save", "`v1.save`, `save_pytree`", "`v1.partial`")
@orbax("`restore_concurrent_gb`, `save_concurrent_gb`")
def _(n):
    yield
    assert saved_at(n.path)


@orbax("Save over an older one")
def _(n):
    old(n.path, PARAMS) if n.is_before else flaxckpt.save(n.path, PARAMS)
    yield
    assert saved_at(n.path)


@orbax("`AsyncCheckpointer`", "`v1.save_async`, `save_pytree_async`")
def _(n):
    yield
    assert saved_at(n.path if n.is_before else n.path / "0")


@orbax("`ArraySave`")
def _(n):
    n.array = PARAMS["kernel"]
    yield
    found = flaxckpt.restore(n.path)
    assert same(found["checkpoint"] if n.is_before else found, n.array)


@orbax("`SaveArgs(dtype=...)`")
def _(n):
    yield
    assert saved_at(n.path, jax.tree.map(lambda x: x.astype("bfloat16"), PARAMS))


@orbax("`custom_metadata`")
def _(n):
    yield
    assert ocp.StandardCheckpointer().metadata(n.path).custom_metadata["lang"] == "en"


@orbax("Restore with an abstract target", "Restore without a target")
@orbax("`construct_restore_args`, `restore_args_from_target`")
@orbax("`v1.load`, `load_pytree`", "`v1.load` without a target")
def _(n):
    n.path = n.shared.orbax
    yield
    assert same(n.restored, STATE)


@orbax("`RestoreArgs(restore_type=np.ndarray)`")
def _(n):
    n.path = n.shared.orbax
    yield
    assert same(n.restored, STATE)
    assert {type(leaf) for leaf in jax.tree.leaves(n.restored)} == {np.ndarray}


@orbax("`ArrayRestoreArgs(dtype=...)`")
def _(n):
    old(n.path, PARAMS)
    yield
    assert same(n.restored, jax.tree.map(lambda x: x.astype("bfloat16"), PARAMS))


@orbax("A target of other dtypes")
def _(n):
    n.path = n.shared.orbax
    n.narrow = jax.tree.map(lambda x: x.update(dtype=jnp.dtype("bfloat16")), n.abstract)
    yield
    assert same(n.restored, jax.tree.map(lambda x: x.astype("bfloat16"), STATE))


@orbax("`ArrayRestoreArgs(sharding=...)`")
def _(n):
    old(n.path, PARAMS)
    n.sharding = NamedSharding(jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,)), P("x"))
    yield
    assert same(n.restored, PARAMS)
    assert {leaf.sharding for leaf in jax.tree.leaves(n.restored)} == {n.sharding}


@orbax("Onto another mesh")
def _(n):
    old_mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    new_mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    tree = {"kernel": jnp.arange(64.0).reshape(8, 8)}
    old(n.path, jax.device_put(tree, NamedSharding(old_mesh, P("x"))))
    sharding = NamedSharding(new_mesh, P("y", "x"))
    n.on_new_mesh = abstract(tree, sharding)
    yield
    assert same(jax.device_get(n.restored), tree)
    assert n.restored["kernel"].sharding == sharding


@orbax("`global_shape` that pads", "`global_shape` that cuts")
def _(n):
    embedding = np.arange(8, dtype=np.float32).reshape(4, 2)
    old(n.path, {"embedding": jnp.asarray(embedding)})
    yield
    found = n.restored["embedding"]
    rows = found.shape[0]
    assert rows in (3, 6)
    wanted = np.concatenate([embedding, np.zeros((2, 2))])[:rows]
    np.testing.assert_array_equal(found, wanted)


@orbax("`PLACEHOLDER`", "`v1.PLACEHOLDER`")
def _(n):
    n.path = n.shared.orbax
    yield
    assert same(n.restored, PARAMS)


@orbax("`partial_restore`")
def _(n):
    n.path = n.shared.orbax
    yield
    assert same(n.restored, {"params": PARAMS})


@orbax("`Transform(original_key=...)`")
def _(n):
    old(n.path, {"classifier": PARAMS, "step": jnp.int32(7)})
    n.target = jax.tree.map(jnp.zeros_like, {"head": PARAMS, "step": jnp.int32(7)})
    yield
    assert same(n.restored, {"head": PARAMS, "step": jnp.int32(7)})


@orbax("`RestoreTransform(multi_value_fn=...)`")
def _(n):
    old(n.path, {"q": jnp.ones(2), "k": jnp.zeros(3)})
    n.target = {"qk": jnp.zeros(5)}
    yield
    assert same(n.restored, {"qk": jnp.array([1.0, 1, 0, 0, 0])})


@orbax("`Transform(use_fallback=True)`")
def _(n):
    old(n.path, {"body": PARAMS})
    n.target = {"body": jax.tree.map(jnp.zeros_like, PARAMS), "head": {"bias": jnp.ones(3)}}
    yield
    assert same(n.restored, {"body": PARAMS, "head": {"bias": jnp.ones(3)}})


@orbax("`metadata`", "`v1.metadata`")
def _(n):
    n.path = n.shared.orbax
    yield
    assert n.shape == (4, 2)


# Orbax: a run


@orbax("Open, save in the loop")
def _(n):
    yield
    assert n.saved
    assert kept(n) == [3]


@orbax("`should_save(step)`")
def _(n):
    open_run(n)
    yield
    assert n.due
    assert kept(n) == [0, 1, 2]


@orbax("`save(force=True)`")
def _(n):
    open_run(n)
    yield
    assert kept(n) == [0, 1, 2, 3]


@orbax("Restore the newest step", "Restore a step", "Restore or initialise")
def _(n):
    open_run(n)
    if n.is_before:  # `args` says what it is, also for a step without several items
        assert n.mngr.latest_step() == 2
    yield
    assert same(n.restored["params"], PARAMS)
    assert int(n.restored["step"]) in (1, 2)


@orbax("Where to resume")
def _(n):
    open_run(n)
    yield
    assert n.start == 3


@orbax("Start from an old run")
def _(n):
    open_new(n)
    n.old = n.shared.runs[0]
    yield
    assert same(n.restored, at(2))


@orbax("`latest_step`")
def _(n):
    open_run(n)
    yield
    assert n.found == 2


@orbax("`all_steps`", "`reload`")
def _(n):
    open_run(n)
    if n.is_before:
        shutil.copytree(n.path / "2", n.path / "5")
        n.mngr.reload()
    else:
        flaxckpt.CheckpointManager(n.path).save(5, STATE, wait=True)
    yield
    assert list(n.found) == [0, 1, 2, 5]


@orbax("`best_step`")
def _(n):
    open_run(n, best_fn=lambda metrics: metrics["loss"], best_mode="min")
    yield
    assert n.found == 1


@orbax("`metrics`")
def _(n):
    open_run(n, best_fn=lambda metrics: metrics["loss"])
    yield
    assert n.found == {"loss": LOSSES[2]}


@orbax("`delete`")
def _(n):
    open_run(n)
    yield
    assert kept(n) == [0, 2]


@orbax("`custom_metadata` of a step")
def _(n):
    open_new(n)
    yield
    assert n.found == {"lang": "en"}


@orbax("`item_metadata`")
def _(n):
    open_run(n, handler=ocp.StandardCheckpointHandler())
    yield
    assert n.shape == (4, 2)


@orbax("`wait_until_finished`", "`check_for_errors`", "`close`")
def _(n):
    open_new(n)
    n.mngr.save(3, args=ocp.args.StandardSave(STATE)) if n.is_before else n.ckpt.save(3, STATE)
    yield
    assert kept(n) == [3]


@orbax("As a context manager", "`v1.training.Checkpointer`")
def _(n):
    yield
    assert [step.name for step in n.path.iterdir() if step.name.isdigit()] == ["3"]


@orbax("`read_only`")
def _(n):
    open_run(n)
    close(n)
    yield
    steps = n.mngr.all_steps() if n.is_before else n.ckpt.steps()
    assert list(steps) == [0, 1, 2]


@orbax("`enable_async_checkpointing=False`")
@orbax("`MultiprocessingOptions`: not needed", "`AsyncOptions(timeout_secs=...)`")
def _(n):
    yield
    assert loop(n, range(2)) == [0, 1]


@orbax("`checkpoints_iterator`")
def _(n):
    open_run(n)
    yield
    assert n.found[-1] == 2  # Orbax gives the newest only


@orbax("`wait_for_new_checkpoint`")
def _(n):
    open_run(n)
    yield
    assert n.found == 2


# Orbax: when to save, what to keep


@orbax("`save_interval_steps`", "`FixedIntervalPolicy`")
def _(n):
    yield
    assert loop(n, range(10)) == [0, 4, 8]


@orbax("`save_on_steps`", "`AnySavePolicy`")
def _(n):
    yield
    assert loop(n, range(10)) == [0, 3, 4, 8]


@orbax("`should_save_fn`")
def _(n):
    yield
    assert kept(n) == [2, 5]


@orbax("`SpecificStepsPolicy`")
def _(n):
    yield
    assert loop(n, range(8)) == [3, 6]


@orbax("`ContinuousCheckpointingPolicy`")
def _(n):
    yield
    steps = loop(n, range(20))
    assert steps[0] == 0
    assert len(steps) < 20  # those during a save are left out


@orbax("`ContinuousCheckpointingPolicy(minimum_interval_secs=...)`")
def _(n):
    yield
    if not n.is_before:  # the first step is saved by Orbax only
        n.ckpt.save(0, STATE)
    assert loop(n, range(4)) == [0]


@orbax("`max_to_keep`", "`LatestN`")
def _(n):
    yield
    assert loop(n, range(6)) == [3, 4, 5]


@orbax("`keep_period`")
def _(n):
    yield
    assert loop(n, range(6)) == [0, 4, 5]


@orbax("`keep_time_interval`", "`EveryNSeconds`")
def _(n):
    yield
    assert loop(n, range(4)) == [0, 3]


@orbax("`best_fn`, `best_mode`")
def _(n):
    yield
    assert loop(n, range(4)) == [1, 3]


@orbax("`EveryNSteps`, `AnyPreservationPolicy`")
def _(n):
    yield
    assert loop(n, range(6)) == [0, 4, 5]


@orbax("`BestN`")
def _(n):
    yield
    assert loop(n, range(6)) == [1, 3, 5]


@orbax("`CustomSteps`")
def _(n):
    open_run(n)
    close(n)
    yield
    assert kept(n) == [2, 5]


# Orbax: items, types, handlers


def with_config(n):
    """A step of a state and a configuration."""
    open_new(n)
    if n.is_before:
        items = {"state": ocp.args.StandardSave(STATE), "config": ocp.args.JsonSave({"layers": 12})}
        n.mngr.save(0, args=ocp.args.Composite(**items))
        n.mngr.wait_until_finished()
    else:
        n.ckpt.save(0, STATE, items={"config": {"layers": 12}}, wait=True)


@orbax("`Composite`")
def _(n):
    open_new(n)
    yield
    close(n)
    found = ocp.CheckpointManager(n.path).restore(
        3,
        args=ocp.args.Composite(
            state=ocp.args.StandardRestore(n.abstract), config=ocp.args.JsonRestore()
        ),
    )
    assert found["config"] == {"layers": 12}
    assert same(found["state"], STATE)


@orbax("`JsonRestore`")
def _(n):
    with_config(n)
    yield
    assert n.config == {"layers": 12}


@orbax("Several items at once")
def _(n):
    with_config(n)
    yield
    assert n.config == {"layers": 12}
    assert same(n.restored, STATE)


@orbax("`item_metadata` of several items")
def _(n):
    with_config(n)
    yield
    assert n.kernel.shape == (4, 2)


@orbax("`ProtoSave`, `ProtoRestore`")
def _(n):
    open_new(n)
    n.message = struct_pb2.Struct()
    n.message.update({"layers": 12})
    yield
    assert n.restored == n.message


@orbax("`JaxRandomKeySave`")
def _(n):
    open_new(n)
    yield
    assert n.restored == jax.random.key(0)


@orbax("`NumpyRandomKeySave`")
def _(n):
    open_new(n)
    before = np.random.get_state()
    yield
    assert n.restored[0] == before[0]
    np.testing.assert_array_equal(n.restored[1], before[1])
    assert n.restored[2:] == before[2:]


@orbax("Data iterators: `grain.checkpoint.CheckpointSave`")
def _(n):
    open_new(n)
    n.iterator, n.fresh = (iter(grain.MapDataset.range(10).to_iter_dataset()) for _ in range(2))
    assert [next(n.iterator) for _ in range(3)] == [0, 1, 2]
    yield
    assert next(n.fresh) == 3


class FractionHandler(ocp.type_handlers.StringHandler):
    """Keeps fractions as strings."""

    def typestr(self):
        return "fraction"

    async def serialize(self, values, infos, args=None):
        return await super().serialize([str(value) for value in values], infos, args)

    async def deserialize(self, infos, args=None):
        return [Fraction(value) for value in await super().deserialize(infos, args)]


@orbax("`register_type_handler`")
def _(n):
    n.Fraction, n.FractionHandler = Fraction, FractionHandler
    yield
    tree = {"rate": Fraction(1, 3), "w": jnp.ones(2)}
    if n.is_before:
        ocp.PyTreeCheckpointer().save(n.path, tree)
        assert ocp.PyTreeCheckpointer().restore(n.path)["rate"] == Fraction(1, 3)
    else:
        flaxckpt.save(n.path, tree)
        assert flaxckpt.restore(n.path)["rate"] == Fraction(1, 3)


class Vocab:
    """Something of the user's."""

    def __init__(self, text):
        self.text = text


class VocabHandler(ocp.CheckpointHandler):
    """Keeps it as a file."""

    def save(self, directory, args):
        (directory / "words.txt").write_text(args.vocab.text)

    def restore(self, directory, args):
        return Vocab((directory / "words.txt").read_text())


@ocp.args.register_with_handler(VocabHandler, for_save=True)
class VocabSave(ocp.args.CheckpointArgs):
    """What it takes to save."""

    def __init__(self, vocab):
        self.vocab = vocab


@ocp.args.register_with_handler(VocabHandler, for_restore=True)
class VocabRestore(ocp.args.CheckpointArgs):
    """What it takes to restore."""


@orbax("Your own `CheckpointHandler`")
def _(n):
    if not n.is_before:
        open_new(n)
    n.vocab, n.Vocab, n.VocabHandler, n.VocabSave = Vocab("a b"), Vocab, VocabHandler, VocabSave
    yield
    close(n)
    if n.is_before:
        assert (n.path / "3" / "vocab" / "words.txt").read_text() == "a b"
    else:
        found = flaxckpt.restore_items(n.path / "3", {"vocab": None})["vocab"]
        assert found.text == "a b"


# Orbax: v1, and many processes


@orbax("`v1.save_checkpointables`")
def _(n):
    yield
    assert v1.load_checkpointables(n.path, {"config": None})["config"] == {"layers": 12}


@orbax("`v1.load_checkpointables`")
def _(n):
    config = {"layers": 12}
    if n.is_before:
        v1.save_checkpointables(n.path, {"state": STATE, "config": config})
    else:
        flaxckpt.save(n.path, STATE, items={"config": config})
    yield
    assert n.config == config


@orbax("`reached_preemption`")
def _(n):
    open_new(n)
    if n.is_before:
        yield
        assert not n.ends
        return
    n.ckpt = flaxckpt.CheckpointManager(n.path, save_every=flaxckpt.Every(steps=100))
    with flaxckpt.on_preemption(n.ckpt):
        yield
        assert not n.saved
        assert not n.ends
        signal.raise_signal(signal.SIGTERM)
        n.step = 4
        yield
    assert n.saved
    assert n.ends
    assert kept(n) == [4]


# T5X: what is on the left is not run


def t5x_state():
    """A state like that of the sample."""
    return jax.tree.map(jnp.asarray, flaxckpt.restore(T5X_STEP))


def from_t5x(n, **other):
    """A new run, whose init_fn makes zeros like the sample, and perhaps more."""
    n.path = T5X_STEP
    n.ckpt = flaxckpt.CheckpointManager(n.directory)
    n.init_fn = lambda: {**jax.tree.map(jnp.zeros_like, t5x_state()), **other}


@t5x("Load without a model")
def _(n):
    n.path = T5X_STEP
    yield
    assert set(n.tree) == {"params", "step", "opt_state", "flax_mutables"}


@t5x("`lazy_parameters`")
def _(n):
    n.path = T5X_STEP
    yield
    assert same(n.kernel, t5x_state()["params"]["Dense_0"]["kernel"])


@t5x('Start from an old checkpoint: `mode="specific"`')
def _(n):
    from_t5x(n)
    yield
    assert same(n.state, t5x_state())


@t5x('Resume: `mode="latest"`')
def _(n):
    open_run(n)
    yield
    assert same(n.state, at(2))


@t5x('`mode="all"`')
def _(n):
    open_run(n)
    yield
    assert [int(state["step"]) for state in n.states] == [0, 1, 2]


@t5x("The partitioner")
def _(n):
    n.mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    n.rules = [("embed", None), ("mlp", "model")]
    boxed = linen.LogicallyPartitioned
    n.init_fn = lambda: {"kernel": boxed(jnp.ones((4, 2)), names=("embed", "mlp"))}
    yield
    (kernel,) = jax.tree.leaves(n.abstract)
    assert kernel.sharding.spec == P(None, "model")


@t5x("Save")
def _(n):
    yield
    assert kept(n) == [3]


@t5x("Restore")
def _(n):
    open_run(n)
    yield
    assert same(n.state, at(2))


@t5x("`all_steps`")
def _(n):
    open_run(n)
    yield
    assert n.found == [0, 1, 2]


@t5x("`save_dtype`")
def _(n):
    n.state = {**STATE, "opt_state": {"mu": jnp.ones(3)}}
    yield
    n.ckpt.save(0, n.state, wait=True)
    found = flaxckpt.restore(n.path / "0")
    assert {leaf.dtype.name for leaf in found["params"].values()} == {"bfloat16"}
    assert same(found["opt_state"], n.state["opt_state"])


@t5x("`restore_dtype`")
def _(n):
    flaxckpt.save(n.path, STATE, options=flaxckpt.Options(save_dtype="bfloat16"))
    yield
    assert {leaf.dtype.name for leaf in n.state["params"].values()} == {"float32"}


@t5x("`period`, `keep`")
def _(n):
    yield
    assert loop(n, range(10)) == [8]


def accuracy_loop(n):
    """The steps that are kept of those with an accuracy."""
    for step, accuracy in enumerate([0.1, 0.4, 0.2, 0.3, 0.2, 0.5]):
        n.ckpt(step, STATE, metrics={"accuracy": accuracy})
    return kept(n)


@t5x("`SaveBestCheckpointer`, with the metrics of the loop")
def _(n):
    yield
    assert accuracy_loop(n) == [1, 5]


@t5x("`SaveBestCheckpointer`, with TensorBoard")
def _(n):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(n.path / "eval"))
    for step, accuracy in enumerate([0.1, 0.4, 0.2, 0.3, 0.2]):
        values = [Summary.Value(tag="accuracy", simple_value=accuracy)]
        writer.add_event(Event(step=step, summary=Summary(value=values)))
    writer.close()
    yield
    for step in range(5):
        n.ckpt(step, STATE)
    n.ckpt.wait()
    assert n.ckpt.best_step() == 1
    assert kept(n) == [1, 3, 4]


@t5x("`force_keep_period`")
def _(n):
    yield
    assert accuracy_loop(n) == [0, 4, 5]


@t5x("The file `PINNED`")
def _(n):
    open_run(n)
    close(n)
    n.ckpt = flaxckpt.CheckpointManager(n.path, keep=flaxckpt.Keep(last=1))
    yield
    assert loop(n, range(3, 6)) == [2, 5]


class Numbers:
    """A data iterator."""

    def __init__(self, position=0):
        self.position = position

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


@t5x("Save the data iterator")
def _(n):
    open_new(n)
    n.dataset_iterator = Numbers(12)
    yield
    close(n)
    fresh = Numbers()
    flaxckpt.restore_items(n.path / "3", {"data": fresh})
    assert fresh.position == 12


@t5x("Restore the data iterator")
def _(n):
    open_new(n)
    n.ckpt.save(0, STATE, items={"data": Numbers(12)})
    n.dataset_iterator = Numbers()
    yield
    assert n.dataset_iterator.position == 12
    assert same(n.state, STATE)


@t5x("`assignment_map`")
def _(n):
    n.path = T5X_STEP
    found = t5x_state()["params"]
    n.target = abstract({"encoder": found["Dense_0"], "Dense_1": found["Dense_1"]})
    yield
    assert same(n.params, {"encoder": found["Dense_0"], "Dense_1": found["Dense_1"]})


@t5x("`assignment_map` to `None`, `fallback_to_scratch`")
def _(n):
    found = t5x_state()
    from_t5x(n, params={**found["params"], "head": {"bias": jnp.ones(3)}})
    yield
    assert same(n.state["params"], {**found["params"], "head": {"bias": jnp.ones(3)}})


@t5x("`fallback_state`")
def _(n):
    n.path = T5X_STEP
    found = t5x_state()["params"]
    n.target = {**jax.tree.map(jnp.zeros_like, found), "head": {"bias": jnp.ones(3)}}
    yield
    assert same(n.params, {**found, "head": {"bias": jnp.ones(3)}})


def doubled(params):
    return {name: {**layer, "kernel": layer["kernel"] * 2} for name, layer in params.items()}


@t5x("`state_transformation_fns`")
def _(n):
    n.path = T5X_STEP
    found = t5x_state()["params"]
    n.target = abstract(found)
    yield
    assert same(n.params, doubled(found))


@t5x("A function of the whole state")
def _(n):
    n.path = T5X_STEP
    found = t5x_state()["params"]
    n.target = abstract({"Dense_0": found["Dense_0"]})
    yield
    assert same(n.params, {"Dense_0": found["Dense_0"]})


@t5x("`is_resuming`")
def _(n):
    from_t5x(n)
    yield
    assert same(n.state["params"], doubled(t5x_state()["params"]))
    n.ckpt.save(0, n.state)
    yield
    assert same(n.state["params"], doubled(t5x_state()["params"]))


@t5x("`concurrent_gb`")
def _(n):
    yield
    assert saved_at(n.path)


# flax


def flax_run(n):
    """A run of three steps, of the library of this side."""
    if n.is_before:
        for step in range(3):
            checkpoints.save_checkpoint(n.path, at(step), step, keep=3)
    else:
        open_run(n)


def old_file(n, file):
    """A file of flax."""
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(serialization.to_bytes(STATE))


def flax_steps(n):
    return sorted(int(path.name.removeprefix("checkpoint_")) for path in n.path.iterdir())


@flax("`save_checkpoint`", "`AsyncManager`", "`save_checkpoint_multiprocess`")
def _(n):
    yield
    if not n.is_before:
        close(n)
    assert saved_at(n.path / ("checkpoint_3" if n.is_before else "3"))


@flax("`restore_checkpoint`", "`restore_checkpoint`, if there may be none")
@flax("Restore without a target")
def _(n):
    flax_run(n)
    yield
    assert same(n.restored, at(2))


@flax("`restore_checkpoint(step=...)`")
def _(n):
    flax_run(n)
    yield
    assert same(n.restored, at(1))


@flax("`latest_checkpoint`")
def _(n):
    flax_run(n)
    yield
    assert saved_at(n.found, at(2))


@flax("`available_steps`")
def _(n):
    flax_run(n)
    yield
    assert n.found == [0, 1, 2]


@flax("`keep`")
def _(n):
    yield
    assert (flax_steps(n) if n.is_before else kept(n)) == [4, 5]


@flax("`keep_every_n_steps`")
def _(n):
    yield
    if n.is_before:
        assert flax_steps(n) == [1, 3, 5]  # the first is no multiple, and 0 is not counted
    else:
        assert kept(n) == [0, 2, 4, 5]


@flax("`overwrite`")
def _(n):
    flax_run(n)
    yield
    if not n.is_before:
        n.ckpt.close()
    assert saved_at(n.path / ("checkpoint_2" if n.is_before else "2"))


@flax("Read an old file", "Start from an old file")
def _(n):
    old_file(n, n.path / "checkpoint_7")
    yield
    assert same(n.restored, STATE)


@flax("`to_bytes`")
def _(n):
    yield
    assert saved_at(n.path)


@flax("`from_bytes` of an old file", "`msgpack_restore` of an old file")
def _(n):
    old_file(n, n.path)
    yield
    assert same(n.restored, STATE)


# CLU


@struct.dataclass
class CluState:
    """CLU wants a class of flax's."""

    w: jax.Array
    step: jax.Array


CLU_STATE = CluState(jnp.arange(3.0), jnp.int32(7))


def in_clu(n):
    from clu import checkpoint, periodic_actions

    n.checkpoint, n.periodic_actions, n.state = checkpoint, periodic_actions, CLU_STATE
    n.init_fn = lambda: jax.tree.map(jnp.zeros_like, CLU_STATE)


def clu_run(n):
    """A run of the library of this side."""
    in_clu(n)
    n.mngr = n.checkpoint.Checkpoint(str(n.path))
    n.ckpt = flaxckpt.CheckpointManager(n.path)
    n.mngr.save(CLU_STATE) if n.is_before else n.ckpt.save(1, CLU_STATE, wait=True)


def old_clu_run(n):
    """A run of CLU's."""
    in_clu(n)
    n.old = n.directory
    n.checkpoint.Checkpoint(str(n.old)).save(CLU_STATE)
    n.ckpt = flaxckpt.CheckpointManager(n.path)


@clu("`Checkpoint`, `max_to_keep`")
def _(n):
    in_clu(n)
    yield
    if n.is_before:
        assert sorted(n.path.glob("*.flax")) == [n.path / "ckpt-4.flax", n.path / "ckpt-5.flax"]
    else:
        assert kept(n) == [3, 4]


@clu("`restore_or_initialize`", "`restore`, `load_state`")
def _(n):
    clu_run(n)
    yield
    assert same(n.restored, CLU_STATE)
    assert isinstance(n.restored, CluState)


@clu("`MultihostCheckpoint`")
def _(n):
    in_clu(n)
    yield
    if n.is_before:
        assert saved_at(f"{n.path}-0", {"w": CLU_STATE.w, "step": CLU_STATE.step})
    else:
        assert kept(n) == [3]


@clu("`latest_checkpoint`")
def _(n):
    clu_run(n)
    yield
    assert n.found == (str(n.path / "ckpt-1") if n.is_before else 1)


@clu("`load_state_dict` of an old run")
def _(n):
    old_clu_run(n)
    yield
    assert same(n.restored, {"w": CLU_STATE.w, "step": CLU_STATE.step})


@clu("Start from an old run")
def _(n):
    old_clu_run(n)
    yield
    assert same(n.restored, CLU_STATE)


@clu("`tf_state`")
def _(n):
    import tensorflow as tf

    in_clu(n)
    if not n.is_before:
        open_new(n)
    n.data = tf.Variable(5) if n.is_before else Numbers(5)
    yield
    if n.is_before:
        fresh = tf.Variable(0)
        n.checkpoint.Checkpoint(str(n.path), tf_state={"data": fresh}).restore(CLU_STATE)
        assert int(fresh) == 5
    else:
        n.ckpt.wait()
        fresh = Numbers()
        n.ckpt.restore(CLU_STATE, items={"data": fresh})
        assert fresh.position == 5


@clu("`PeriodicCallback`")
def _(n):
    in_clu(n)
    n.mngr = n.checkpoint.Checkpoint(str(n.path))
    n.ckpt = flaxckpt.CheckpointManager(n.path)
    yield
    if n.is_before:
        assert len(list(n.path.glob("*.flax"))) == 2
    else:
        assert kept(n) == [4, 8]
