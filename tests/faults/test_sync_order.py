"""What the rename of the commit makes visible is on disk by then, as far as system calls can tell.

In the trace of one save, each file and each directory below the temporary name is fsynced after
its last change and before the rename; the run directory is fsynced after the rename and before
the old step loses its name. Where that last fsync fails, nothing old is deleted: the disk may
still have the old name.
"""

import dataclasses

import pytest

from tests.faults.sweep import RETENTION, SCENARIOS, record, sweep


def unsynced(calls):
    """What was not fsynced in time, in the trace of a save of step 2."""
    dirty, late = set(), []
    for call in calls:
        parent = call.path.rpartition("/")[0] or "."
        if call.kind == "fsync":
            dirty.discard(call.path)
        elif call.kind == "rename" and parent == ".":
            committed = call.path.startswith("2.")
            late += [path for path in sorted(dirty) if path.startswith("2.") or not committed]
            dirty.add(parent)
        elif not call.error:
            dirty |= {call.path} if call.kind == "write" else {parent}
            dirty |= {call.path} if call.kind in ("open", "mkdir") else set()
    return late


def deleted_early(calls):
    """What was deleted after the rename of the commit and before a fsync of the run directory."""
    pending, early = False, []
    for call in calls:
        if call.kind == "rename" and "/" not in call.path and not call.error:
            pending = True
        elif call.kind == "fsync" and call.path == "." and not call.error:
            pending = False
        elif call.kind == "unlink" and pending:
            early.append(call.path)
    return early


def test_all_of_it_is_on_disk_before_the_rename(child, tmp_path, tell):
    calls = record(child, tmp_path / "run", RETENTION)
    syncs = sum(call.kind == "fsync" for call in calls)
    tell(f"one save with retention: {len(calls)} calls that change something, {syncs} fsyncs")
    assert [c.path[:2] for c in calls if c.kind == "rename" and "/" not in c.path] == ["2.", "0"]
    assert unsynced(calls) == []


BROKEN = [
    ("files are not synced", "/state/_METADATA"),
    ("files are not synced", "/_CHECKPOINT_METADATA"),
    ("files are not synced", "."),
    ("directories are not synced", "/state"),
    ("directories are not synced", "/state/array_metadatas"),
]


@pytest.mark.parametrize(("broken", "noticed"), BROKEN)
def test_a_sync_left_out_is_noticed(broken, noticed, child, tmp_path):
    scenario = dataclasses.replace(RETENTION, broken=broken)
    late = unsynced(record(child, tmp_path / "run", scenario))
    assert any(path.endswith(noticed) for path in late), late


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nothing_is_deleted_before_the_commit_is_durable(scenario, child, tmp_path):
    calls = record(child, tmp_path / "run", SCENARIOS[scenario])
    assert sum(call.kind == "unlink" for call in calls) > 0
    assert deleted_early(calls) == []


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nothing_is_deleted_when_the_commit_is_not_known_to_be_durable(scenario, child, tmp_path):
    done = sweep(child, tmp_path, SCENARIOS[scenario], "fsync", "error=EIO")
    failed = [run for run in done.runs if any(c.hit and c.path == "." for c in run.calls)]
    assert failed
    assert [path for run in failed for path in deleted_early(run.calls)] == []
