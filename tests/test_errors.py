from __future__ import annotations

import inspect
import pickle

import jax.numpy as jnp
import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt.errors import FlaxckptError, Mismatch, StructureMismatchError

ALL = [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, Exception)]
GOLDEN = (
    "the checkpoint at runs/mnist/1200 does not fit the target (3 of 148 leaves)\n"
    "  missing     params/head/kernel        checkpoint: -                 "
    "  target: float32[512,10]     (did you mean params/classifier/kernel?)\n"
    "  unexpected  params/classifier/kernel  checkpoint: float32[512,10]   "
    "  target: -\n"
    "  shape       params/embed/embedding    checkpoint: float32[32000,512]"
    "  target: float32[32128,512]\n"
    "Build the target the way the saved state was built."
)


@pytest.mark.parametrize("cls", ALL)
def test_every_error_is_a_flaxckpt_error_with_a_docstring(cls):
    assert issubclass(cls, FlaxckptError)
    assert inspect.getdoc(cls)


@pytest.mark.parametrize(
    ("cls", "base"),
    [
        (errors.CheckpointNotFoundError, FileNotFoundError),
        (errors.StepExistsError, FileExistsError),
        (errors.UnsupportedLeafError, TypeError),
        (errors.UnsupportedKeyError, TypeError),
        (errors.ShardingError, ValueError),
        (errors.InvalidStepError, ValueError),
        (errors.InvalidMetricError, ValueError),
        (errors.StructureMismatchError, ValueError),
        (errors.DirectoryError, OSError),
        (errors.BackgroundSaveError, RuntimeError),
    ],
)
def test_an_error_is_also_what_python_would_raise(cls, base):
    assert issubclass(cls, base)


@pytest.mark.parametrize("cls", [c for c in ALL if c is not StructureMismatchError])
def test_an_error_with_a_message_says_it(cls):
    assert str(cls("what happened")) == "what happened"
    assert str(pickle.loads(pickle.dumps(cls("what happened")))) == "what happened"


def test_the_text_of_a_mismatch_is_aligned():
    rows = [
        Mismatch("missing", "params/head/kernel", "-", "float32[512,10]",
                 "(did you mean params/classifier/kernel?)"),
        Mismatch("unexpected", "params/classifier/kernel", "float32[512,10]", "-"),
        Mismatch("shape", "params/embed/embedding", "float32[32000,512]", "float32[32128,512]"),
    ]  # fmt: skip
    error = StructureMismatchError(
        "runs/mnist/1200", rows, 148, "Build the target the way the saved state was built."
    )
    assert str(error) == GOLDEN
    assert error.mismatches == tuple(rows)


def test_no_line_of_a_mismatch_ends_in_spaces():
    rows = [Mismatch("shape", "a", "x", "y"), Mismatch("dtype", "b", "x", "long", "(note)")]
    lines = str(StructureMismatchError("c", rows, 2, "Do this.")).splitlines()
    assert all(line == line.rstrip() for line in lines)


def test_a_restore_lists_every_leaf_that_differs(tmp_path):
    saved = {"old_head": {"kernel": jnp.ones((4, 2))}, "embed": jnp.ones((3,)), "n": 1}
    flaxckpt.save(tmp_path / "c", saved)
    target = {"head": {"kernel": jnp.ones((4, 2))}, "embed": jnp.ones((5,)), "n": 1, "e": ()}
    with pytest.raises(StructureMismatchError) as caught:
        flaxckpt.restore(tmp_path / "c", target)
    assert str(caught.value) == (
        f"the checkpoint at {tmp_path}/c does not fit the target (3 of 4 leaves)\n"
        "  shape       embed            checkpoint: float32[3]    target: float32[5]\n"
        "  missing     head/kernel      checkpoint: -             target: float32[4,2]"
        "  (did you mean old_head/kernel?)\n"
        "  unexpected  old_head/kernel  checkpoint: float32[4,2]  target: -\n"
        'If that is meant, pass transforms=[flaxckpt.Rename("old_head/(.*)", r"head/\\1")]; gaps '
        'are allowed with missing="init" and unexpected="ignore".'
    )


def test_an_unsupported_leaf_is_named_by_a_save(tmp_path):
    with pytest.raises(errors.UnsupportedLeafError) as caught:
        flaxckpt.save(tmp_path / "c", {"a": [1, {2}]})
    assert "the leaf a/1 is a builtins.set" in str(caught.value)
    assert "register_leaf_handler" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
