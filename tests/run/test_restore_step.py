"""Going back to the newest step that is whole, when asked, and saying so."""

import jax.numpy as jnp
import numpy as np
import pytest

import flaxckpt
from flaxckpt.errors import CorruptCheckpointError


def state(step):
    return {"w": np.full(2500, step, np.float32), "step": step}


@pytest.fixture
def run(tmp_path):
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(step))
    return tmp_path / "run"


def damage(step_directory, what="data"):
    if what == "data":
        (file,) = [p for p in (step_directory / "state/d").iterdir() if p.stat().st_size > 8000]
    else:
        file = step_directory / what
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


WHAT = ["data", "_CHECKPOINT_METADATA", "state/_METADATA", "state/manifest.ocdbt"]


@pytest.mark.parametrize("what", WHAT)
def test_by_default_a_damaged_step_is_an_error(run, what):
    damage(run / "3", what)
    ckpt = flaxckpt.CheckpointManager(run)
    assert ckpt.latest_step() == 3
    with pytest.raises(CorruptCheckpointError, match=str(run / "3")):
        ckpt.restore()


@pytest.mark.parametrize("what", WHAT)
def test_previous_goes_back_warns_and_reports(run, what):
    damage(run / "3", what)
    damage(run / "2")
    ckpt = flaxckpt.CheckpointManager(run)
    with pytest.warns(UserWarning, match=r"skipping damaged step [23]: "):
        restored = ckpt.restore(on_corrupt="previous")
    assert restored["step"] == 1
    assert [step for step, _ in ckpt.report.damaged] == [3, 2]
    assert "(passed over, damaged: 3, 2)" in str(ckpt.report)
    assert (ckpt.last_step, ckpt.next_step) == (1, 2)


def test_a_damaged_step_that_is_reached_again_is_saved_anew(run):
    damage(run / "3", "state/_METADATA")
    ckpt = flaxckpt.CheckpointManager(run)
    with pytest.warns(UserWarning, match="step 3"):
        ckpt.restore(on_corrupt="previous")
    assert ckpt.last_step == 2
    assert ckpt(3, {"new": 1})
    assert ckpt.restore() == {"new": 1}
    assert not ckpt(3, {"new": 2})
    ckpt.close()


@pytest.mark.filterwarnings("ignore:skipping damaged")
def test_when_all_are_damaged_the_error_is_that_of_the_newest_and_nothing_is_initialised(run):
    for step in (1, 2, 3):
        damage(run / str(step))
    ckpt = flaxckpt.CheckpointManager(run)
    with pytest.raises(CorruptCheckpointError, match=str(run / "3")):
        ckpt.restore_or_init(
            lambda: {"w": jnp.zeros(2500), "step": jnp.asarray(0)}, on_corrupt="previous"
        )
    ckpt.close()


@pytest.mark.filterwarnings("ignore:skipping damaged")
def test_restore_or_init_goes_back_too(run):
    def init():
        return {"w": jnp.zeros(2500), "step": jnp.asarray(0)}

    with flaxckpt.CheckpointManager(run) as ckpt:
        ckpt.save(4, init())
        ckpt.save(5, init())
        ckpt.wait()
        damage(run / "5", "state/_METADATA")
        restored = ckpt.restore_or_init(init, on_corrupt="previous")
        assert ckpt.last_step == 4
        assert (np.asarray(restored["w"]) == 0).all()


def test_of_a_mismatch_nothing_is_tried_again(run):
    ckpt = flaxckpt.CheckpointManager(run, read_only=True)
    with pytest.raises(flaxckpt.errors.StructureMismatchError):
        ckpt.restore({"other": 1}, on_corrupt="previous")
    with pytest.raises(ValueError, match="on_corrupt"):
        ckpt.restore(on_corrupt="ignore")
