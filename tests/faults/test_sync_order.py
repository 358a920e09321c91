"""What the rename of the commit makes visible is on disk by then, as far as system calls can tell.

In the trace of one save, each file and each directory below the temporary name is fsynced after
its last change and before the rename; the run directory is fsynced after the rename and before
the old step loses its name.
"""

import pytest

from tests.faults.sweep import record


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


def test_all_of_it_is_on_disk_before_the_rename(child, tmp_path, tell):
    calls = record(child, tmp_path / "run")
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
    late = unsynced(record(child, tmp_path / "run", broken))
    assert any(path.endswith(noticed) for path in late), late
