"""What collective operations rely on, of every key-value store."""

import concurrent.futures
import threading
import time

import orjson
import pytest
import tensorstore as ts

from flaxckpt import jax_private, multihost
from flaxckpt.multihost import ProcessGroup
from flaxckpt.store.key_values import StorageKeyValueStore
from tests import cluster
from tests.multihost.memory import MemoryKeyValueStore
from tests.multihost.test_collectives import HANG_SECS, groups, in_threads

pytestmark = pytest.mark.slow


def file_store(directory):
    kvstore = ts.KvStore.open({"driver": "file", "path": f"{directory}/b/"}).result()
    return StorageKeyValueStore(kvstore)


STORES = {
    "memory": lambda _: MemoryKeyValueStore(),
    "file": file_store,
    "kvstore": lambda _: StorageKeyValueStore(ts.KvStore.open({"driver": "memory"}).result()),
}


@pytest.fixture(params=STORES)
def store(request, tmp_path):
    return STORES[request.param](tmp_path)


def keeps_its_promises(store):
    assert store.get("1/a", 0.01) is None
    assert store.get("1/a", 0) is None
    assert store.get_prefix("1") == {}
    store.set("1/a", "first")
    store.set("1/a", "second")
    assert store.get("1/a", HANG_SECS) == "first"
    assert {store.get("1/a", 0) for _ in range(100)} == {"first"}  # without a timeout too
    text = orjson.dumps({"value": "\u00fc\n" * 5000}).decode()
    store.set("1/arrived/1", text)
    store.set("1/arrived/10", "")
    store.set("10/a", "another operation")
    assert store.get_prefix("1/arrived") == {"1": text, "10": ""}
    assert store.get_prefix("1") == {"a": "first", "arrived/1": text, "arrived/10": ""}
    store.delete_prefix("1")
    assert store.get_prefix("1") == {}
    assert store.get("1/a", 0.01) is None
    assert store.get("10/a", HANG_SECS) == "another operation"
    store.delete_prefix("1")
    store.set("1/a", "once more")
    assert store.get("1/a", HANG_SECS) == "once more"


def waits_for_a_key(store):
    """A get ends once the key is set, and not before its timeout otherwise."""
    began = time.monotonic()
    assert store.get("2/never", 0.3) is None
    assert time.monotonic() - began > 0.25
    timer = threading.Timer(0.2, store.set, ("2/late", "here"))
    began = time.monotonic()
    timer.start()
    assert store.get("2/late", HANG_SECS) == "here"
    assert 0.15 < time.monotonic() - began < HANG_SECS / 2
    timer.join()


def test_a_store_keeps_its_promises(store):
    keeps_its_promises(store)


def test_a_store_waits_for_a_key(store):
    waits_for_a_key(store)


def test_one_of_many_values_of_a_key_is_kept(store):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: store.set("3/a", str(i)), range(50)))
        found = set(pool.map(lambda _: store.get("3/a", HANG_SECS), range(50)))
    assert len(found) == 1


def test_processes_meet_in_any_store(store):
    def member(group):
        number = group.broadcast("deciding", lambda: 7)
        return number, group.collective("an operation").all_gather(group.index)

    assert in_threads(member, groups(4, store)) == [(7, [0, 1, 2, 3])] * 4


def on_the_service(context):
    """The same with jax's service: each process has a prefix to itself, and all share one."""
    client = jax_private.coordination_client()
    ours = multihost.CoordinationKeyValueStore(client, f"test/{context.index}")
    keeps_its_promises(ours)
    waits_for_a_key(ours)
    shared = multihost.CoordinationKeyValueStore(client, "test/all")
    shared.set("first", str(context.index))
    group = ProcessGroup(context.index, context.count, shared, HANG_SECS)
    gathered = group.collective("an operation").all_gather(context.index)
    return shared.get("first", HANG_SECS), gathered


def test_the_service_of_jax_keeps_its_promises():
    found = [result.value for result in cluster.run(on_the_service, 3)]
    assert found[0][0] in ("0", "1", "2")
    assert found == [(found[0][0], [0, 1, 2])] * 3
