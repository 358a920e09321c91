"""Meetings of processes, which here are threads: one verdict for all, whoever fails or is missing.

And the boards that they leave their notes on.
"""

import concurrent.futures
import re
import threading
import time

import orjson
import pytest
import tensorstore as ts
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
from flaxckpt.multihost import ALONE, Group
from flaxckpt.run.schedule import Every, Pacer
from flaxckpt.store.notes import StorageBoard
from tests import cluster

# For how long those that are there wait for those that are missing.
SHORT_SECS = 0.1
# A thread that has not ended by then hangs.
HANG_SECS = 20


class MemoryBoard:
    """A board in memory, for threads."""

    def __init__(self):
        self.notes = {}
        self._changed = threading.Condition()

    def post(self, name, text):
        with self._changed:
            self.notes.setdefault(name, text)
            self._changed.notify_all()

    def read(self, name, wait_secs):
        with self._changed:
            self._changed.wait_for(lambda: name in self.notes, wait_secs)
            return self.notes.get(name)

    def below(self, name):
        with self._changed:
            start = f"{name}/"
            return {k[len(start) :]: v for k, v in self.notes.items() if k.startswith(start)}

    def remove(self, name):
        with self._changed:
            for rest in self.below(name):
                del self.notes[f"{name}/{rest}"]


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(multihost, "WAIT_SECS", 0.01)


def groups(count, board=None, timeout_secs=HANG_SECS, clock=time.monotonic):
    """The members of a job."""
    board = MemoryBoard() if board is None else board
    return [Group(index, count, board, timeout_secs, clock) for index in range(count)]


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


def decided(meeting, work):
    """A decision; only process 0 works."""

    def make():
        work(early=True)
        work()
        return "value"

    return meeting.decide(make)


def told(meeting, work):
    """Each says something, as after a restore."""
    with meeting.reporting():
        work(early=True)
        work()
    return meeting.together(meeting.group.index)


def saved(meeting, work):
    """What the processes say to one another in a save."""
    with meeting.reporting():
        attempt = meeting.decide(lambda: "attempt")
        work(early=True)
        if meeting.group.is_leader:
            meeting.say("begun", "directory")
            work()
            found = meeting.collect()
            meeting.say("outcome", attempt)
            return [attempt, found]
        assert meeting.heard("begun") == "directory"
        work()
        index = meeting.group.index
        return [meeting.done(index), list(range(1, meeting.group.count))]


KINDS = [decided, told, saved]
WAYS = ["there", "late", "fails_early", "fails", "is_refused"]
FAILURES = {"fails_early": OSError, "fails": LookupError, "is_refused": StepExistsError}


def works(way, index):
    """What a member does in a meeting."""

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
    """How many members, what they meet for, what becomes of each, and who misses the last one."""
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
    count, meetings, missing = job
    board, last, arrived = MemoryBoard(), len(meetings) - 1, set()
    present = set(range(count)) - missing

    def is_over():
        said = {name[-1] for name in list(board.notes) if f"/{last}/done/" in name}
        return arrived == present and (0 in missing or len(said) == len(present) - 1)

    def member(group):
        verdicts = []
        for number, (kind, ways) in enumerate(meetings):
            if number == last:
                if group.index in missing:
                    break
                arrived.add(group.index)
            work = works(ways[group.index], group.index)
            verdicts.append(_outcome(lambda m, k=kind, w=work: k(m, w), group.meet("meeting")))
        return verdicts

    verdicts = in_threads(member, groups(count, board, SHORT_SECS, Stopped(is_over)))
    for number, (kind, ways) in enumerate(meetings):
        absent = missing if number == last else frozenset()
        found = {i: verdicts[i][number] for i in range(count) if i not in absent}
        if kind is decided:  # nobody waits for the others
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


def test_the_notes_of_old_meetings_are_removed(monkeypatch):
    monkeypatch.setattr(multihost, "BLOCK", 8)
    board = MemoryBoard()

    def member(group):
        for number in range(20):
            group.decide("deciding", lambda n=number: n)
            group.meet("meeting").together(group.index)

    assert in_threads(member, groups(3, board)) == [None] * 3
    assert {int(name.split("/")[1]) for name in board.notes} == set(range(32, 40))


def test_clocks_that_differ_do_not_matter():
    every = Every(secs=10)
    paces = [3.0, 11.0, 0.5]

    def member(group):
        pacer, due = Pacer(every), []
        for step in range(12):
            now = paces[group.index] * step
            due.append(group.paced(pacer, step, now))
            if due[-1]:
                pacer.saved(step, now)
        return [step for step, is_due in enumerate(due) if is_due]

    assert in_threads(member, groups(3)) == [[4, 8]] * 3


def test_a_schedule_without_clocks_needs_no_notes():
    board = MemoryBoard()
    (group, _) = groups(2, board)
    assert group.paced(Pacer(Every(steps=2)), 2, 0.0)
    assert board.notes == {}


def test_a_process_that_is_alone_needs_no_board():
    meeting = ALONE.meet("meeting")
    assert meeting.decide(lambda: 3) == 3
    assert meeting.together("ours") == ["ours"]
    meeting.say("begun", None)
    assert meeting.collect() == []
    with pytest.raises(LookupError), meeting.reporting():
        raise LookupError
    assert ALONE.process is None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), MemoryError("all of it")])
def test_the_others_hear_of_whatever_ends_a_process(error):
    def work(index):
        if index == 1:
            raise error

    def member(group):
        meeting = group.meet("saving")
        with meeting.reporting():
            work(group.index)
        return meeting.together(None)

    first, second, third = in_threads(member, groups(3))
    assert second is error
    for other in (first, third):
        assert isinstance(other, ProcessFailedError)
        assert f"saving failed on process 1: {type(error).__name__}" in str(other)


def test_whoever_hears_of_a_failure_anywhere_finds_it_in_the_outcome():
    board = MemoryBoard()
    leader, other = (group.meet("meeting") for group in groups(2, board))
    post, seen = board.post, []

    def look(name, text):
        post(name, text)
        seen.append(other.has_failed())

    board.post = look
    with pytest.raises(LookupError), leader.reporting():
        raise LookupError
    assert seen == [True] * 4


def test_an_error_that_cannot_be_made_anew_is_told_by_its_text():
    mismatch = Mismatch("shape", "w", "float32[3]", "float32[4]")
    error = StructureMismatchError("/run/3", [mismatch], 1, "Change it.")

    def choose():
        raise error

    first, second = in_threads(lambda group: group.decide("choosing", choose), groups(2))
    assert first is error
    assert isinstance(second, ProcessFailedError)
    assert str(error) in str(second)


def test_of_many_that_are_missing_some_are_named():
    group = groups(100, timeout_secs=0.01)[0]
    with pytest.raises(ProcessTimeoutError, match=r"99 processes: 1, 2, .*, 20, \.\.\. did not"):
        group.meet("saving step 3").together(None)


def test_members_that_meet_for_different_things_are_told():
    def member(group):
        return group.decide(f"saving step {group.index}", lambda: "attempt")

    for verdict in in_threads(member, groups(2, timeout_secs=SHORT_SECS))[1:]:
        assert isinstance(verdict, ProcessFailedError)


# The boards


def file_board(directory):
    return StorageBoard(ts.KvStore.open({"driver": "file", "path": f"{directory}/b/"}).result())


BOARDS = {
    "memory": lambda _: MemoryBoard(),
    "file": file_board,
    "kvstore": lambda _: StorageBoard(ts.KvStore.open({"driver": "memory"}).result()),
}


@pytest.fixture(params=BOARDS)
def board(request, tmp_path):
    return BOARDS[request.param](tmp_path)


def keeps_its_promises(board):
    """What meetings rely on."""
    assert board.read("1/a", 0.01) is None
    assert board.read("1/a", 0) is None
    assert board.below("1") == {}
    board.post("1/a", "first")
    board.post("1/a", "second")
    assert board.read("1/a", HANG_SECS) == "first"
    assert {board.read("1/a", 0) for _ in range(100)} == {"first"}  # also where no time is given
    text = orjson.dumps({"value": "\u00fc\n" * 5000}).decode()
    board.post("1/done/1", text)
    board.post("1/done/10", "")
    board.post("10/a", "another meeting")
    assert board.below("1/done") == {"1": text, "10": ""}
    assert board.below("1") == {"a": "first", "done/1": text, "done/10": ""}
    board.remove("1")
    assert board.below("1") == {}
    assert board.read("1/a", 0.01) is None
    assert board.read("10/a", HANG_SECS) == "another meeting"
    board.remove("1")
    board.post("1/a", "once more")
    assert board.read("1/a", HANG_SECS) == "once more"


def waits_for_a_note(board):
    """A read ends when the note comes, and not before its time is over."""
    began = time.monotonic()
    assert board.read("2/never", 0.3) is None
    assert time.monotonic() - began > 0.25
    timer = threading.Timer(0.2, board.post, ("2/late", "here"))
    began = time.monotonic()
    timer.start()
    assert board.read("2/late", HANG_SECS) == "here"
    assert 0.15 < time.monotonic() - began < HANG_SECS / 2
    timer.join()


def test_a_board_keeps_its_promises(board):
    keeps_its_promises(board)


def test_a_board_waits_for_a_note(board):
    waits_for_a_note(board)


def test_of_many_notes_with_one_name_one_is_kept(board):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: board.post("3/a", str(i)), range(50)))
        found = set(pool.map(lambda _: board.read("3/a", HANG_SECS), range(50)))
    assert len(found) == 1


@pytest.mark.parametrize("make", BOARDS.values(), ids=BOARDS)
def test_members_meet_on_any_board(make, tmp_path):
    board = make(tmp_path)

    def member(group):
        number = group.decide("deciding", lambda: 7)
        return number, group.meet("meeting").together(group.index)

    assert in_threads(member, groups(4, board)) == [(7, [0, 1, 2, 3])] * 4


def on_the_service(context):
    """The same with jax's service, where each process has a board of its own name too."""
    client = multihost.client()
    ours = multihost.CoordinationBoard(client, f"test/{context.index}")
    keeps_its_promises(ours)
    waits_for_a_note(ours)
    board = multihost.CoordinationBoard(client, "test/all")
    board.post("first", str(context.index))
    group = Group(context.index, context.count, board, HANG_SECS)
    together = group.meet("meeting").together(context.index)
    return board.read("first", HANG_SECS), together


def test_the_service_of_jax_keeps_the_promises_of_a_board():
    found = [result.value for result in cluster.run(on_the_service, 3)]
    assert found[0][0] in ("0", "1", "2")
    assert found == [(found[0][0], [0, 1, 2])] * 3
