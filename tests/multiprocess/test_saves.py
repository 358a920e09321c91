"""What the processes of a job do together when they save and restore: one decision, one outcome."""

import os
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt import jax_private
from flaxckpt.run import writer
from flaxckpt.saving import save_plan
from flaxckpt.store import ocdbt
from tests import cluster
from tests.multiprocess import states

OPTIONS = states.options()
KIB = 1 << 10


def spread(value):
    """Rows over all devices, and so over all processes; `value` tells them from others."""
    rows = 2 * jax.device_count()
    where = NamedSharding(Mesh(np.array(jax.devices()), "x"), P("x"))
    numbers = np.arange(rows * 2048, dtype=np.float32).reshape(rows, 2048) + value
    return jax.make_array_from_callback(numbers.shape, where, lambda index: numbers[index])


def raised(call, *args, **kwargs):
    """The name of the class and the text of what `call` raises; `None` when it does not."""
    try:
        call(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the test judges it
        return type(error).__name__, str(error)
    return None


def names_in(directory):
    return sorted(path.name for path in Path(directory).iterdir())


# Whose bytes

NUMBERS = np.arange(16 << 16, dtype=np.float32).reshape(16, 1 << 16)
SPECS = {"spread": P(("data", "model")), "replicated": P()}
# Chunks that are read each by itself.
LARGE = states.options(chunk_bytes=256 * KIB)


def placed(spec, transposed):
    where = NamedSharding(states.make_mesh(transposed), spec)
    return jax.make_array_from_callback(NUMBERS.shape, where, lambda index: NUMBERS[index])


def save_and_note_what_is_read(context, directory):
    places, real = [], ocdbt.read_into

    def noting(directory, place, buffers):
        places.append(tuple(place))
        real(directory, place, buffers)

    ocdbt.read_into = noting
    read = {}
    for name, spec in SPECS.items():
        flaxckpt.save(f"{directory}/{name}", placed(spec, False), options=LARGE)
        multihost_utils.sync_global_devices(name)
        places.clear()
        expected = placed(spec, True)
        restored = flaxckpt.restore(f"{directory}/{name}", expected, options=LARGE)
        states.assert_equal(restored, expected)
        read[name] = list(places)
    return read


def test_each_byte_is_written_by_one_process_and_read_once_by_those_that_need_it(tmp_path):
    results = cluster.run(save_and_note_what_is_read, 4, tmp_path, local_devices=2)
    for name in SPECS:
        item = tmp_path / name / "state"
        written = [
            sum(file.stat().st_size for file in item.glob(f"ocdbt.process_{i}-*/d/*"))
            for i in range(4)
        ]
        assert all(NUMBERS.nbytes / 4 < size < NUMBERS.nbytes / 4 + 8 * KIB for size in written)
        needed = NUMBERS.nbytes // (1 if name == "replicated" else 4)
        for result in results:
            read = result.value[name]
            assert len(set(read)) == len(read) == needed // LARGE.chunk_bytes
            assert needed < sum(length for _, _, length in read) < needed + KIB
        all_read = {place for result in results for place in result.value[name]}
        assert len(all_read) == NUMBERS.nbytes // LARGE.chunk_bytes


# Steps


def save_again_and_again(context, directory):
    plans, real = [], save_plan.make_plan

    def noting(*args):
        plans.append(args)
        return real(*args)

    save_plan.make_plan = noting
    with flaxckpt.CheckpointManager(directory, options=OPTIONS) as ckpt:
        ckpt.save(1, {"w": spread(1)}, metrics={"loss": 1.5}, metadata={"by": "all"})
        ckpt.save(2, {"w": spread(2)})
        exists = raised(ckpt.save, 1, {"w": spread(3)})
        ckpt.save(1, {"w": spread(4)}, overwrite=True)
        ckpt.wait()
        states.assert_equal(ckpt.restore({"w": spread(0)}, step=1), {"w": spread(4)})
        states.assert_equal(ckpt.restore({"w": spread(0)}), {"w": spread(2)})
        ckpt.save(3, {"w": spread(5)}, wait=True)
        return len(plans), exists, ckpt.steps(), ckpt.last_step, ckpt.metrics(1)


def test_the_plan_is_made_once_and_a_step_can_be_replaced(tmp_path):
    results = cluster.run(save_again_and_again, 3, tmp_path)
    for result in results:
        plans, (kind, text), *rest = result.value
        assert plans == 1
        assert kind == "StepExistsError"
        assert str(tmp_path / "1") in text
        assert rest == [[1, 2, 3], 3, {}]
    assert names_in(tmp_path) == ["1", "2", "3"]


def overwrite_a_path(context, path):
    flaxckpt.save(path, spread(1), options=OPTIONS)
    refused = raised(flaxckpt.save, path, spread(2), options=OPTIONS)
    multihost_utils.sync_global_devices("refused")
    states.assert_equal(flaxckpt.restore(path, spread(0)), spread(1))
    multihost_utils.sync_global_devices("restored")
    flaxckpt.save(path, spread(3), overwrite=True, options=OPTIONS)
    states.assert_equal(flaxckpt.restore(path, spread(0)), spread(3))
    return refused


def test_what_process_0_finds_is_the_same_error_on_all(tmp_path):
    results = cluster.run(overwrite_a_path, 3, tmp_path / "x")
    (refused,) = {result.value for result in results}
    assert refused[0] == "StepExistsError"
    assert names_in(tmp_path) == ["x"]


def keep_two(context, directory):
    keep = flaxckpt.Keep(last=2, best=1, mode="min")
    with flaxckpt.CheckpointManager(directory, keep=keep, options=OPTIONS) as ckpt:
        for step, loss in enumerate([3.0, 1.0, 2.0, 4.0, 5.0]):
            assert ckpt(step, {"w": spread(step)}, metrics={"loss": loss})
    multihost_utils.sync_global_devices("closed")  # process 0 deletes, after the others are done
    with flaxckpt.CheckpointManager(directory, options=OPTIONS) as ckpt:
        states.assert_equal(ckpt.restore({"w": spread(0)}), {"w": spread(4)})
        return ckpt.steps(), ckpt.best_step()


def test_steps_are_kept_and_deleted_as_by_a_single_process(tmp_path):
    results = cluster.run(keep_two, 3, tmp_path)
    assert [result.value for result in results] == [([1, 3, 4], 1)] * 3
    assert names_in(tmp_path) == ["1", "3", "4"]


# Schedules


def decisions(directory, pace):
    """Which steps are saved by a clock that goes on by `pace` from step to step."""
    now = 0.0
    every = flaxckpt.Every(secs=10)
    ckpt = flaxckpt.CheckpointManager(
        directory, save_every=every, options=OPTIONS, clock=lambda: now
    )
    with ckpt:
        saved = []
        for step in range(12):
            now += pace
            if ckpt(step, {"step": np.asarray(step)}):
                saved.append(step)
    return saved


def decide_by_different_clocks(context, directory):
    return decisions(directory, [3.0, 11.0, 0.5][context.index])


def test_all_processes_save_when_the_clock_of_process_0_says_so(tmp_path):
    alone = decisions(tmp_path / "alone", 3.0)
    assert alone == [4, 8]
    results = cluster.run(decide_by_different_clocks, 3, tmp_path / "run")
    assert [result.value for result in results] == [alone] * 3
    assert names_in(tmp_path / "run") == sorted(map(str, alone))


def skip_while_one_is_busy(context, directory):
    """Process 0 is still deleting old steps when the others have ended the save."""
    go_on, real = context.dir / "go-on", writer.Writer._delete_unkept

    def slow(self, saved):
        while not go_on.exists():
            time.sleep(0.01)
        real(self, saved)

    writer.Writer._delete_unkept = slow
    with flaxckpt.CheckpointManager(directory, if_busy="skip", options=OPTIONS) as ckpt:
        answers = [ckpt(1, {"w": spread(1)})]
        if context.index:
            ckpt.wait()
        busy = ckpt._is_busy()
        answers.append(ckpt(2, {"w": spread(2)}))
        multihost_utils.sync_global_devices("all have answered")
        go_on.touch()
        ckpt.wait()
        answers.append(ckpt(3, {"w": spread(3)}))
    return busy, answers


def test_all_processes_skip_a_save_or_none_does(tmp_path):
    results = cluster.run(skip_while_one_is_busy, 3, tmp_path)
    assert [result.value[0] for result in results] == [True, False, False]
    assert [result.value[1] for result in results] == [[True, False, True]] * 3
    assert names_in(tmp_path) == ["1", "3"]


# Damage


def save_three(context, directory):
    with flaxckpt.CheckpointManager(directory, options=OPTIONS) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, {"w": spread(step)})


def go_back(context, directory):
    with flaxckpt.CheckpointManager(directory, options=OPTIONS) as ckpt:
        refused = raised(ckpt.restore, {"w": spread(0)})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            restored = ckpt.restore({"w": spread(0)}, on_corrupt="previous")
        states.assert_equal(restored, {"w": spread(2)})
        went = ckpt.last_step, ckpt.next_step, [step for step, _ in ckpt.report.damaged]
        told = [str(w.message) for w in caught if "skipping damaged" in str(w.message)]
        assert ckpt(3, {"w": spread(30)})
        ckpt.wait()
        states.assert_equal(ckpt.restore({"w": spread(0)}), {"w": spread(30)})
        return refused, went, told


def test_what_only_one_process_cannot_read_none_takes(tmp_path):
    cluster.run(save_three, 3, tmp_path)
    (data,) = [
        file
        for file in (tmp_path / "3/state").glob("ocdbt.process_1-*/d/*")
        if file.stat().st_size > 8 * KIB
    ]
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    results = cluster.run(go_back, 3, tmp_path)
    for result in results:
        (kind, text), went, told = result.value
        assert (kind, went) == ("CorruptCheckpointError", (2, 3, [3]))
        assert "the leaf w is damaged" in text
        # Each knows where it was found, if not by itself.
        assert ("process 1" in text) == (result.index != 1)
        assert len(told) == 1


# What differs


def odd_one(context, kind):
    """A state that is not the same on process 1."""
    value = 3 if context.index == 1 else 2
    state = {"w": spread(1), "here": {"odd": 0, "other": np.arange(4)}}
    odd = {
        "numpy": np.full(300, value),
        "number": value,
        "float": value / 10,
        "string": f"value {value}",
        "array_of_each": jnp.full(300, value),
        "dtype": np.zeros(3, np.float32 if value == 2 else np.int32),
        "shape": np.zeros(value),
        "structure": [0] * value,
        "none": None if value == 2 else 0,
    }
    state["here"]["odd"] = odd[kind]
    return state


KINDS = "numpy number float string array_of_each dtype shape structure none".split()


def save_what_differs(context, directory):
    found = {}
    for kind in KINDS:
        state, path = odd_one(context, kind), f"{directory}/{kind}"
        found[kind] = raised(flaxckpt.save, path, state, options=OPTIONS)
        there = list(Path(directory).iterdir())
        multihost_utils.sync_global_devices(kind)
        assert there == [], there
        good = {"w": spread(7), "n": 1}
        flaxckpt.save(path, good, options=OPTIONS)
        states.assert_equal(flaxckpt.restore(path, good), good)
        multihost_utils.sync_global_devices(kind)
        if context.index == 0:
            Path(path).rename(context.dir / kind)
        multihost_utils.sync_global_devices(kind)
    return found


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """What each process was told, by the kind of the difference."""
    return cluster.run(save_what_differs, 3, tmp_path_factory.mktemp("differs"))


@pytest.mark.parametrize("kind", KINDS)
def test_what_differs_between_processes_is_refused(refusals, kind):
    for result in refusals:
        name, text = result.value[kind]
        assert name == "ProcessFailedError"
        assert "process 1" in text


@pytest.mark.parametrize("kind", ["numpy", "number", "float", "array_of_each"])
def test_the_leaf_that_differs_is_named(refusals, kind):
    for result in refusals:
        assert "here/odd" in result.value[kind][1].replace(".", "/")


def save_in_rounds(context, directory):
    """Chunks of 16 numbers, of which the last has one; only the first number differs."""
    options = states.options(chunk_bytes=64, max_host_bytes=1024)
    numbers = np.arange(321, dtype=np.float32)
    numbers[0] = context.index
    with flaxckpt.CheckpointManager(directory, options=options) as ckpt:
        return raised(ckpt.save, 1, {"w": spread(1), "odd": numbers}, wait=True)


def test_what_differs_is_refused_when_it_is_saved_in_rounds(tmp_path):
    for result in cluster.run(save_in_rounds, 2, tmp_path):
        assert result.value is not None
        assert "odd" in result.value[1]


def save_what_one_cannot(context, directory, bad):
    """The leaf of process `bad` was deleted, as by a jit that donated it."""
    state = {"w": spread(1), "gone": spread(2)}
    if context.index == bad:
        state["gone"].delete()
    began = time.monotonic()
    at_once = raised(flaxckpt.save, f"{directory}/x", state, options=OPTIONS)
    ckpt = flaxckpt.CheckpointManager(f"{directory}/run", options=OPTIONS)

    def save_and_wait():
        ckpt.save(1, state)
        ckpt.wait()

    in_background = raised(save_and_wait)
    seconds = time.monotonic() - began
    ckpt.save(1, {"w": spread(1)})
    ckpt.close()
    states.assert_equal(ckpt.restore({"w": spread(0)}), {"w": spread(1)})
    return at_once, in_background, seconds


@pytest.mark.parametrize("bad", [0, 2])
def test_what_one_process_cannot_save_none_does(tmp_path, bad):
    results = cluster.run(save_what_one_cannot, 3, tmp_path, bad)
    for result in results:
        at_once, in_background, seconds = result.value
        assert seconds < OPTIONS.timeout_secs / 4
        for _, text in (at_once, in_background):
            assert "the leaf gone" in text
            assert "its buffer was deleted" in text
        if result.index == bad:
            assert (at_once[0], in_background[0]) == ("UnsupportedLeafError",) * 2
    assert names_in(tmp_path) == ["run"]
    assert names_in(tmp_path / "run") == ["1"]


def save_another_step(context, directory):
    with flaxckpt.CheckpointManager(directory, options=OPTIONS) as ckpt:
        step = 2 if context.index == 1 else 1
        return raised(ckpt.save, step, {"w": spread(step)}, wait=True)


def test_processes_that_save_different_steps_are_told(tmp_path):
    """Or the step that is committed would have the bytes of two."""
    for result in cluster.run(save_another_step, 3, tmp_path):
        assert result.value is not None
        assert result.value[0] in ("ProcessFailedError", "BackgroundSaveError")
        assert "saving step 1" in result.value[1]
        assert "saving step 2" in result.value[1]
    assert names_in(tmp_path) == []


def save_without_one(context, directory):
    options = states.options(timeout_secs=1)
    with flaxckpt.CheckpointManager(directory, options=options) as ckpt:
        ckpt.save(1, {"w": spread(1)}, wait=True)
        if context.index == 1:
            return None
        ckpt.save(2, {"w": spread(2)})
        while ckpt._is_busy():
            time.sleep(0.01)
        return raised(ckpt.wait)


def test_a_process_that_does_not_come_is_named(tmp_path):
    first, _, third = cluster.run(save_without_one, 3, tmp_path)
    for result in (first, third):
        assert result.value[0] == "BackgroundSaveError"
        assert "process 1 did not reach this barrier within 1 s" in result.value[1]
    assert names_in(tmp_path) == ["1"]


def save_without_the_service(context, directory):
    """The processes use a key-value store in the run itself."""
    jax_private.coordination_client = lambda: None
    with flaxckpt.CheckpointManager(directory, options=OPTIONS) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"w": spread(step)})
        exists = raised(ckpt.save, 1, {"w": spread(3)})
        states.assert_equal(ckpt.restore({"w": spread(0)}), {"w": spread(2)})
        return type(ckpt._group.key_values).__name__, ckpt.steps(), exists[0]


def test_a_job_without_the_service_of_jax_meets_in_the_run(tmp_path):
    results = cluster.run(save_without_the_service, 3, tmp_path)
    assert [r.value for r in results] == [("StorageKeyValueStore", [1, 2], "StepExistsError")] * 3
    (key_values,) = (tmp_path / name for name in names_in(tmp_path) if name.startswith("notes"))
    flaxckpt.CheckpointManager(tmp_path).close()
    assert key_values.exists()  # they are no host's: its job may be running
    long_ago = time.time() - 2 * 24 * 3600
    os.utime(key_values, (long_ago, long_ago))
    flaxckpt.CheckpointManager(tmp_path).close()
    assert names_in(tmp_path) == ["1", "2"]


# Loops


def init():
    return {"w": jnp.zeros((8, 16)), "b": jnp.zeros(3), "step": jnp.asarray(0)}


def train(context, directory, until):
    """A loop that resumes if it can."""
    mesh = Mesh(np.array(jax.devices()), "x")
    with flaxckpt.CheckpointManager(directory, options=OPTIONS) as ckpt:
        state = ckpt.restore_or_init(init, mesh=mesh, specs={"w": P("x"), "b": P(), "step": P()})
        began = ckpt.next_step
        update = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state))
        for step in range(began, until):
            state = update(state)
            assert ckpt(step, state)
    assert state["w"].sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 2)
    here = [np.unique(np.asarray(s.data)).tolist() for s in state["w"].addressable_shards]
    return began, here, int(state["step"])


def test_a_loop_begins_anew_or_resumes(tmp_path):
    first = cluster.run(train, 2, tmp_path, 3, local_devices=2)
    assert [result.value for result in first] == [(0, [[3.0]] * 2, 3)] * 2
    then = cluster.run(train, 4, tmp_path, 5)
    assert [result.value for result in then] == [(3, [[5.0]], 5)] * 4


def update_in_place(context, directory):
    mesh = Mesh(np.array(jax.devices()), "x")

    def make(seed):
        model = nnx.Linear(8, 16, rngs=nnx.Rngs(seed))
        for param, spec in ((model.kernel, P("x")), (model.bias, P())):
            whole = np.asarray(param[...]) + seed
            where = NamedSharding(mesh, spec)
            param.set_value(
                jax.make_array_from_callback(whole.shape, where, lambda i, w=whole: w[i])
            )
        return model

    with flaxckpt.CheckpointManager(directory, options=OPTIONS) as ckpt:
        other = make(1)
        assert ckpt.update(other) is None
        ckpt.save(4, make(0), wait=True)
        assert ckpt.update(other) == 4
        states.assert_equal(nnx.state(other), nnx.state(make(0)))
        return ckpt.last_step


def test_nnx_modules_are_updated_in_place(tmp_path):
    results = cluster.run(update_in_place, 2, tmp_path, local_devices=2)
    assert [result.value for result in results] == [4, 4]
