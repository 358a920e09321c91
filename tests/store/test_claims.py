"""Who commits a step in a bucket when a writer that was taken for dead lives after all.

TensorStore's key-value store in memory heeds conditions as those of buckets do, and is fast enough
to try every order in which the requests of two writers can arrive.
"""

import contextlib
import re
import threading

import pytest
import tensorstore as ts

from flaxckpt import errors
from flaxckpt.store import layout
from flaxckpt.store.bucket import BucketStore
from flaxckpt.store.store import Location

STEP = "run/7"
MARKER, CLAIM = f"{STEP}/{layout.COMMIT_SUCCESS}", f"run/{layout.CLAIMS}/7"
DATA = f"{layout.ITEM}/{layout.TREE_METADATA}"
ZOMBIE, TAKER, THIRD = "a" * 12, "b" * 12, "c" * 12


_CURRENT = threading.local()


class Actor:
    """A writer in a thread of its own, which sends its next request when it is told to."""

    def __init__(self, body):
        self.pending, self.result = None, None
        self._body = body
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._stopped.acquire()

    def _run(self):
        _CURRENT.actor = self
        try:
            self.result = self._body()
        except BaseException as error:  # noqa: BLE001 - the test judges it
            self.result = error
        self.pending = None
        self._stopped.release()

    def wait(self, *request):
        """In its thread: says what it is about to send, and waits."""
        self.pending = request
        self._stopped.release()
        self._go.acquire()

    def send(self):
        """Lets it send that, and go on to the request after it."""
        self._go.release()
        self._stopped.acquire()

    def end(self):
        """Lets it send all the rest."""
        while self.pending:
            self.send()
        self._thread.join()


class Requests:
    """A key-value store that sends a request when it is the actor's turn."""

    def __init__(self, store, prefix):
        self._store, self._prefix = store, prefix

    def read(self, key, **limits):
        return self._sent("read", key, lambda: self._store.read(key, **limits))

    def write(self, key, value, **condition):
        return self._sent("write", key, lambda: self._store.write(key, value, **condition))

    def list(self):
        return self._sent("list", "", self._store.list)

    def _sent(self, kind, key, send):
        if actor := getattr(_CURRENT, "actor", None):
            actor.wait(kind, self._prefix + key)
        future = send()
        future.result()  # the answer, before anybody else sends something
        return future


class Memory(BucketStore):
    """A bucket in memory."""

    def __init__(self):
        super().__init__("memory://bkt", 60.0, {"driver": "memory"}, ts.Context())

    def objects(self, prefix=""):
        return Requests(super().objects(prefix), prefix)

    def contents(self):
        """All objects."""
        store = super().objects()
        return {key.decode(): store.read(key).result().value for key in store.list().result()}


def commute(one, other):
    """Whether two requests may as well arrive in the other order."""
    (kind, key), (other_kind, other_key) = one, other
    if "write" not in (kind, other_kind):
        return True
    if "list" in (kind, other_kind):
        return not (key.startswith(other_key) or other_key.startswith(key))
    return key != other_key


def every_order(make, check):
    """Lets actors send their requests in every order, but for those that make no difference.

    The tree of the orders is searched, each time from its root. An actor "sleeps" at a node when
    its next request was tried before those that were chosen since, and commutes with all of them.

    Args:
      make: gives a bucket, and what each actor does.
      check: is given the bucket, what became of each actor, and the order.

    Returns:
      How many orders were tried.
    """
    count, waiting = 0, [((), frozenset())]
    while waiting:
        order, asleep = waiting.pop()
        bucket, bodies = make()
        actors = [Actor(body) for body in bodies]
        for chosen in order:
            actors[chosen].send()
        while pending := {i: actor.pending for i, actor in enumerate(actors) if actor.pending}:
            tried = set(asleep)
            choices = []
            for i in pending.keys() - asleep:
                still = frozenset(j for j in tried if commute(pending[i], pending[j]))
                choices.append(((*order, i), still))
                tried.add(i)
            if not choices:
                break
            (order, asleep), *others = choices
            waiting += others
            actors[order[-1]].send()
        is_new = not pending
        for actor in actors:
            actor.end()
        if is_new:
            count += 1
            check(bucket, [actor.result for actor in actors], order)
    return count


def test_orders_are_all_tried_and_none_twice():
    """Two writes to one object have two orders, and two to different ones need one only."""

    def orders(*keys):
        found = []

        def make():
            bucket = Memory()
            store = bucket.objects()
            return bucket, [lambda k=k, i=i: store.write(k, str(i)) for i, k in enumerate(keys)]

        every_order(make, lambda bucket, results, order: found.append(bucket.contents()))
        return sorted(str(contents) for contents in found)

    assert orders("x", "x") == ["{'x': b'0'}", "{'x': b'1'}"]
    assert orders("x", "y") == ["{'x': b'0', 'y': b'1'}"]
    assert len(orders("x", "x", "x")) == 6


def write(final, attempt):
    """Writes what stands for the objects of a step, as a save does."""
    (final / DATA).create(contents_of(attempt))


def contents_of(attempt):
    """Of the object that tells whose it is."""
    return b'{"flaxckpt":"%s"}' % attempt.encode()


def saved(final, attempt):
    """Saves; `attempt` when that went well."""
    with final.store.commit(final, attempt, overwrite=False) as directory:
        write(directory, attempt)
    return attempt


def finished(held, final, attempt):
    """As `saved`, by a writer that `held` its claim already."""
    with held:
        write(final, attempt)
    return attempt


def taken_over(final, attempt):
    """As `saved`, by a writer that removes first what was left."""
    final.store.take_over(final.parent, final.name)
    return saved(final, attempt)


def begun(attempt):
    """A bucket with the claim of `attempt`, the step, and how that writer goes on."""
    bucket = Memory()
    final = Location(bucket, STEP)
    commit = final.store.commit(final, attempt, overwrite=False)
    commit.__enter__()
    held = contextlib.ExitStack()
    held.push(commit)
    return bucket, final, held


def check_outcome(bucket, results, order):
    """At most one has committed, and what it committed is whole."""
    contents = bucket.contents()
    where = f"{order}: {results}, {contents}"
    winners = [result for result in results if isinstance(result, str)]
    assert len(winners) <= 1, where
    for loser in set(results) - set(winners):
        assert isinstance(loser, errors.StepExistsError | FileExistsError), where
    committed = contents.get(CLAIM, b"").endswith(b" committed")
    if winners or committed:
        attempt = winners[0] if winners else contents[CLAIM].decode()[:12]
        expected = {CLAIM: f"{attempt} committed".encode(), f"{STEP}/{DATA}": contents_of(attempt)}
        # That Orbax finds a marker is enough; whose it is does not matter.
        assert contents.pop(MARKER) in (ZOMBIE.encode(), TAKER.encode()), where
        assert contents == expected, where
    else:
        # Nobody has, and whatever is left does not keep the next one from it.
        assert taken_over(Location(bucket, STEP), THIRD) == THIRD, where


def test_a_zombie_and_who_takes_over_never_both_commit():
    """Nor does the zombie harm what the other has committed, or the other what the zombie has."""
    winners = set()

    def make():
        bucket, final, held = begun(ZOMBIE)
        return bucket, [
            lambda: finished(held, final, ZOMBIE),
            lambda: taken_over(final, TAKER),
        ]

    def check(bucket, results, order):
        winners.update(result for result in results if isinstance(result, str))
        check_outcome(bucket, results, order)

    assert every_order(make, check) > 40
    assert winners == {ZOMBIE, TAKER}


def test_a_zombie_that_fails_removes_its_own_things_only():
    bucket, final, held = begun(ZOMBIE)
    write(final, ZOMBIE)
    with pytest.raises(KeyError), held:
        raise KeyError
    assert bucket.contents() == {}
    bucket, final, held = begun(ZOMBIE)
    assert taken_over(final, TAKER) == TAKER
    before = bucket.contents()
    with pytest.raises(KeyError), held:
        raise KeyError
    assert bucket.contents() == before


def test_of_two_that_begin_at_the_same_time_one_commits():
    winners = set()

    def make():
        bucket = Memory()
        final = Location(bucket, STEP)
        return bucket, [lambda: saved(final, ZOMBIE), lambda: saved(final, TAKER)]

    def check(bucket, results, order):
        winners.update(result for result in results if isinstance(result, str))
        assert len([result for result in results if isinstance(result, str)]) == 1
        check_outcome(bucket, results, order)

    every_order(make, check)
    assert winners == {ZOMBIE, TAKER}


def test_a_reader_never_sees_a_step_that_is_not_whole():
    """What is committed to a reader at any time has its objects at that time."""

    def make():
        bucket, final, held = begun(ZOMBIE)
        return bucket, [lambda: finished(held, final, ZOMBIE), lambda: looked_at(final)]

    def looked_at(final):
        found = final.store.committed_by(final)
        return None if found is None else (found, (final / DATA).read())

    def check(bucket, results, order):
        seen.add(results[1])

    seen = set()
    every_order(make, check)
    assert seen == {None, (ZOMBIE, contents_of(ZOMBIE))}


def test_a_zombie_that_fails_never_harms_who_takes_over():
    """Whenever it wakes up while it cleans up."""
    ends = set()

    def make():
        bucket, final, held = begun(ZOMBIE)
        write(final, ZOMBIE)

        def fail():
            with held:
                raise KeyError

        return bucket, [fail, lambda: taken_over(final, TAKER)]

    def check(bucket, results, order):
        assert isinstance(results[0], KeyError)
        ends.add(type(results[1]))
        if results[1] == TAKER:
            check_outcome(bucket, [TAKER], order)
        else:  # it was told, and the next one can go on
            assert isinstance(results[1], errors.StepExistsError | FileExistsError), results
            assert taken_over(Location(bucket, STEP), THIRD) == THIRD

    assert every_order(make, check) > 40
    assert str in ends


def test_deleting_begins_with_the_marker_and_ends_with_the_claim():
    bucket = Memory()
    final = Location(bucket, STEP)
    saved(final, ZOMBIE)
    order, actor = [], Actor(lambda: bucket.remove(final))
    while actor.pending:
        order.append(actor.pending)
        actor.send()
    actor.end()
    written = [key for kind, key in order if kind == "write"]
    assert (written[0], written[1], written[-1]) == (CLAIM, MARKER, CLAIM)
    assert bucket.contents() == {}


@pytest.mark.parametrize("name", ["notes.txt", "state/_CHECKPOINT_METADATA", "default/_METADATA"])
def test_what_somebody_else_has_there_is_not_touched(name):
    bucket = Memory()
    final = Location(bucket, STEP)
    (final / name).create(b"precious")
    before = bucket.contents()
    with pytest.raises(errors.DirectoryError, match=re.escape(name)):
        saved(final, TAKER)
    with pytest.raises(errors.DirectoryError, match=re.escape(name)):
        taken_over(final, TAKER)
    assert bucket.contents() == before


CHILD = f"{layout.CHILD}1-{ZOMBIE}"
LATE = ["state", "ema", "rng/jax_random_key", "old/np_random_key"]


@pytest.mark.parametrize(
    "name",
    [
        *(f"{tree}/{CHILD}/d/0123" for tree in LATE),
        f"data/process_1-of-2-{ZOMBIE}.json",
        f"data/process_11-of-20-{ZOMBIE}/state.index",
    ],
)
def test_what_a_dead_process_wrote_too_late_is_removed(name):
    bucket = Memory()
    final = Location(bucket, STEP)
    (final / name).create(b"late")
    # Beside it, what only another writer's metadata or nobody's explain.
    others = ["config/metadata", "data/process_0-of-2.json", "user/files/a/b", "ema/_sharding"]
    for other in others:
        (final / other).create(b"late")
    assert saved(final, TAKER) == TAKER
    assert not any((final / other).exists() for other in (name, *others))


@pytest.mark.parametrize("name", ["data/notes.txt", "ema/model.pt", "a/b/metadata", "metadata"])
def test_what_may_be_somebody_elses_is_not_touched_beside_it(name):
    bucket = Memory()
    final = Location(bucket, STEP)
    (final / layout.ITEM / CHILD / "d" / "0123").create(b"late")
    (final / name).create(b"precious")
    with pytest.raises(errors.DirectoryError, match=re.escape(name)):
        saved(final, TAKER)
    assert (final / name).read() == b"precious"
