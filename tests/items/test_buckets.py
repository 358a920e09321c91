"""Items in buckets."""

import numpy as np
import pytest
from google.protobuf import struct_pb2

import flaxckpt
from flaxckpt.errors import CorruptCheckpointError, DirectoryError
from tests import stores
from tests.items.test_manager_items import Counter, manager, state
from tests.multiprocess import jobs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with stores.opened("s3", tmp_path_factory.mktemp("s3")) as store:
        yield store


def everything():
    return {
        "data": Counter(3),
        "config": {"a": 1},
        "rng": np.random.default_rng(1),
        "old": np.random.RandomState(1),
        "ema": state(5),
        "message": struct_pb2.Struct(),
    }


def test_all_kinds_are_saved_restored_verified_and_deleted(store):
    url, options, it = store.url("all"), store.options(), Counter()
    with jobs.manager(url, options) as ckpt:
        ckpt.save(1, state(1), items=everything())
        ckpt.save(2, state(2), items=everything())
        ckpt.wait()
        wanted = dict.fromkeys(everything()) | {"data": it, "message": struct_pb2.Struct}
        assert ckpt.restore(items=wanted)["step"] == 2
        assert it.at == 3
        assert ckpt.items["ema"]["step"] == 5
        assert ckpt.items["rng"].random() == np.random.default_rng(1).random()
        assert ckpt.items["old"].random_sample() == np.random.RandomState(1).random_sample()
        report = flaxckpt.verify(f"{url}/2", options=options)
        assert report, report.problems
        ckpt.delete(1)
        assert not [name for name in store.objects("all") if name.startswith("1/")]
    assert store.strays("all") == []


def test_damage_is_found(store):
    url, options = store.url("damage"), store.options()
    flaxckpt.save(f"{url}/1", state(1), items=everything(), options=options)
    store.write("damage", "1/config/metadata", b'{"a": 2}')
    store.write("damage", "1/ema/stray", b"")
    with pytest.raises(CorruptCheckpointError, match="the item config"):
        flaxckpt.restore_items(f"{url}/1", {"config": None}, options)
    assert [
        line.split("/damage/")[1] for line in flaxckpt.verify(f"{url}/1", options=options).problems
    ] == [
        "1/ema/stray does not belong to the checkpoint",
        "1/config/metadata does not match its checksum",
    ]
    store.write("damage", "1/config/metadata", None)
    with pytest.raises(CorruptCheckpointError, match="the item config .* is missing"):
        flaxckpt.restore_items(f"{url}/1", {"config": None}, options)


@pytest.mark.parametrize("name", ["data/process_0-of-1.json", "data/notes.txt", "config/metadata"])
def test_what_somebody_else_has_there_is_not_touched(store, name):
    run = name.replace("/", "-")
    store.write(run, f"1/{name}", b"precious")
    with jobs.manager(store.url(run), store.options()) as ckpt:
        with pytest.raises(flaxckpt.errors.FlaxckptError) as found:
            ckpt.save(1, state(1), items={"data": Counter()}, wait=True)
    error = found.value.__cause__ or found.value
    assert isinstance(error, DirectoryError)
    assert store.read(run, f"1/{name}") == b"precious"


def test_a_copy_on_a_disk_is_the_same_checkpoint(store, tmp_path):
    flaxckpt.save(f"{store.url('copy')}/1", state(1), items=everything(), options=store.options())
    for name in store.objects("copy"):
        if name.startswith("1/"):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(store.read("copy", name))
    with manager(tmp_path) as ckpt:
        it = Counter()
        assert ckpt.restore(items={"data": it, "ema": None})["step"] == 1
        assert it.at == 3
