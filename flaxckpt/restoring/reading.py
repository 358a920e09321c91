"""Reading regions of arrays: every chunk once, checked, straight to where it belongs.

Several threads read; the system calls and the checksums run outside of Python's lock.
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flaxckpt.checkpoint import Checkpoint
from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.leaves.lazy import nbytes_of
from flaxckpt.restoring.chunk_reads import ArrayRead, Parts, Plan, plan
from flaxckpt.restoring.spans import Problem, SpanRead, finish_span, read_span, spans
from flaxckpt.storage.index import Place
from flaxckpt.storage.location import Location

# Disks want several requests at a time; more threads than this gain nothing.
THREADS = max(4, min(16, os.cpu_count() or 1))
# A bucket takes its time to answer, and answers many at once.
BUCKET_THREADS = 32
# So little is read without other threads, which would take longer to start.
INLINE_BYTES = 4 << 20
# What is read, and then put on its devices, together.
GROUP_BYTES = 32 << 20
GROUP_ARRAYS = 1024


def read_arrays(
    checkpoint: Checkpoint,
    reads: Sequence[ArrayRead],
    ahead: int,
    held: list[CorruptCheckpointError] | None = None,
) -> Iterator[list[Parts]]:
    """The values of `reads`, in their order, several at a time.

    Args:
      checkpoint: where they lie.
      reads: what is wanted.
      ahead: how many bytes are read ahead of what the caller has taken.
      held: takes the errors, if they are not to be raised; what could not be read is anything.

    Raises:
      CorruptCheckpointError: when a chunk is missing or damaged; the leaf and the chunk are named.
    """
    for plans, problems in _read(checkpoint, reads, ahead, keep=True):
        errors = [CorruptCheckpointError(_describe(checkpoint, p)) for p in problems]
        if errors and held is None:
            raise errors[0]
        if held is not None:
            held += errors
        yield [one.parts() for one in plans]


def check_arrays(
    checkpoint: Checkpoint,
    reads: Sequence[ArrayRead],
    ahead: int,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> list[str]:
    """What is wrong with `reads`: a line for each that is damaged; nothing of them is kept.

    How many bytes were read since the last time is told to `progress`.

    Raises:
      CorruptCheckpointError: when the database itself cannot be read.
    """
    lines: dict[str, str] = {}
    for plans, problems in _read(checkpoint, reads, ahead, keep=False):
        progress(sum(one.nbytes for one in plans))
        for problem in problems:
            lines.setdefault(problem.located.chunk.name, _describe(checkpoint, problem))
    return list(lines.values())


class _Group(NamedTuple):
    """Arrays that are read together."""

    plans: Sequence[Plan]
    nbytes: int


class _Started(NamedTuple):
    """A group that is being read."""

    group: _Group
    futures: Sequence[concurrent.futures.Future[SpanRead]]

    def finish(self, directory: Location) -> tuple[Sequence[Plan], list[Problem]]:
        """The group once it is read, with what was wrong with it."""
        problems = [p for f in self.futures for p in finish_span(directory, f.result())]
        return self.group.plans, problems


def _groups(reads: Iterable[ArrayRead], limit: int, *, keep: bool) -> Iterator[_Group]:
    """`reads` in groups of at most `limit` bytes, or of one."""
    group: list[Plan] = []
    size = 0
    for found in (plan(read, keep=keep) for read in reads):
        if group and (size + found.nbytes > limit or len(group) == GROUP_ARRAYS):
            yield _Group(group, size)
            group, size = [], 0
        group.append(found)
        size += found.nbytes
    if group:
        yield _Group(group, size)


def _read(
    checkpoint: Checkpoint, reads: Sequence[ArrayRead], ahead: int, *, keep: bool
) -> Iterator[tuple[Sequence[Plan], list[Problem]]]:
    """The plans of `reads` in groups, each once it is carried out, with what was wrong with it."""
    if not reads:
        return
    index = checkpoint.index
    waiting: collections.deque[_Started] = collections.deque()
    with _executor(checkpoint, sum(nbytes_of(read.array) for read in reads)) as pool:
        try:
            for group in _groups(reads, min(GROUP_BYTES, ahead), keep=keep):
                while waiting and sum(s.group.nbytes for s in waiting) + group.nbytes > ahead:
                    yield waiting.popleft().finish(checkpoint.item)
                chunks = (chunk for one in group.plans for chunk in one.chunks)
                read = functools.partial(read_span, checkpoint.item)
                futures = [pool.submit(read, span) for span in spans(chunks, index)]
                waiting.append(_Started(group, futures))
            while waiting:
                yield waiting.popleft().finish(checkpoint.item)
        finally:
            pool.shutdown(cancel_futures=True)


class _Inline(concurrent.futures.Executor):
    """Does at once what it is given."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The result of `fn`, as a future."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_result(fn(*args, **kwargs))
        return future


def _executor(checkpoint: Checkpoint, nbytes: int) -> concurrent.futures.Executor:
    """What reads `nbytes`."""
    if not isinstance(checkpoint.path, Path):
        return concurrent.futures.ThreadPoolExecutor(BUCKET_THREADS, "flaxckpt-read")
    if nbytes <= INLINE_BYTES:
        return _Inline()
    return concurrent.futures.ThreadPoolExecutor(THREADS, "flaxckpt-read")


def _describe(checkpoint: Checkpoint, problem: Problem) -> str:
    """The error of a damaged leaf."""
    (chunk, place), error = problem
    where = f"{checkpoint.item}/{place}" if isinstance(place, Place) else str(checkpoint.item)
    return (
        f"the leaf {chunk.name} is damaged: {error} (chunk {chunk.key}, in {where}). "
        "Restore another step."
    )
