"""Pieces handed from one thread to another, so many bytes at a time."""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flaxckpt.saving.snapshot import ShardQueue


class Fake(NamedTuple):
    """What a feed looks at of a piece."""

    number: int
    values: Any


def pieces(sizes):
    """A piece of each size."""
    return [Fake(i, np.zeros(size, np.int8)) for i, size in enumerate(sizes)]


def loop(feed, given, ends=True):
    """Feeds in a thread of its own; the thread, and where it says how that ended."""
    said = []

    def put():
        try:
            said.append(feed.put_all(given))
            if ends:
                feed.end()
        except Exception as error:  # noqa: BLE001 - the test judges it
            said.append(error)

    thread = threading.Thread(target=put, daemon=True)
    thread.start()
    return thread, said


@settings(max_examples=50)
@given(st.lists(st.integers(0, 30), max_size=30), st.integers(1, 40))
def test_all_pieces_come_in_order_and_never_more_than_the_limit_wait(sizes, limit):
    feed, most = ShardQueue(limit), []
    thread, said = loop(feed, pieces(sizes))
    taken = []
    for piece in feed:
        taken.append(piece.number)
        with feed._changed:
            waiting = [p.values.nbytes for p in feed._waiting]
            assert sum(waiting) == feed._bytes
            most.append(sum(waiting) <= limit or len(waiting) == 1)
    thread.join(30)
    assert said == [True]
    assert taken == list(range(len(sizes)))
    assert all(most)


def test_the_loop_waits_while_the_feed_is_full():
    feed, made = ShardQueue(10), []
    given = (made.append(piece) or piece for piece in pieces([4] * 6))
    thread, _ = loop(feed, given)
    taken = iter(feed)
    for number in range(6):
        until(lambda n=number: len(made) == min(6, n + 3))  # two wait, one is to be put
        time.sleep(0.01)
        assert len(made) == min(6, number + 3)
        assert next(taken).number == number
    assert next(taken, None) is None
    thread.join(30)


def until(holds):
    """Waits until something holds."""
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_piece_larger_than_the_limit_comes_alone():
    feed = ShardQueue(3)
    thread, _ = loop(feed, pieces([9, 9]))
    until(lambda: len(feed._waiting) == 1)
    time.sleep(0.01)
    assert len(feed._waiting) == 1
    assert [piece.number for piece in feed] == [0, 1]
    thread.join(30)


def test_a_writer_that_stops_frees_the_loop():
    feed = ShardQueue(1)
    thread, said = loop(feed, pieces([9] * 5))
    assert next(iter(feed)).number == 0
    feed.stop()
    thread.join(30)
    assert said == [False]


def test_a_failure_of_the_loop_reaches_both():
    def failing():
        yield from pieces([1])
        raise KeyError("the loop's")

    feed = ShardQueue(100)
    thread, said = loop(feed, failing())
    thread.join(30)
    assert isinstance(said[0], KeyError)
    with pytest.raises(RuntimeError, match="could not be read to its end") as raised:
        list(feed)
    assert raised.value.__cause__ is said[0]


def test_a_feed_without_an_end_is_not_taken_for_a_whole_one():
    feed = ShardQueue(100)
    loop(feed, pieces([1]), ends=False)[0].join(30)
    taken = []
    writer = threading.Thread(target=lambda: taken.extend(feed), daemon=True)
    writer.start()
    writer.join(0.05)
    assert writer.is_alive()
    feed.end()
    writer.join(30)
    assert [piece.number for piece in taken] == [0]
