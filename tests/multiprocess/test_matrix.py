"""Saved by any number of processes, restored by any other, on every kind of store, bit for bit."""

import pytest

import flaxckpt
from tests import cluster, stores
from tests.multiprocess import states

# How many processes, and the devices of each.
DEVICES = {1: 2, 2: 2, 4: 2, 8: 1}


def save(context, path, options):
    flaxckpt.save(path, states.build(states.make_mesh()), options=options)


def restore_all(context, paths, options):
    """Each checkpoint onto the mesh it was saved on, if it has so many devices, and another."""
    for transposed in (False, True):
        mesh = states.make_mesh(transposed)
        expected = states.build(mesh)
        # To a restore a state that is there and one that is not are the same.
        target = expected if transposed else states.abstract(mesh)
        for path in paths:
            states.assert_equal(flaxckpt.restore(path, target, options=options), expected)


@pytest.fixture(scope="module", params=stores.ALL)
def saved(request, tmp_path_factory):
    """The paths of a checkpoint by each number of processes, the options, and the environment."""
    with stores.opened(request.param, tmp_path_factory.mktemp("matrix")) as store:
        options = store.options(chunk_bytes=states.CHUNK_BYTES, fsync=False, timeout_secs=60)
        paths = {count: f"{store.url('matrix')}/by-{count}" for count in DEVICES}
        for count, path in paths.items():
            cluster.run(save, count, path, options, local_devices=DEVICES[count], env=store.env)
        yield paths, options, store.env


@pytest.mark.parametrize("count", DEVICES)
def test_any_number_of_processes_restores_what_any_other_saved(saved, count):
    paths, options, env = saved
    wanted = list(paths.values())
    cluster.run(restore_all, count, wanted, options, local_devices=DEVICES[count], env=env)


def test_a_process_without_a_cluster_restores_what_any_number_saved(saved):
    paths, options, _ = saved
    restore_all(None, paths.values(), options)


@pytest.mark.parametrize("count", DEVICES)
def test_without_a_target_no_device_of_the_job_is_needed(saved, count):
    paths, options, _ = saved
    tree = flaxckpt.restore(paths[count], as_numpy=True, options=options)
    states.assert_equal_on_the_host(tree)


@pytest.mark.parametrize("count", DEVICES)
def test_every_byte_verifies(saved, count):
    paths, options, _ = saved
    report = flaxckpt.verify(paths[count], options=options)
    assert report.problems == ()
    assert report.leaves == len(states.on_the_host(states.abstract(states.make_mesh())))
