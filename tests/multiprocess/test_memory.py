"""Each process of a job saves and restores within its own part of the state and its budget."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from tests import cluster
from tests.memory_child import MIB, peak
from tests.multiprocess import states

STATE = 256 * MIB
BUDGET = 64 * MIB
# What allocators, TensorStore and Python keep; less than the part of another process.
SLACK = 24 * MIB
OPTIONS = states.options(chunk_bytes=4 * MIB, max_host_bytes=BUDGET)

pytestmark = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="this system does not tell peaks"
)


def sharding(spec=P("x")):
    return NamedSharding(Mesh(np.array(jax.devices()), "x"), spec)


def filled(shape, spec=P("x")):
    """An array whose memory is all there."""
    where = sharding(spec)
    rows = where.shard_shape(shape)

    def part(index):
        return np.full(rows, 1 + (index[0].start or 0), np.float32)

    return jax.block_until_ready(jax.make_array_from_callback(shape, where, part))


def save_and_restore(context, directory):
    """How far the process grew in a save, and in a restore beyond what that returned to it."""
    tiny, shape = {"w": filled((2, 8))}, (16, STATE // 64)
    flaxckpt.save(f"{directory}/tiny", tiny, options=OPTIONS)
    flaxckpt.restore(f"{directory}/tiny", tiny, options=OPTIONS)
    ckpt = flaxckpt.CheckpointManager(f"{directory}/run", options=OPTIONS)
    ckpt.save(0, tiny, wait=True)
    state, path = {"w": filled(shape)}, f"{directory}/x"
    multihost_utils.sync_global_devices("filled")
    save = functools.partial(flaxckpt.save, path, state, options=OPTIONS)
    in_background = functools.partial(ckpt.save, 1, state, wait=True)
    grown = {"save": peak(save)[0], "background": peak(in_background)[0]}
    del state, save, in_background
    target = {"w": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding())}
    grown["restore"], restored = peak(
        lambda: jax.block_until_ready(flaxckpt.restore(path, target, options=OPTIONS))
    )
    here = sum(shard.data.nbytes for shard in restored["w"].addressable_shards)
    grown["restore"] -= here
    rows = [(s.index[0].start or 0, np.unique(s.data)) for s in restored["w"].addressable_shards]
    assert all(values.tolist() == [1 + start] for start, values in rows)
    return here, grown


def test_each_process_keeps_its_budget(tmp_path):
    for result in cluster.run(save_and_restore, 2, tmp_path):
        here, grown = result.value
        assert here == STATE // 2
        assert {n: size for n, size in grown.items() if size > BUDGET + SLACK} == {}, grown
