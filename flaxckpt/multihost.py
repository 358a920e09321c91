"""The processes of a job: barrier, broadcast and all-gather, with bounded waits."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import queue
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import jax
import numpy as np
import orjson

from flaxckpt import errors
from flaxckpt.errors import FlaxckptError, ProcessFailedError, ProcessTimeoutError

if TYPE_CHECKING:
    from flaxckpt.run.schedule import Pacer


# Where the processes of a job leave notes for one another: in a service, or in the storage.


class SilentBoardError(Exception):
    """The process that keeps the notes does not answer."""


class Board(Protocol):
    """Where processes leave notes. A note is never changed."""

    def post(self, name: str, text: str) -> None:
        """Leaves a note, unless there is one of that name."""

    def read(self, name: str, wait_secs: float) -> str | None:
        """A note, waited for at most so long; `None` when there is none by then."""

    def below(self, name: str) -> dict[str, str]:
        """All notes whose names begin with `name` and a slash, by the rest of their names.

        Raises:
          SilentBoardError: when whoever keeps the notes does not answer.
        """

    def remove(self, name: str) -> None:
        """Removes all notes whose names begin with `name` and a slash."""


# How the processes of a job do one thing together: what is decided, who is done, how it ended.
#
# Process 0 decides and concludes, because one process must. All of them meet in the same order, and
# a meeting has these notes, each written once:
#
#     decision, begun     by process 0; the others go on when they are there
#     collecting          by process 0, when it has done its own part
#     done/<index>        by each other process, when it has done its part, or why it could not
#     outcome             by process 0, when all are done, or why it cannot be
#
# A process that fails says so in the note that the others wait for, so that none of them waits for
# one that will not come. One that dies or hangs leaves no note: every wait has an end, and the
# error names those that are missing. The truth about a checkpoint is in the storage, never here.


T = TypeVar("T")

# What process 0 leaves, the last first: when it fails it says so in all of them, and whoever hears
# of that in one must find it in the outcome.
_BY_LEADER = ("outcome", "collecting", "begun", "decision")
# So many meetings have their notes in one place, and are forgotten together: a loop whose saves
# depend on clocks has one for every step.
BLOCK = 64
# One wait for a note: Ctrl-C is heard after it.
WAIT_SECS = 1.0
# What a process has that loses its files because process 0 has cleaned up.
FAILURE_SECS = 10.0
# Between two looks at who is done: at first, and at most.
FIRST_LOOK_SECS, LONGEST_LOOK_SECS = 0.001, 2.0
# At most, for each process.
LOOK_SECS = 0.01
# How much longer the others wait than process 0, whose error says more than theirs.
GRACE = 1.1
# And how much longer the loop waits for a save of several processes: their errors say more too.
PATIENCE = 1.5


@dataclasses.dataclass
class Group:
    """The processes of a job.

    Attributes:
      index: of this process.
      count: of all processes.
      board: where they leave notes; `None` for a process that is alone.
      timeout_secs: how long they wait for one another.
      clock: seconds.
    """

    index: int
    count: int
    board: Board | None
    timeout_secs: float
    clock: Callable[[], float] = time.monotonic
    _numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    _removed: int = 0  # blocks

    @property
    def is_leader(self) -> bool:
        """Whether this is process 0."""
        return self.index == 0

    @property
    def process(self) -> int | None:
        """The index in a job of several processes; `None` for one that is alone."""
        return None if self.count == 1 else self.index

    def meet(self, title: str) -> Meeting:
        """The next thing that all processes do; `title` says in errors what it is."""
        return Meeting(self, next(self._numbers), title)

    def decide(self, title: str, make: Callable[[], T]) -> T:
        """What process 0 makes, as JSON holds it, on all processes. See `Meeting.decide`."""
        return self.meet(title).decide(make)

    def paced(self, pacer: Pacer, step: int, now: float) -> bool:
        """Whether `step` is due; process 0 decides when clocks, which differ, have a part in it."""
        due = pacer.decide(step, now)
        if not pacer.every.is_timed:
            return due
        return self.decide(f"deciding whether step {step} is due", lambda: due)

    def forget_before(self, number: int) -> None:
        """Removes the notes of meetings that all processes have left, a block at a time."""
        assert self.board is not None, "a process that is alone leaves no notes"
        for block in range(self._removed, number // BLOCK):
            self.board.remove(str(block))
        self._removed = max(self._removed, number // BLOCK)


ALONE = Group(0, 1, None, 0.0)


@dataclasses.dataclass(frozen=True)
class Meeting:
    """One thing that all processes of `group` do together."""

    group: Group
    number: int
    title: str

    @property
    def _place(self) -> str:
        """Where its notes are."""
        return f"{self.number // BLOCK}/{self.number}"

    def decide(self, make: Callable[[], T]) -> T:
        """What process 0 makes, as JSON holds it, on all processes.

        Raises:
          FlaxckptError: what `make` raised, on all of them.
          ProcessFailedError: the same, when that was no error of flaxckpt's.
          ProcessTimeoutError: when process 0 does not arrive.
        """
        if not self.group.is_leader:
            found: T = self.heard("decision")
            return found
        with self.reporting():
            made = make()
        self.say("decision", made)
        return made

    def together(self, value: Any) -> list[Any]:
        """The values of all processes, by their indices, when the last has given its own.

        Raises:
          ProcessFailedError: when one of them failed.
          ProcessTimeoutError: when one of them did not arrive.
        """
        if not self.group.is_leader:
            found: list[Any] = self.done(value)
            return found
        with self.reporting():
            values = [value, *self.collect()]
        self.say("outcome", values)
        return values

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Lets the others know when the block fails."""
        try:
            yield
        except BaseException as error:
            index, kind = self.group.index, type(error).__name__
            names = _BY_LEADER if self.group.is_leader else (f"done/{index}",)
            for name in names:
                self._post(name, {"failure": {"process": index, "type": kind, "text": str(error)}})
            raise

    def say(self, note: str, value: Any) -> None:
        """Leaves a note with `value`, by process 0."""
        self._post(note, {"value": value})

    def raise_failure(self) -> None:
        """Waits a moment for why process 0 has failed, if it has, and raises that.

        Raises:
          ProcessFailedError: in that case.
        """
        group = self.group
        assert group.board is not None, "there is another process"
        patience = min(FAILURE_SECS, group.timeout_secs)
        if (text := group.board.read(f"{self._place}/outcome", patience)) is not None:
            self._value(text)

    def has_failed(self) -> bool:
        """Whether process 0 has said that it cannot be: then nothing is committed any more."""
        board = self.group.board
        text = None if board is None else board.read(f"{self._place}/outcome", 0.0)
        return text is not None and "failure" in orjson.loads(text)

    def done(self, value: Any) -> Any:
        """Says that this process, not 0, has done its part; returns the outcome when it is there.

        Raises:
          ProcessFailedError: when another process failed.
          ProcessTimeoutError: when another process did not arrive.
        """
        self._post(f"done/{self.group.index}", {"value": value})
        self.heard("collecting")
        return self.heard("outcome")

    def collect(self) -> list[Any]:
        """The values of `done` of all other processes, in order; for process 0.

        Raises:
          ProcessFailedError: when one of them failed.
          ProcessTimeoutError: when one of them did not arrive.
        """
        group, pause = self.group, FIRST_LOOK_SECS
        if group.board is None:
            return []
        self.say("collecting", None)
        end = group.clock() + group.timeout_secs
        while len(notes := self._parts()) < group.count - 1:
            if group.clock() > end:
                raise self._timeout(notes)
            time.sleep(pause)
            # All notes are read at each look, so with many processes it is taken less often.
            pause = min(2 * pause, LONGEST_LOOK_SECS, group.count * LOOK_SECS)
        group.forget_before(self.number)
        return [notes[index] for index in range(1, group.count)]

    def _parts(self) -> dict[int, Any]:
        """What other processes have said when they were done.

        Raises:
          ProcessFailedError: when that is that one failed.
        """
        assert self.group.board is not None
        notes = self.group.board.below(f"{self._place}/done")
        return {int(index): self._value(text) for index, text in notes.items()}

    def heard(self, name: str) -> Any:
        """The value of a note by process 0, once it is there.

        Raises:
          FlaxckptError: what the note says that process 0 has failed with.
          ProcessTimeoutError: when it does not come.
        """
        group = self.group
        assert group.board is not None
        end = group.clock() + GRACE * group.timeout_secs
        while (text := group.board.read(f"{self._place}/{name}", WAIT_SECS)) is None:
            if group.clock() > end:
                raise self._timeout(self._arrived() if name == "outcome" else None)
        return self._value(text)

    def _arrived(self) -> dict[int, Any] | None:
        """Who is done; `None` when process 0, which has the notes, does not answer."""
        try:
            return self._parts()
        except SilentBoardError:
            return None

    def _post(self, name: str, note: dict[str, Any]) -> None:
        """Leaves a note, unless this process is alone."""
        if self.group.board is not None:
            text = orjson.dumps({"title": self.title, **note}).decode()
            self.group.board.post(f"{self._place}/{name}", text)

    def _value(self, text: str) -> Any:
        """What a note says.

        Raises:
          FlaxckptError: when it says that a process failed, or is of another meeting.
        """
        note = orjson.loads(text)
        if (failure := note.get("failure")) is None:
            if note["title"] != self.title:
                raise ProcessFailedError(
                    f"{self.title}: another process is {note['title']} instead. All processes must "
                    "make the same calls in the same order."
                )
            return note["value"]
        index, name, text = failure["process"], failure["type"], failure["text"]
        kind = getattr(errors, name, None)
        # An error of flaxckpt's that process 0 found in a decision is one of every process.
        if index == 0 and isinstance(kind, type) and kind is not errors.StructureMismatchError:
            raise kind(text)
        why = text.rstrip(".")
        raise ProcessFailedError(
            f"{self.title} failed on process {index}: {name}: {why}. See the log there."
        )

    def _timeout(self, arrived: dict[int, Any] | None) -> FlaxckptError:
        """The error of a wait without an end; `arrived` are those who have done their part."""
        group = self.group
        missing = [0]
        if arrived is not None:
            missing = [i for i in range(1, group.count) if i not in arrived] or [0]
        who = ", ".join(map(str, missing[:20])) + (", ..." if len(missing) > 20 else "")
        plural = "process" if len(missing) == 1 else f"{len(missing)} processes:"
        return ProcessTimeoutError(
            f"{self.title}: {plural} {who} did not arrive within {group.timeout_secs:g} s. See the "
            "log there, or give Options(timeout_secs=...) more."
        )


# The processes of a job: how many there are, and where they leave notes for one another.
#
# jax has a coordination service for that, and no public interface to it. `CoordinationBoard` is the
# one place that calls it; where it is missing or has changed, notes go to the storage instead.


# The service is a part of this process or one on a fast network.
ANSWER_SECS = 10.0


class CoordinationBoard:
    """Notes in jax's coordination service. Its errors are told apart by their texts only.

    The service is a part of process 0. When that is stopped, a call to it never returns, whatever
    its deadline; so each is made by a thread that can be left to itself.
    """

    def __init__(self, client: Any, prefix: str, answer_secs: float = ANSWER_SECS):
        """Notes that the service has with `prefix` before their names; it answers in so long."""
        self._client, self._prefix, self._answer_secs = client, prefix, answer_secs
        self._callers = threading.local()

    def post(self, name: str, text: str) -> None:
        """See `Board`; nobody can be told when there is no answer."""
        with contextlib.suppress(SilentBoardError):
            try:
                self._call(self._answer_secs, "key_value_set", f"{self._prefix}/{name}", text)
            except jax.errors.JaxRuntimeError as error:
                if "ALREADY_EXISTS" not in str(error):
                    raise

    def read(self, name: str, wait_secs: float) -> str | None:
        """See `Board`."""
        key = f"{self._prefix}/{name}"
        try:
            # With a deadline of next to nothing, a note that is there would often come too late.
            if not wait_secs:
                return str(self._call(self._answer_secs, "key_value_try_get", key))
            milliseconds = max(1, round(wait_secs * 1000))
            return str(self._call(wait_secs + 1.0, "blocking_key_value_get", key, milliseconds))
        except SilentBoardError:
            return None
        except jax.errors.JaxRuntimeError as error:
            if not any(known in str(error) for known in ("DEADLINE_EXCEEDED", "NOT_FOUND")):
                raise
            return None

    def below(self, name: str) -> dict[str, str]:
        """See `Board`."""
        prefix = f"{self._prefix}/{name}/"
        found = self._call(self._answer_secs, "key_value_dir_get", prefix)
        return {key[len(prefix) :]: text for key, text in found}

    def remove(self, name: str) -> None:
        """See `Board`."""
        self._call(self._answer_secs, "key_value_delete", f"{self._prefix}/{name}/")

    def _call(self, timeout_secs: float, method: str, *args: Any) -> Any:
        """What the client's `method` returns."""
        if not hasattr(self._callers, "mine"):  # one for each thread: they do not wait for another
            self._callers.mine = _Caller()
        call = functools.partial(getattr(self._client, method), *args)
        return self._callers.mine.call(call, timeout_secs)


class _Caller:
    """A daemon thread that makes calls; whoever waits for one may stop waiting."""

    def __init__(self) -> None:
        """No call yet; the thread ends with this object."""
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        weakref.finalize(self, self._calls.put, None)
        serve = functools.partial(_serve, self._calls)
        threading.Thread(target=serve, name="flaxckpt-notes", daemon=True).start()

    def call(self, function: Callable[[], T], timeout_secs: float) -> T:
        """What `function` returns.

        Raises:
          SilentBoardError: when it does not return in time.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._calls.put((future, function))
        done, _ = concurrent.futures.wait([future], timeout_secs)
        if not done:
            raise SilentBoardError(f"no answer within {timeout_secs:g} s")
        return future.result()


def _serve(calls: queue.SimpleQueue[Any]) -> None:
    """Makes one call after the other until there is a `None`."""
    while (found := calls.get()) is not None:
        future, function = found
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            future.set_exception(error)


def client() -> Any:
    """Jax's own client of its coordination service; `None` when this jax has none, or another."""
    try:
        from jax._src.distributed import global_state

        found = global_state.client
    except (ImportError, AttributeError):
        return None
    needed = ("set", "try_get", "dir_get", "delete")
    has_all = all(hasattr(found, f"key_value_{name}") for name in needed)
    return found if has_all and hasattr(found, "blocking_key_value_get") else None


def join(timeout_secs: float, fallback: Callable[[str], Board]) -> Group:
    """The processes of this job; every one of them must call this.

    Without `jax.distributed` a process is alone, and no device is asked for.

    Args:
      timeout_secs: how long processes wait for one another.
      fallback: makes a board of that name in the storage.
    """
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return ALONE
    name = _shared_name()
    service = client()
    answer_secs = min(ANSWER_SECS, timeout_secs / 2)
    prefix = f"flaxckpt/{name}"
    board = CoordinationBoard(service, prefix, answer_secs) if service else fallback(name)
    return Group(jax.process_index(), jax.process_count(), board, timeout_secs)


def _shared_name() -> str:
    """A name that no group has had, the same on all processes.

    This is the only collective of a save, on the caller's thread and once for a manager: one from
    another thread would wait for ever beside those of a train step.
    """
    from jax.experimental import multihost_utils

    ours = np.frombuffer(uuid.uuid4().bytes, np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(ours), np.uint8)).hex()
