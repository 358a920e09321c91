"""SIGKILL at every call of a save that can change a file system.

A save of step 2 into a run with steps 0 and 1 and `Keep(last=2)`; and into such a run one of step
1 with `overwrite=True`, and one of step 2
by a marker: mkdir, open for writing, write, fsync, rename, unlink and rmdir, by
whatever thread; the process dies as it enters the call. Of a save of step 2 with items it is those
that make, open or remove something of an item. After each kill every listed step verifies
and is restored bit for bit, the steps are those of before or after the commit, the next manager
removes the rubbish, and its save works. Counted are the processes that were really killed in a
call; none of the recorded calls may be missing among them.
"""

import pytest

from tests.faults.sweep import ALL_SCENARIOS, ITEMS, KILL, sweep
from tests.faults.tracing import KINDS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scenario", ALL_SCENARIOS)
def test_a_kill_at_any_call_loses_nothing(scenario, kind, child, tmp_path, tell):
    done = sweep(child, tmp_path, ALL_SCENARIOS[scenario], kind, KILL)
    calls, killed = len(done.wanted), len(done.runs)
    tell(f"kill sweep, {scenario}, {kind}: {calls} calls, {killed} processes killed")
    assert done.wanted
    assert done.missed == []
    assert {run.outcome.get("exit") for run in done.runs} == {-9}
    assert done.problems == []


@pytest.mark.parametrize("kind", ["mkdir", "open", "unlink"])
def test_a_kill_at_any_call_for_an_item_loses_nothing(kind, child, tmp_path, tell):
    done = sweep(child, tmp_path, ITEMS, kind, KILL)
    calls, killed = len(done.wanted), len(done.runs)
    tell(f"kill sweep, items, {kind}: {calls} calls, {killed} processes killed")
    assert done.wanted
    assert done.missed == []
    assert {run.outcome.get("exit") for run in done.runs} == {-9}
    assert done.problems == []
