"""What TensorStore finds in the servers of both object stores."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorstore as ts

from tests import cluster
from tests.gcs_server import GcsServer
from tests.s3_server import S3Server

pytestmark = pytest.mark.slow

SERVERS = {"gcs": GcsServer, "s3": S3Server}
MUST_NOT_EXIST = b"\x02"
NOT_WRITTEN = b""
RETRIES = {"max_retries": 3, "initial_delay": "20ms", "max_delay": "40ms"}


@pytest.fixture(scope="module", params=SERVERS)
def running(request):
    with SERVERS[request.param]() as server:
        yield server


@pytest.fixture
def server(running, monkeypatch):
    """The server, without faults."""
    for name, value in running.env.items():
        monkeypatch.setenv(name, value)
    running.fail = running.lose = None
    running.log.clear()
    return running


@pytest.fixture
def store(server, request):
    """A prefix of its own for each test."""
    return open_store(server.spec(f"{request.node.name}/"))


def open_store(spec):
    context = ts.Context({"gcs_request_retries": RETRIES, "s3_request_retries": RETRIES})
    return ts.KvStore.open(spec, context=context).result()


def names(store, **limits):
    return store.list(ts.KvStore.KeyRange(**limits)).result()


def create(spec, value):
    """Whether `value` was the first at the key."""
    written = open_store(spec).write("key", value, if_equal=MUST_NOT_EXIST).result()
    return written.generation != NOT_WRITTEN


def create_in_a_process(context, spec):
    return create(spec, f"process {context.index}")


def test_what_is_written_is_read(server, store):
    value = np.random.default_rng(0).bytes(3 << 20)
    began = time.monotonic()
    generation = store.write("a/b c%2F?", value).result().generation
    assert time.monotonic() - began < 0.9, "the client had to wait before it sent the body"
    found = store.read("a/b c%2F?").result()
    assert found.value == value
    assert found.stamp.generation == generation
    assert store.read("a").result().state == "missing"
    assert server.count("PUT") + server.count("POST") == 1


def test_a_range_is_asked_for(server, store):
    store.write("key", b"0123456789").result()
    assert store.read("key", byte_range=slice(2, 5)).result().value == b"234"
    assert server.log[-1].headers["range"] == "bytes=2-4"
    assert store.read("key", byte_range=slice(7, None)).result().value == b"789"
    assert store.read("key", byte_range=slice(-2, None)).result().value == b"89"


def test_keys_are_listed_and_deleted_by_range(store):
    for name in ["a", "b/1", "b/2", "c"]:
        store.write(name, b"").result()
    assert names(store) == [b"a", b"b/1", b"b/2", b"c"]
    assert names(store, inclusive_min=b"b/", exclusive_max=b"b0") == [b"b/1", b"b/2"]
    store.delete_range(ts.KvStore.KeyRange(b"b/", b"b0")).result()
    assert names(store) == [b"a", b"c"]


def test_one_of_many_creates_the_key(store):
    def write(value):
        return store.write("key", value, if_equal=MUST_NOT_EXIST).result().generation

    values = [str(number).encode() for number in range(8)]
    with ThreadPoolExecutor(len(values)) as pool:
        generations = list(pool.map(write, values))
    (winner,) = (i for i, generation in enumerate(generations) if generation != NOT_WRITTEN)
    assert store.read("key").result().value == values[winner]


def test_a_stale_generation_replaces_nothing(store):
    first = store.write("key", b"1").result().generation
    second = store.write("key", b"2", if_equal=first).result().generation
    assert second not in (first, NOT_WRITTEN)
    assert store.write("key", b"3", if_equal=first).result().generation == NOT_WRITTEN
    assert store.read("key").result().value == b"2"


def test_what_is_unavailable_is_tried_again(server, store):
    refused = []

    def refuse_twice(request):
        refused.append(request.method)
        return 503 if len(refused) <= 2 else None

    server.fail = refuse_twice
    assert store.write("key", b"1").result().generation != NOT_WRITTEN
    assert len(refused) == len(server.log) > 2
    server.fail = lambda request: 503
    with pytest.raises(ValueError, match="503"):
        store.read("key").result()


def test_what_is_forbidden_is_not_tried_again(server, store):
    server.fail = lambda request: 403
    for operation in (store.read("key"), store.write("key", b"1")):
        with pytest.raises(ValueError, match="PERMISSION_DENIED"):
            operation.result()
    assert len(server.log) == 2


def test_an_answer_is_late(server, store):
    server.fail = lambda request: 0.2
    began = time.monotonic()
    store.read("key").result()
    assert time.monotonic() - began >= 0.2


def test_a_create_whose_answer_is_lost_looks_like_a_lost_race(server, store):
    lost = []

    def lose_once(request):
        if request.method in ("PUT", "POST") and not lost:
            lost.append(request)
            return 503
        return None

    server.lose = lose_once
    written = store.write("key", b"mine", if_equal=MUST_NOT_EXIST).result()
    assert written.generation == NOT_WRITTEN
    assert store.read("key").result().value == b"mine"


def test_processes_find_the_server(server):
    spec = server.spec("processes/")
    results = cluster.run(create_in_a_process, 2, spec, env=server.env)
    assert sorted(result.value for result in results) == [False, True]
