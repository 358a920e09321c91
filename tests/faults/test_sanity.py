"""The sweeps find what they look for: each way to break the protocol is noticed by one of them."""

import pytest

from tests.faults.sweep import KILL, sweep

BROKEN = [
    ("no rename", "write", KILL, "the next save failed"),
    ("fsync errors are swallowed", "fsync", "error=EIO", "no error reached the caller"),
    ("old steps go first", "rename", KILL, "the steps are [1]"),
]


@pytest.mark.parametrize(("broken", "kind", "fault", "noticed"), BROKEN)
def test_a_broken_protocol_is_noticed(broken, kind, fault, noticed, child, tmp_path):
    done = sweep(child, tmp_path, kind, fault, broken)
    assert any(noticed in problem for problem in done.problems), done.problems
