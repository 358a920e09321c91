"""The sweeps find what they look for: each way to break the protocol is noticed by one of them."""

import dataclasses

import pytest

from tests.faults.sweep import KILL, OVERWRITE, RETENTION, sweep

BROKEN = [
    (RETENTION, "copied, not renamed", "open", KILL, "reading failed"),
    (RETENTION, "fsync errors are swallowed", "fsync", "error=EIO", "no error reached the caller"),
    (RETENTION, "old steps go first", "rename", KILL, "the steps are [1]"),
    (OVERWRITE, "old steps go first", "rename", KILL, "the steps are [0]"),
]


@pytest.mark.parametrize(("scenario", "broken", "kind", "fault", "noticed"), BROKEN)
def test_a_broken_protocol_is_noticed(scenario, broken, kind, fault, noticed, child, tmp_path):
    done = sweep(child, tmp_path, dataclasses.replace(scenario, broken=broken), kind, fault)
    assert any(noticed in problem for problem in done.problems), done.problems
