from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from flaxckpt.errors import BackgroundSaveError, SaveTimeoutError
from flaxckpt.run.writer import Background


def savers() -> list[threading.Thread]:
    """The threads that save."""
    return [thread for thread in threading.enumerate() if thread.name == "flaxckpt-save"]


@pytest.fixture
def background():
    """With a bound of a minute."""
    return Background(60.0)


def test_one_thread_runs_all_tasks(background):
    threads = set()
    for _ in range(5):
        background.start("noting", lambda: threads.add(threading.current_thread()))
        background.join()
    assert len(threads) == 1


def test_the_thread_ends_with_its_owner():
    background, before = Background(60.0), set(savers())
    background.start("nothing", lambda: None)
    background.join()
    (thread,) = set(savers()) - before
    del background
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_without_a_task_there_is_no_thread():
    before = savers()
    background = Background(60.0)
    background.join()
    assert not background.busy
    assert savers() == before


def test_what_a_task_holds_is_dropped_when_it_is_done(background):
    class Large:
        pass

    large = Large()
    dropped = threading.Event()

    weakref.finalize(large, dropped.set)
    background.start("holding", lambda held=large: None)
    del large
    background.join()
    assert dropped.wait(10)


def test_a_failure_is_raised_once_and_the_thread_goes_on(background):
    def fail():
        raise OSError("disk")

    background.start("failing", fail)
    background.join()
    with pytest.raises(
        BackgroundSaveError, match="failing failed in the background: OSError: disk"
    ):
        background.raise_failure()
    background.raise_failure()
    done = []
    background.start("going on", lambda: done.append(1))
    background.join()
    assert done == [1]


def test_waiting_has_a_bound():
    background, go_on = Background(0.05), threading.Event()
    background.start("slow", go_on.wait)
    try:
        assert background.busy
        with pytest.raises(SaveTimeoutError, match=r"slow did not finish within 0.05 s"):
            background.join()
    finally:
        go_on.set()
    deadline = time.monotonic() + 10
    while background.busy and time.monotonic() < deadline:
        time.sleep(0.01)
    background.join()
