"""A reader beside a writer that deletes: each step is whole, or was deleted and says so."""

import collections
import contextlib

import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt.metadata import sealed_json
from flaxckpt.restoring import read_leaves
from flaxckpt.source import checkpoint, chunk_reads
from flaxckpt.source.chunk_reads import DIRECT_BYTES
from tests.durability.children import child

STEPS = 120

WRITER = """
    import sys, flaxckpt
    from tests.durability.test_readers import STEPS, state
    print("open", flush=True)
    sys.stdin.readline()
    options = flaxckpt.Options(fsync=False)
    with flaxckpt.CheckpointManager(sys.argv[1], keep=flaxckpt.Keep(last=1), options=options) as c:
        for step in range(STEPS):
            c.save(step, state(step))
"""

# Restores each step that it is told of; says for each whether it was whole or deleted.
READER = """
    import sys, flaxckpt
    from flaxckpt import errors
    from tests.durability.test_readers import STEPS, difference
    ckpt = flaxckpt.CheckpointManager(sys.argv[1], read_only=True)
    print("open", flush=True)
    for step in ckpt.follow(timeout_secs=60, poll_secs=0.001):
        try:
            if sys.argv[2] == "verify":
                said = "; ".join(flaxckpt.verify(f"{sys.argv[1]}/{step}").problems) or "whole"
            elif sys.argv[2] == "newest":
                said = difference(ckpt.restore(), None) or "whole"
            else:
                said = difference(ckpt.restore(step=step), step) or "whole"
        except errors.CheckpointNotFoundError as error:
            # The newest step may be a newer one than the one that was followed.
            told = (str(step), "no step", "was deleted or replaced")
            said = "deleted" if any(text in str(error) for text in told) else repr(error)
        except Exception as error:
            said = f"{type(error).__name__}: {error}".replace("\\n", " ")
        print(step, said, flush=True)
        if step == STEPS - 1:
            break
"""


def state(step):
    """Large leaves, each read by itself, a small one in the B-tree, and one in `_METADATA`."""
    large = {f"w{i}": np.arange(DIRECT_BYTES // 8) * (i + 1) + step for i in range(8)}
    return large | {"step": step, "text": str(step)}


def difference(found, step):
    """What is wrong with a restored state; `""` when it is the right one, whole."""
    if step is not None and found["step"] != step:
        return f"it is the state of step {found['step']}"
    wanted = state(found["step"])
    wrong = [name for name in wanted if not np.array_equal(found[name], wanted[name])]
    return f"{', '.join(wrong)} are wrong" if wrong else ""


@pytest.mark.parametrize("what", ["restore", "newest", "verify"])
def test_each_step_is_whole_or_was_deleted(what, tmp_path, capsys):
    run = tmp_path / "run"
    with child(WRITER, run) as writer, child(READER, run, what) as reader:
        writer.tell("go")
        lines = [line.split(maxsplit=1) for line in reader.end()]
        writer.end()
    counts = collections.Counter(said for _, said in lines)
    with capsys.disabled():
        shown = {said[:100]: count for said, count in counts.items()}
        print(f"\na reader ({what}) beside {STEPS} saves with Keep(last=1): {shown}")
    steps = [int(step) for step, _ in lines]
    assert steps == sorted(set(steps))
    assert lines[-1] == [str(STEPS - 1), "whole"]
    assert {said for _, said in lines} <= {"whole", "deleted"}
    assert counts["whole"] > 1


@pytest.fixture
def run(tmp_path):
    """A run whose step 1 is to be deleted while it is read; step 2 stays."""
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step))
    return tmp_path / "run"


def delete_before(monkeypatch, run, module, name, *, call=1, values=0):
    """Deletes step 1 when the function is called so often, or after so many of its values."""
    function = getattr(module, name)
    waiting = [True] * call

    def delete():
        if waiting and waiting.pop() and not waiting:
            flaxckpt.CheckpointManager(run).delete(1)

    def deleting(*args, **kwargs):
        if not values:
            delete()
            return function(*args, **kwargs)
        return after_values(function(*args, **kwargs))

    def after_values(results):
        for number, result in enumerate(results, start=1):
            yield result
            if number == values:
                delete()

    monkeypatch.setattr(module, name, deleting)
    return waiting


# How far reading has got when the step is deleted.
MOMENTS = {
    "when it was opened": (sealed_json, "unseal", {}),
    "before its database is opened": (checkpoint, "read_index", {}),
    "before its first chunk is read": (chunk_reads, "read_span", {}),
    "after its first chunk was read": (chunk_reads, "read_span", {"call": 2}),
    "after its first arrays were read": (read_leaves, "read_arrays", {"values": 1}),
}
SMALL = flaxckpt.Options(chunk_bytes=1, max_host_bytes=4)


@pytest.mark.parametrize("read_ahead", [True, False], ids=["read ahead", "one array at a time"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_step_that_is_deleted_while_it_is_read(moment, read_ahead, run, monkeypatch):
    module, name, when = MOMENTS[moment]
    options = flaxckpt.Options() if read_ahead else SMALL
    reader = flaxckpt.CheckpointManager(run, read_only=True, options=options)
    following = reader.follow(timeout_secs=60, poll_secs=0.01)
    assert next(following) == 1
    waiting = delete_before(monkeypatch, run, module, name, **when)
    outcome = None
    try:
        restored = reader.restore(step=1)
    except errors.CheckpointNotFoundError as error:
        outcome = str(error)
    if outcome is None:
        assert difference(restored, 1) == ""
        # Only what was read ahead of the deletion can be right.
        assert "values" in when
        assert read_ahead
    else:
        assert str(run / "1") in outcome
        assert "deleted" in outcome
    assert waiting == []
    assert next(following) == 2
    assert difference(reader.restore(step=2), 2) == ""


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_step_that_is_replaced_while_it_is_read_is_no_mixture(moment, run, monkeypatch):
    """The reader gets the old state or the new one, or an error; never some leaves of each."""
    module, name, when = MOMENTS[moment]

    def replace(ckpt, step):
        ckpt.save(step, state(1000 + step), overwrite=True, wait=True)

    monkeypatch.setattr(flaxckpt.CheckpointManager, "delete", replace)
    waiting = delete_before(monkeypatch, run, module, name, **when)
    reader = flaxckpt.CheckpointManager(run, read_only=True)
    with contextlib.suppress(errors.FlaxckptError):
        assert difference(reader.restore(step=1), None) == ""
    assert waiting == []
    assert difference(reader.restore(step=1), 1001) == ""
