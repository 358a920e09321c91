from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flaxckpt.store.layout import (
    host_name,
    new_attempt,
    parse_step,
    parse_temporary,
    step_name,
    temporary_name,
)

_names = st.from_regex(r"[^/\0\n]+", fullmatch=True)


@given(st.integers(0, 10**30))
def test_a_step_comes_back_from_its_name(step):
    assert parse_step(step_name(step)) == step


@pytest.mark.parametrize(
    "name",
    ["", "-1", "00", "01", "+1", "1.0", "1 ", " 1", "1\n", "1_000", "x", "step_1", "٣", "1e3",
     "1.flaxckpt-tmp-host-0123456789ab", "1.orbax-checkpoint-tmp"],
)  # fmt: skip
def test_every_other_name_is_no_step(name):
    assert parse_step(name) is None


@given(_names)
@example("a.flaxckpt-tmp-host-0123456789ab")
@example(".flaxckpt-tmp-")
def test_a_temporary_name_tells_the_checkpoint_and_the_host(name):
    assert parse_temporary(temporary_name(name, new_attempt())) == (name, host_name())


@given(_names)
def test_a_temporary_name_is_no_step(name):
    assert parse_step(temporary_name(name, new_attempt())) is None


@pytest.mark.parametrize(
    "name",
    ["1", "1.flaxckpt-tmp-host", "1.flaxckpt-tmp-host-0123456789aB", ".flaxckpt-tmp-h-0123456789ab",
     "1.flaxckpt-tmp-host-0123456789abc", "1.flaxckpt-tmp--0123456789ab",
     "1.orbax-checkpoint-tmp-1", "1.flaxckpt-tmp-host-0123456789ab.txt"],
)  # fmt: skip
def test_every_other_name_is_not_temporary(name):
    assert parse_temporary(name) is None


def test_the_host_is_part_of_a_file_name():
    assert re.fullmatch(r"[A-Za-z0-9._-]+", host_name())


def test_two_attempts_differ():
    assert len({new_attempt() for _ in range(100)}) == 100
