"""The values of a state on their way to the disk, with much memory and with little."""

from __future__ import annotations

import dataclasses
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt import errors
from flaxckpt.run import writer
from flaxckpt.saving import snapshot
from flaxckpt.saving.save_plan import PlannedTree, plan_tree
from flaxckpt.saving.snapshot import PART, hold, stream
from tests.trees import assert_same

CHUNK = 512
OPTIONS = flaxckpt.Options(chunk_bytes=CHUNK, max_host_bytes=8 * CHUNK, fsync=False)


def state():
    """Leaves of every size and of every kind of place."""
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    big = np.random.default_rng(0).integers(0, 200, (32, 48))
    return {
        "f32": jnp.asarray(big, jnp.float32),
        "bf16": jnp.asarray(big[:, :7], jnp.bfloat16),
        "i4": jnp.asarray(big % 7, jnp.int4),
        "u4": jnp.asarray(big % 15, jnp.uint4),
        "flags": jnp.asarray(big > 99),
        "sharded": jax.device_put(jnp.asarray(big, jnp.int32), NamedSharding(mesh, P("x", "y"))),
        "replicated": jax.device_put(
            jnp.asarray(big, jnp.int16), NamedSharding(mesh, P(None, "y"))
        ),
        "keys": jax.random.split(jax.random.key(0), 99),
        "numpy": big.astype(np.int64),
        "swapped": big.astype(">i4")[:, ::-1],
        "texts": np.array([f"{n}" for n in range(500)]),
        "dates": np.arange(500).astype("<M8[s]"),
        "float6": big.astype(ml_dtypes.float6_e2m3fn),
        "numbers": [jnp.float32(1), np.float64(2), 3, jnp.zeros((0, 4)), jnp.ones((1, 1))],
    }


def remote(state):
    """`state` as if its jax arrays lay on an accelerator."""
    arrays = [
        dataclasses.replace(array, is_remote=isinstance(data, jax.Array))
        for array, data in zip(state.plan.arrays, state.data, strict=True)
    ]
    return PlannedTree(dataclasses.replace(state.plan, arrays=tuple(arrays)), state.data)


def encoded(pieces):
    """All keys and values, each once."""
    values = {}
    for piece in pieces:
        for key, value in piece.encode():
            assert key not in values
            values[key] = value
    return values


@pytest.fixture(scope="module")
def taken():
    """The planned state, and its bytes."""
    found = plan_tree(state(), CHUNK)
    return found, encoded(hold(found))


LIMITS = [None, 4 * CHUNK, 5 * CHUNK + 1, 40 * CHUNK, 1 << 30]


@pytest.mark.parametrize("place", [lambda s: s, remote], ids=["on the host", "on an accelerator"])
@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("limit", LIMITS)
def test_a_stream_has_the_same_bytes_as_what_is_held(taken, limit, copy, place):
    found, expected = taken
    assert encoded(stream(place(found), limit=limit, copy=copy)) == expected


def test_what_is_held_of_an_accelerator_has_the_same_bytes(taken):
    assert encoded(hold(remote(taken[0]))) == taken[1]


@settings(max_examples=30)
@given(
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.sampled_from(["float32", "int8", "bfloat16", "bool"]),
    st.integers(1, 64),
    st.integers(4, 400),
    st.booleans(),
)
def test_any_array_is_cut_the_same_way(shape, dtype, chunk, limit, copy):
    array = jnp.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    found = remote(plan_tree(array, chunk))
    assert encoded(stream(found, limit=limit, copy=copy)) == encoded(hold(found))


@pytest.mark.parametrize("place", [lambda s: s, remote], ids=["on the host", "on an accelerator"])
def test_a_large_shard_comes_chunk_by_chunk_in_memory_of_its_own(taken, place):
    limit = 8 * CHUNK
    for piece in stream(place(taken[0]), limit=limit, copy=True):
        assert piece.values.nbytes <= limit // PART
        base = piece.values if piece.values.base is None else piece.values.base
        if isinstance(base, np.ndarray):
            assert base.nbytes <= max(limit // PART, piece.values.nbytes)


def test_a_small_shard_is_one_piece(taken):
    sizes = [len(piece.chunks) for piece in stream(taken[0], limit=1 << 30, copy=True)]
    assert len(sizes) == len(taken[0].plan.shards)
    assert max(sizes) > 1


def test_no_more_is_on_its_way_than_the_limit(monkeypatch):
    """Transfers are begun ahead of what is taken, as far as the limit allows."""
    found = remote(plan_tree({str(i): jnp.full(CHUNK, i, jnp.int8) for i in range(20)}, CHUNK))
    begun = []
    array_type = type(found.data[0])
    monkeypatch.setattr(array_type, "copy_to_host_async", lambda self: begun.append(self))
    limit = 5 * CHUNK
    for count, _ in enumerate(stream(found, limit=limit, copy=False)):
        assert count < len(begun) <= count + limit // CHUNK + 1
    assert len(begun) == 20
    begun.clear()
    assert next(stream(found, limit=None, copy=False)) is not None
    assert len(begun) == 20


def test_a_chunk_is_compiled_once_for_its_shape_not_for_its_place(caplog):
    found = remote(plan_tree(jnp.arange(64 * 499, dtype=jnp.int8), 499))
    with jax.log_compiles():
        assert len(list(stream(found, limit=4 * 499, copy=True))) == 64
    messages = [record.getMessage() for record in caplog.records]
    compiled = [text for text in messages if "Compiling" in text and "int8[31936]" in text]
    assert len(compiled) == 1


# In a run


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def accelerator(monkeypatch):
    """Makes a run believe that jax arrays lie on an accelerator."""
    monkeypatch.setattr("flaxckpt.saving.save.plan_tree", lambda *args: remote(plan_tree(*args)))


@pytest.mark.parametrize("where", ["the host", "an accelerator"])
@pytest.mark.parametrize("async_", [True, False])
def test_a_save_with_little_memory_restores_exactly(run, async_, where, request):
    if where == "an accelerator":
        request.getfixturevalue("accelerator")
    with flaxckpt.CheckpointManager(run, async_=async_, options=OPTIONS) as ckpt:
        ckpt.save(0, state())
        ckpt.save(1, state())
        assert_same(ckpt.restore(state(), step=1), state())
    assert flaxckpt.verify(run / "0")


@pytest.mark.parametrize("where", ["the host", "an accelerator"])
def test_after_a_save_in_rounds_the_state_may_change(run, where, request, monkeypatch):
    if where == "an accelerator":
        request.getfixturevalue("accelerator")
    array, device = np.arange(5000), [jnp.arange(5000.0) + i for i in range(3)]
    small, small_device = np.arange(9), jnp.arange(9.0)
    expected = [array.copy(), *(np.array(d) for d in device), small.copy(), np.array(small_device)]
    changed, real = threading.Event(), writer.write

    def slow(job, pieces, collective):
        def late():
            for piece in pieces:
                if piece.array.stored.store == job.state.plan.arrays[-2].stored.store:
                    assert changed.wait(60)  # the last two are written after that
                yield piece

        real(job, late(), collective)

    monkeypatch.setattr(writer, "write", slow)
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    with flaxckpt.CheckpointManager(run, options=OPTIONS) as ckpt:
        ckpt.save(0, [array, *device, small, small_device])
        array[:] = small[:] = -1
        jax.block_until_ready([double(x) for x in [*device, small_device]])
        changed.set()
        restored = ckpt.restore(as_numpy=True)
    assert all((a == b).all() for a, b in zip(restored, expected, strict=True))


def test_a_writer_that_fails_while_it_is_fed_is_heard_of_at_once(run, monkeypatch):
    ckpt = flaxckpt.CheckpointManager(run, options=OPTIONS)
    ckpt.save(0, {"w": np.zeros(5000)})
    ckpt.wait()
    real = writer.write

    def failing(plan, pieces, *args, **kwargs):
        def some():
            for n, piece in enumerate(pieces):
                if n == 3:
                    raise OSError(28, "No space left on device")
                yield piece

        real(plan, some(), *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write", failing)
        with pytest.raises(errors.BackgroundSaveError, match="saving step 1 .* No space left"):
            ckpt.save(1, {"w": np.ones(5000)})
    assert ckpt.steps() == [0]
    assert flaxckpt.CheckpointManager(run, read_only=True).steps() == [0]
    ckpt.save(1, {"w": np.ones(5000)})
    ckpt.close()
    assert ckpt.steps() == [0, 1]
    assert (ckpt.restore(step=1)["w"] == 1).all()
    assert not [p.name for p in run.iterdir() if "1" in p.name and p.name != "1"]


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_error_of_the_loop_while_it_feeds_aborts_the_save(run, monkeypatch, error):
    ckpt = flaxckpt.CheckpointManager(run, options=OPTIONS)
    ckpt.save(0, {"w": np.zeros(5000)}, wait=True)
    calls = []

    def failing(*args, real=snapshot._chunks):
        for piece in real(*args):
            calls.append(piece)
            if len(calls) == 3:
                raise error("the loop's")
            yield piece

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "_chunks", failing)
        with pytest.raises(error, match="the loop's"):
            ckpt.save(1, {"w": np.ones(5000)})
    with pytest.raises(errors.BackgroundSaveError, match="could not be read to its end"):
        ckpt.wait()
    assert ckpt.steps() == [0]
    ckpt.save(1, {"w": np.ones(5000)})
    ckpt.close()
    assert ckpt.steps() == [0, 1]
    assert (ckpt.restore(step=1)["w"] == 1).all()
