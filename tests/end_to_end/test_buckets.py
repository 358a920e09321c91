"""Runs and checkpoints in `s3://` and `gs://`, in the servers of `tests`, and what goes wrong."""

import contextlib
import os
import re
import socket
import threading
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

import flaxckpt
from flaxckpt import CheckpointManager, Keep, ObjectStore, Options, errors
from flaxckpt.store import layout, ocdbt
from flaxckpt.store.bucket import BucketStore
from flaxckpt.testing import differences
from tests import stores

pytestmark = pytest.mark.slow

MIB = 1 << 20
WRITES = ("PUT", "POST")


@pytest.fixture(scope="module", params=stores.BUCKETS)
def running(request):
    with stores.opened(request.param, None) as store:
        yield store


@pytest.fixture
def store(running):
    """A bucket whose server has no faults."""
    running.server.fail = running.server.lose = None
    running.server.log.clear()
    return running


@pytest.fixture
def run(request):
    """The name of a run of its own for each test."""
    return re.sub(r"\W+", "-", request.node.name)


def state(step=1):
    return {
        "w": jnp.arange(3000.0).reshape(30, 100) + step,
        "b": np.full(4, step),
        "step": step,
        "text": ["a", ""],
    }


def manager(store, run, *, timeout_secs=60, **settings):
    options = store.options(timeout_secs=timeout_secs)
    return CheckpointManager(store.url(run), options=options, **settings)


def path(request):
    """The object, or the prefix, that a request is about; servers differ in where they say it."""
    return urllib.parse.unquote(request.path) + " " + request.query.get("name", "")


# What works in a directory works in a bucket


def test_a_run_is_saved_listed_inspected_verified_and_restored(store, run):
    with manager(store, run) as ckpt:
        assert (ckpt.steps(), ckpt.latest_step(), ckpt.next_step) == ([], None, 0)
        ckpt.save(9, state(9), metrics={"loss": 0.5}, metadata={"lang": "en"})
        ckpt.save(10, state(10))
    reader = manager(store, run, read_only=True)
    assert (reader.steps(), reader.latest_step(), reader.next_step) == ([9, 10], 10, 11)
    assert (reader.metrics(9), reader.metadata(9)) == ({"loss": 0.5}, {"lang": "en"})
    assert differences(reader.restore(), state(10)) == []
    assert differences(reader.restore(state(), step=9), state(9)) == []
    assert isinstance(reader.directory, epath.Path)
    assert reader.report.path == reader.directory / "9" == epath.Path(f"{store.url(run)}/9")
    options, url = store.options(), f"{store.url(run)}/9"
    assert flaxckpt.inspect(url, options=options).tree["w"].shape == (30, 100)
    assert flaxckpt.verify(url, options=options).problems == ()
    assert differences(flaxckpt.restore(url, options=options), state(9)) == []
    assert store.strays(run) == []


def test_a_single_checkpoint_and_a_path_with_one_slash(store, run):
    options, url = store.options(), store.url(run)
    flaxckpt.save(f"{url}/exported", state(), options=options)
    one_slash = f"{url}/exported".replace("://", ":/")
    assert differences(flaxckpt.restore(one_slash, options=options), state()) == []
    with pytest.raises(errors.StepExistsError, match="a checkpoint already exists"):
        flaxckpt.save(f"{url}/exported", state(2), options=options)
    with pytest.raises(errors.CheckpointNotFoundError, match=r"Check the URL"):
        flaxckpt.restore(f"{url}/export", options=options)


def test_steps_are_kept_pinned_and_deleted(store, run):
    with manager(store, run, keep=Keep(last=2), async_=False) as ckpt:
        ckpt.save(1, {"x": 1})
        ckpt.pin(1)
        for step in range(2, 6):
            ckpt.save(step, {"x": step})
        assert ckpt.steps() == [1, 4, 5]
        with pytest.raises(errors.StepPinnedError):
            ckpt.delete(1)
        ckpt.pin(1, False)
        ckpt.delete(1)
        assert ckpt.steps() == [4, 5]
        with pytest.raises(errors.CheckpointNotFoundError):
            ckpt.delete(1)
    assert store.strays(run) == []
    assert {name.split("/")[0] for name in store.objects(run)} == {layout.CLAIMS, "4", "5"}


def test_a_step_is_not_replaced_and_can_be_saved_again_once_it_is_deleted(store, run):
    with manager(store, run, async_=False) as ckpt:
        ckpt.save(1, state(1))
        with pytest.raises(errors.StepExistsError, match="a checkpoint already exists"):
            ckpt.save(1, state(2))
        with pytest.raises(errors.StepExistsError, match="cannot be replaced safely"):
            ckpt.save(1, state(2), overwrite=True)
        assert differences(ckpt.restore(), state(1)) == []
        ckpt.delete(1)
        ckpt.save(1, state(2))
        assert differences(ckpt.restore(), state(2)) == []
    assert store.strays(run) == []


def test_an_evaluator_follows(store, run):
    with manager(store, run) as ckpt:
        following = manager(store, run, read_only=True).follow(timeout_secs=0.3, poll_secs=0.01)
        ckpt.save(3, {"x": 3}, wait=True)
        assert next(following) == 3
        ckpt.save(4, {"x": 4}, wait=True)
        assert list(following) == [4]


def test_a_damaged_step_is_passed_over_and_saved_anew(store, run):
    with manager(store, run) as ckpt:
        ckpt.save(1, state(1))
        ckpt.save(2, state(2), wait=True)
        store.write(run, "2/state/_METADATA", b"{")
        with pytest.warns(UserWarning, match="skipping damaged step 2"):
            assert ckpt.restore(on_corrupt="previous")["step"] == 1
        assert ckpt(2, state(2))
        assert differences(ckpt.restore(), state(2)) == []


# Steps, markers and claims


def test_a_step_whose_claim_does_not_say_that_it_is_committed_is_none(store, run):
    with manager(store, run) as ckpt:
        ckpt.save(1, state(1))
        ckpt.save(2, state(2))
    store.write(run, f"{layout.CLAIMS}/2", b"0" * 12 + b" writing")
    reader = manager(store, run, read_only=True)
    assert (reader.steps(), reader.latest_step()) == ([1], 1)
    assert reader.restore()["step"] == 1
    with pytest.raises(errors.CheckpointNotFoundError, match="never ended"):
        flaxckpt.restore(f"{store.url(run)}/2", options=store.options())


def test_what_a_dead_writer_left_is_removed_at_the_first_save_and_not_before(store, run):
    with manager(store, run) as ckpt:
        ckpt.save(1, state(1))
        ckpt.save(2, state(2))
    # A writer died before its commit of step 2, and right after its claim to step 3.
    store.write(run, f"{layout.CLAIMS}/2", b"0" * 12 + b" writing")
    store.write(run, f"{layout.CLAIMS}/3", b"0" * 12 + b" writing")
    left = store.objects(run)
    with manager(store, run) as ckpt:
        assert ckpt.next_step == 2
        ckpt.pin(1)
        assert set(left) < set(store.objects(run))
        ckpt.save(2, state(20), wait=True)
        assert differences(ckpt.restore(), state(20)) == []
    assert manager(store, run).steps() == [1, 2]
    assert store.strays(run) == []


def test_objects_of_somebody_else_are_never_deleted(store, run):
    store.write(run, "5/precious.txt", b"data")
    with manager(store, run) as ckpt:
        ckpt.save(5, state(5))
        with pytest.raises(errors.BackgroundSaveError, match="precious.txt") as caught:
            ckpt.wait()
        assert isinstance(caught.value.__cause__, errors.DirectoryError)
        assert store.objects(run) == ["5/precious.txt"]
        ckpt.save(6, state(6), wait=True)
        assert ckpt.steps() == [6]
    store.write(run, "notes/of/mine", b"data")
    store.write(run, "_claims/mine.txt", b"data")
    with manager(store, run) as ckpt:
        assert ckpt.steps() == [6]
        ckpt.save(7, state(7))
    assert {"5/precious.txt", "notes/of/mine"} < set(store.objects(run))


def test_deleting_a_step_begins_with_its_marker_and_ends_with_its_claim(store, run):
    with manager(store, run) as ckpt:
        ckpt.save(1, state(1), wait=True)
        store.server.log.clear()
        ckpt.delete(1)
    deleted = [path(request) for request in store.server.log if request.method == "DELETE"]
    assert deleted[0].strip().endswith(f"1/{layout.COMMIT_SUCCESS}")
    assert deleted[-1].strip().endswith(f"{layout.CLAIMS}/1")
    assert len(deleted) > 5


@pytest.mark.parametrize("name", [f"{layout.CLAIMS}/1", f"1/{layout.COMMIT_SUCCESS}"])
def test_a_create_whose_answer_is_lost_is_recognised(name, store, run):
    """The request is repeated, and finds what it has made itself."""
    lost = []

    def lose_once(request):
        if request.method in WRITES and path(request).strip().endswith(f"{run}/{name}"):
            lost.append(request)
            return 503 if len(lost) == 1 else None
        return None

    store.server.lose = lose_once
    with manager(store, run) as ckpt:
        ckpt.save(1, state(1))
    assert len(lost) > 1
    assert differences(manager(store, run).restore(), state(1)) == []
    assert store.strays(run) == []


def test_a_store_that_ignores_conditions_is_refused(store, run):
    def write(self, at, data, generation):
        self._put(at, data)
        return True

    with mock.patch.object(BucketStore, "_write_if", write):
        with manager(store, run) as ckpt:
            with pytest.raises(errors.DirectoryError, match="ignores conditional writes"):
                ckpt.save(1, state(1))
        with pytest.raises(errors.DirectoryError, match="ignores conditional writes"):
            flaxckpt.save(f"{store.url(run)}/x", state(), options=store.options())
    assert store.objects(run) == []


# How much is asked of the store


def test_requests_do_not_depend_on_how_many_objects_old_steps_have(store, run):
    def count(function):
        store.server.log.clear()
        result = function()
        return len(store.server.log), result

    def requests():
        reader = manager(store, run, read_only=True)
        latest, step = count(lambda: reader.latest_step())
        restore, _ = count(lambda: manager(store, run, read_only=True).restore(step=3))
        assert step == 3
        return latest, restore

    with manager(store, run) as ckpt:
        for step in range(1, 4):
            ckpt.save(step, state(step))
    few = requests()
    kvstore = store.kvstore(run)
    more_than_one_list = range(1200)
    names = [f"{1 + number % 2}/state/d/{number:032x}" for number in more_than_one_list]
    for written in [kvstore.write(name, b"") for name in names]:
        written.result()
    assert len(store.objects(run)) > 1200
    assert requests() == few
    latest, restore = few
    assert latest <= 4
    assert restore <= 30


def test_a_data_file_has_a_bounded_size(store, run):
    """An S3 object is uploaded in one request, which has at most 5 GiB."""
    assert ocdbt.DATA_FILE_BYTES <= 256 * MIB
    sizes = []

    def note(request):
        if request.method in WRITES and "/d/" in path(request):
            sizes.append(int(request.headers.get("content-length", 0)))

    store.server.fail = note
    with mock.patch.object(ocdbt, "DATA_FILE_BYTES", MIB):
        with manager(store, run) as ckpt:
            ckpt.save(1, {f"x{i}": np.random.default_rng(i).bytes(MIB // 2) for i in range(8)})
            ckpt.save(2, {f"x{i}": np.arange(MIB // 16) + i for i in range(8)})
    assert len(sizes) > 4
    assert max(sizes) < 2 * MIB


# What goes wrong


def every_entry_point(store, run, options):
    """Everything public that takes a URL, by name."""
    url = store.url(run)

    def opened(**settings):
        return CheckpointManager(url, options=options, **settings)

    def save_in_the_background():
        ckpt = opened()
        ckpt.save(50, {"x": 1})
        ckpt.wait()

    return {
        "save": lambda: flaxckpt.save(f"{url}/50", {"x": 1}, options=options),
        "restore": lambda: flaxckpt.restore(f"{url}/1", options=options),
        "verify": lambda: flaxckpt.verify(f"{url}/1", options=options),
        "inspect": lambda: flaxckpt.inspect(f"{url}/1", options=options),
        "steps": lambda: opened(read_only=True).steps(),
        "latest_step": lambda: opened().latest_step(),
        "next_step": lambda: opened().next_step,
        "best_step": lambda: opened().best_step(),
        "metrics": lambda: opened().metrics(1),
        "metadata": lambda: opened().metadata(1),
        "follow": lambda: next(opened().follow()),
        "pin": lambda: opened().pin(1),
        "delete": lambda: opened().delete(1),
        "manager.save": lambda: opened(async_=False).save(50, {"x": 1}),
        "manager.save in the background": save_in_the_background,
        "manager()": lambda: opened()(50, {"x": 1}),
        "manager.restore": lambda: opened().restore(),
        "manager.restore step": lambda: opened().restore(step=1),
        "restore_or_init": lambda: opened().restore_or_init(lambda: {"x": jnp.zeros(2)}),
    }


def check_all_fail(store, run, options, within):
    """Every entry point raises `StoreError`, at the latest after `within` seconds."""

    def attempt(function):
        began = time.monotonic()
        try:
            function()
        except Exception as error:  # noqa: BLE001 - it is judged below
            return error, time.monotonic() - began
        return None, time.monotonic() - began

    functions = every_entry_point(store, run, options)
    with ThreadPoolExecutor(len(functions)) as pool:
        outcomes = dict(zip(functions, pool.map(attempt, functions.values()), strict=True))
    wrong = {
        name: (error, seconds)
        for name, (error, seconds) in outcomes.items()
        if not isinstance(error, errors.StoreError) or seconds > within
    }
    assert wrong == {}
    for error, _ in outcomes.values():
        assert "cannot be used" in str(error)
        assert store.url("").rstrip("/") in str(error)


@contextlib.contextmanager
def black_hole():
    """The URL of a server that accepts connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)
        held, done = [], threading.Event()

        def accept():
            while not done.is_set():
                with contextlib.suppress(OSError):
                    held.append(listening.accept()[0])

        listening.settimeout(0.1)
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            done.set()
            thread.join()
            for connection in held:
                connection.close()


@contextlib.contextmanager
def nobody():
    """A URL where connections are refused."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@contextlib.contextmanager
def elsewhere(store, url, **settings):
    """Options with which the server at `url` is used."""
    if store.url("").startswith("s3"):
        where = ObjectStore(url, "us-east-1", "environment", **settings)
        yield Options(storage=where, timeout_secs=1)
    else:
        with mock.patch.dict(os.environ, {"TENSORSTORE_GCS_HTTP_URL": url}):
            yield Options(storage=ObjectStore(**settings), timeout_secs=1)


@pytest.mark.parametrize("is_there", [True, False], ids=["with a step", "empty"])
def test_what_is_forbidden_is_no_empty_run(is_there, store, run):
    if is_there:
        with manager(store, run) as ckpt:
            ckpt.save(1, {"x": 1})
    store.server.fail = lambda request: 403
    check_all_fail(store, run, store.options(timeout_secs=30), within=20)


def test_a_store_that_only_refuses_to_list_is_no_empty_run(store, run):
    with manager(store, run) as ckpt:
        ckpt.save(1, {"x": 1})

    def refuse(request):
        """As both stores do: who may not list is not told either that an object is missing."""
        name = path(request).partition("bkt/")[2].removeprefix("o/").strip()
        is_read = request.method in ("GET", "HEAD")
        return 403 if is_read and name not in there else None

    there = {f"{run}/{name}" for name in store.objects(run)}
    store.server.fail = refuse
    with pytest.raises(errors.StoreError):
        manager(store, run).steps()
    with pytest.raises(errors.StoreError):
        manager(store, run).restore_or_init(lambda: {"x": 0})


def test_a_store_that_is_read_only_refuses_saves_and_is_read(store, run):
    with manager(store, run) as ckpt:
        ckpt.save(1, state(1))
    store.server.fail = lambda request: None if request.method in ("GET", "HEAD") else 403
    ckpt = manager(store, run)
    assert ckpt.steps() == [1]
    assert differences(ckpt.restore(), state(1)) == []
    with pytest.raises(errors.StoreError, match="cannot be used"):
        ckpt.save(2, state(2))
    assert ckpt.steps() == [1]


def test_what_is_unavailable_for_a_while_is_tried_again(store, run):
    seen = {}

    def fail_first(request):
        seen[path(request)] = seen.get(path(request), 0) + 1
        return 503 if seen[path(request)] == 1 and "/d/" in path(request) else None

    store.server.fail = fail_first
    with manager(store, run) as ckpt:
        ckpt.save(1, state(1))
    assert any("/d/" in name and times > 1 for name, times in seen.items())
    store.server.fail = None
    assert differences(manager(store, run).restore(), state(1)) == []
    assert store.strays(run) == []


def test_a_store_that_fails_during_a_save_costs_that_save_only(store, run):
    with manager(store, run) as ckpt:
        ckpt.save(1, state(1), wait=True)
        store.server.fail = lambda request: 403 if "/d/" in path(request) else None
        ckpt.save(2, state(2))
        with pytest.raises(errors.BackgroundSaveError, match="saving step 2 .*403") as caught:
            ckpt.wait()
        assert isinstance(caught.value.__cause__, errors.StoreError)
        store.server.fail = None
        assert ckpt.steps() == [1]
        assert store.strays(run) == []
        ckpt.save(2, state(2), wait=True)
        assert differences(ckpt.restore(), state(2)) == []


def test_a_missing_bucket_is_an_error(store, run):
    url = store.url(run).replace("bkt", "missing")
    options = store.options(timeout_secs=20)
    with pytest.raises(errors.StoreError):
        flaxckpt.save(f"{url}/1", {"x": 1}, options=options)
    with pytest.raises(errors.StoreError):
        CheckpointManager(url, options=options).save(1, {"x": 1})


def largest_data_object(store, run, step):
    """The name of the data file of `step` that has its values."""
    names = [name for name in store.objects(run) if name.startswith(f"{step}/") and "/d/" in name]
    return max(names, key=lambda name: len(store.read(run, name)))


@pytest.mark.parametrize("damage", ["truncated", "missing", "flipped"])
def test_a_damaged_data_object_is_an_error_that_names_the_leaf(damage, store, run):
    # A value and the nodes of the database are in objects of their own.
    with mock.patch.object(ocdbt, "DATA_FILE_BYTES", MIB // 8):
        with manager(store, run) as ckpt:
            ckpt.save(1, {"small": 1, "w": np.random.default_rng(0).standard_normal(50_000)})
    name = largest_data_object(store, run, 1)
    data = store.read(run, name)
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    changed = {"truncated": data[: len(data) // 2], "missing": None, "flipped": bytes(flipped)}
    store.write(run, name, changed[damage])
    options, url = store.options(), f"{store.url(run)}/1"
    with pytest.raises(errors.CorruptCheckpointError, match=r"the leaf w is damaged"):
        flaxckpt.restore(url, options=options)
    with pytest.raises(errors.CorruptCheckpointError):
        manager(store, run).restore()
    assert any(
        "w is damaged" in problem for problem in flaxckpt.verify(url, options=options).problems
    )


@pytest.mark.parametrize(
    "name",
    ["state/manifest.ocdbt", "state/_METADATA", "_CHECKPOINT_METADATA"],
)
@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_damaged_metadata_are_an_error(damage, name, store, run):
    with manager(store, run) as ckpt:
        ckpt.save(1, state(1))
    data = store.read(run, f"1/{name}")
    store.write(run, f"1/{name}", None if damage == "missing" else data[: len(data) // 2])
    kinds = (errors.CorruptCheckpointError, errors.CheckpointNotFoundError)
    with pytest.raises(kinds):
        flaxckpt.restore(f"{store.url(run)}/1", options=store.options())


@pytest.mark.parametrize(
    "url", ["s3://", "gs:///x", "s3://bkt/a//b", "gs://bkt/a/../b", "s3://bkt/./a"]
)
def test_wrong_urls_are_refused(url):
    with pytest.raises(errors.DirectoryError, match="s3://"):
        CheckpointManager(url)
    with pytest.raises(errors.DirectoryError, match="s3://"):
        flaxckpt.restore(url)


def test_settings_that_a_store_does_not_have_are_refused():
    options = Options(storage=ObjectStore("http://127.0.0.1:1"))
    with pytest.raises(errors.DirectoryError, match="takes no endpoint"):
        CheckpointManager("gs://bkt/run", options=options)


# The last tests: TensorStore goes on with the requests that nobody waits for, and lets others wait.
@pytest.mark.parametrize("server", [nobody, black_hole], ids=["refused", "black hole"])
def test_a_store_that_does_not_answer_is_an_error_within_the_timeout(server, store, run):
    with server() as url, elsewhere(store, url) as options:
        check_all_fail(store, run, options, within=8)
