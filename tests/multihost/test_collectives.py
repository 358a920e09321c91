"""Collective operations of processes, which are threads here.

All processes end with the same verdict, whichever of them fail or are missing.
"""

import re
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flaxckpt import multihost
from flaxckpt.errors import (
    FlaxckptError,
    Mismatch,
    ProcessFailedError,
    ProcessTimeoutError,
    StepExistsError,
    StructureMismatchError,
)
from flaxckpt.multihost import SINGLE_PROCESS, ProcessGroup
from flaxckpt.run.schedule import Every, Pacer
from tests.multihost.memory import MemoryKeyValueStore

# For how long those that are there wait for those that are missing.
SHORT_SECS = 0.1
# A thread that has not ended by then hangs.
HANG_SECS = 20


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(multihost, "GET_SECS", 0.01)


def groups(count, key_values=None, timeout_secs=HANG_SECS, clock=time.monotonic):
    """The members of a job."""
    key_values = MemoryKeyValueStore() if key_values is None else key_values
    return [ProcessGroup(index, count, key_values, timeout_secs, clock) for index in range(count)]


def in_threads(body, members):
    """What `body` gives or raises for each of `members`, all at once; none of them may hang."""
    found = {}

    def note(member):
        found[member.index] = _outcome(body, member)

    # Of a thread that is no daemon, the end of the tests would wait for the end.
    threads = [threading.Thread(target=note, args=(m,), daemon=True) for m in members]
    end = time.monotonic() + HANG_SECS
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0, end - time.monotonic()))
    hanging = [member.index for member in members if member.index not in found]
    assert not hanging
    return [found[member.index] for member in members]


def _outcome(body, member):
    try:
        return body(member)
    except BaseException as error:  # noqa: BLE001 - the test judges it
        return error


# One verdict


def broadcast(collective, work):
    """Only process 0 works."""

    def make():
        work(early=True)
        work()
        return "value"

    return collective.broadcast(make)


def all_gathered(collective, work):
    """Every process has a value, as after a restore."""
    with collective.sharing_errors():
        work(early=True)
        work()
    return collective.all_gather(collective.group.index)


def saved(collective, work):
    """The operation of a save."""
    with collective.sharing_errors():
        attempt = collective.broadcast(lambda: "attempt")
        work(early=True)
        if collective.group.is_process_0:
            collective.publish("begun", "directory")
            work()
            found = collective.gather()
            collective.publish("outcome", attempt)
            return [attempt, found]
        assert collective.wait_for("begun") == "directory"
        work()
        index = collective.group.index
        return [collective.arrive(index), list(range(1, collective.group.count))]


KINDS = [broadcast, all_gathered, saved]
WAYS = ["there", "late", "fails_early", "fails", "is_refused"]
FAILURES = {"fails_early": OSError, "fails": LookupError, "is_refused": StepExistsError}


def works(way, index):
    """The part of a process in an operation."""

    def work(*, early=False):
        if way == "late":
            time.sleep(0.003)
        if way in FAILURES and early == (way == "fails_early"):
            raise FAILURES[way](f"of {index}")

    return work


class Stopped:
    """A clock that stands still until only those that are missing are waited for."""

    def __init__(self, is_over):
        self._is_over, self._since = is_over, None

    def __call__(self):
        if self._since is None:
            if not self._is_over():
                return 0.0
            self._since = time.monotonic()
        return time.monotonic() - self._since


@st.composite
def jobs(draw):
    """The number of processes, their operations, how each fares, and who misses the last one."""
    count = draw(st.integers(2, 5))
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
    some = st.lists(st.sampled_from(WAYS), min_size=count, max_size=count)
    fine = st.just(["there"] * count)
    ways = [draw(fine | some) for _ in kinds]
    missing = draw(st.just(frozenset()) | st.frozensets(st.integers(0, count - 1), max_size=3))
    return count, list(zip(kinds, ways, strict=True)), missing if len(missing) < count else {0}


@given(jobs())
@settings(max_examples=150)
def test_all_members_end_with_the_same_verdict(job):
    count, operations, missing = job
    key_values, last, arrived = MemoryKeyValueStore(), len(operations) - 1, set()
    present = set(range(count)) - missing

    def is_over():
        said = {name[-1] for name in list(key_values.values) if f"/{last}/arrived/" in name}
        return arrived == present and (0 in missing or len(said) == len(present) - 1)

    def member(group):
        verdicts = []
        for number, (kind, ways) in enumerate(operations):
            if number == last:
                if group.index in missing:
                    break
                arrived.add(group.index)
            work = works(ways[group.index], group.index)
            verdicts.append(
                _outcome(lambda m, k=kind, w=work: k(m, w), group.collective("an operation"))
            )
        return verdicts

    verdicts = in_threads(member, groups(count, key_values, SHORT_SECS, Stopped(is_over)))
    for number, (kind, ways) in enumerate(operations):
        absent = missing if number == last else frozenset()
        found = {i: verdicts[i][number] for i in range(count) if i not in absent}
        if kind is broadcast:  # nobody waits for the others
            absent, ways = absent & {0}, [ways[0], *["there"] * (count - 1)]
        assert_one_verdict(found, ways, absent)


def assert_one_verdict(found, ways, absent):
    """`found` is what the members that were there gave or raised."""
    failing = {i for i in found if ways[i] in FAILURES}
    if not failing and not absent:
        first = next(iter(found.values()))
        assert not isinstance(first, BaseException)
        assert all(verdict == first for verdict in found.values())
        return
    for index, error in found.items():
        assert isinstance(error, BaseException), (index, error)
        if isinstance(error, ProcessTimeoutError):
            named = re.search(r"process(?:es:)? ([0-9, ]+) did not", str(error))[1]
            assert set(map(int, named.split(", "))) <= absent
            assert absent
        elif isinstance(error, ProcessFailedError):
            assert int(re.search(r"failed on process (\d)", str(error))[1]) in failing
        else:
            # Its own, or what process 0 refused for all.
            assert type(error) in FAILURES.values()
            assert str(error) in (f"of {index}", "of 0")
            assert str(error) == f"of {index}" or isinstance(error, FlaxckptError)


def test_the_keys_of_old_operations_are_deleted(monkeypatch):
    monkeypatch.setattr(multihost, "BLOCK", 8)
    key_values = MemoryKeyValueStore()

    def member(group):
        for number in range(20):
            group.broadcast("deciding", lambda n=number: n)
            group.collective("an operation").all_gather(group.index)

    assert in_threads(member, groups(3, key_values)) == [None] * 3
    assert {int(name.split("/")[1]) for name in key_values.values} == set(range(32, 40))


def test_clocks_that_differ_do_not_matter():
    every = Every(secs=10)
    paces = [3.0, 11.0, 0.5]

    def member(group):
        pacer, due = Pacer(every), []
        for step in range(12):
            now = paces[group.index] * step
            due.append(pacer.decide_together(group, step, now))
            if due[-1]:
                pacer.saved(step, now)
        return [step for step, is_due in enumerate(due) if is_due]

    assert in_threads(member, groups(3)) == [[4, 8]] * 3


def test_a_schedule_without_clocks_sets_no_keys():
    key_values = MemoryKeyValueStore()
    (group, _) = groups(2, key_values)
    assert Pacer(Every(steps=2)).decide_together(group, 2, 0.0)
    assert key_values.values == {}


def test_a_single_process_job_needs_no_key_value_store():
    collective = SINGLE_PROCESS.collective("an operation")
    assert collective.broadcast(lambda: 3) == 3
    assert collective.all_gather("ours") == ["ours"]
    collective.publish("begun", None)
    assert collective.gather() == []
    with pytest.raises(LookupError), collective.sharing_errors():
        raise LookupError
    assert SINGLE_PROCESS.process is None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), MemoryError("all of it")])
def test_the_others_raise_the_error_of_a_process_whatever_it_is(error):
    def work(index):
        if index == 1:
            raise error

    def member(group):
        collective = group.collective("saving")
        with collective.sharing_errors():
            work(group.index)
        return collective.all_gather(None)

    first, second, third = in_threads(member, groups(3))
    assert second is error
    for other in (first, third):
        assert isinstance(other, ProcessFailedError)
        assert f"saving failed on process 1: {type(error).__name__}" in str(other)


def test_a_failure_that_is_in_any_key_is_in_the_outcome():
    key_values = MemoryKeyValueStore()
    leader, other = (group.collective("an operation") for group in groups(2, key_values))
    set_key, seen = key_values.set, []

    def look(key, value):
        set_key(key, value)
        seen.append(other.has_failed())

    key_values.set = look
    with pytest.raises(LookupError), leader.sharing_errors():
        raise LookupError
    assert seen == [True] * 4


def test_an_error_that_cannot_be_constructed_again_keeps_its_text():
    mismatch = Mismatch("shape", "w", "float32[3]", "float32[4]")
    error = StructureMismatchError("/run/3", [mismatch], 1, "Change it.")

    def choose():
        raise error

    first, second = in_threads(lambda group: group.broadcast("choosing", choose), groups(2))
    assert first is error
    assert isinstance(second, ProcessFailedError)
    assert str(error) in str(second)


def test_a_timeout_names_at_most_twenty_missing_processes():
    group = groups(100, timeout_secs=0.01)[0]
    with pytest.raises(ProcessTimeoutError, match=r"99 processes: 1, 2, .*, 20, \.\.\. did not"):
        group.collective("saving step 3").all_gather(None)


def test_processes_that_make_different_calls_get_an_error():
    def member(group):
        return group.broadcast(f"saving step {group.index}", lambda: "attempt")

    for verdict in in_threads(member, groups(2, timeout_secs=SHORT_SECS))[1:]:
        assert isinstance(verdict, ProcessFailedError)
