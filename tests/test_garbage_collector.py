from __future__ import annotations

import gc

import pytest

from flaxckpt import garbage_collector


def test_the_collector_rests_during_the_block_and_goes_on_after_it():
    assert gc.isenabled()
    with garbage_collector.paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_goes_on_after_an_error():
    with pytest.raises(KeyError), garbage_collector.paused():
        raise KeyError
    assert gc.isenabled()


def test_one_that_was_off_stays_off():
    gc.disable()
    try:
        with garbage_collector.paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_blocks_may_be_nested():
    with garbage_collector.paused():
        with garbage_collector.paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
