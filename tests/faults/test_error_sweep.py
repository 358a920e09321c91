"""ENOSPC and EIO from every call of a save that can change a file system.

The saves are those of test_kill_sweep.py. An exception must reach the caller, also when step 2 is
committed and only step 0 cannot be deleted. No step that is listed is half-written, the same
manager saves the next step, and after the next manager was opened there is no rubbish. One call
may fail without an exception: the mkdir of a directory that exists. Counted are the saves in
which a call really failed; none of the recorded calls may be missing among them.
"""

import collections

import pytest

from tests.faults.sweep import ALL_SCENARIOS, sweep
from tests.faults.tracing import KINDS


@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scenario", ALL_SCENARIOS)
def test_an_error_of_any_call_reaches_the_caller(scenario, kind, error, child, tmp_path, tell):
    done = sweep(child, tmp_path, ALL_SCENARIOS[scenario], kind, f"error={error}")
    raised = dict(collections.Counter(run.outcome.get("error") for run in done.runs))
    calls, failed = len(done.wanted), len(done.runs)
    tell(f"{error} sweep, {scenario}, {kind}: {calls} calls, {failed} failed, raised {raised}")
    assert done.wanted
    assert done.missed == []
    assert done.problems == []
