"""The types that a user's editor shows: a script of a user, checked by pyright."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from flax.training.train_state import TrainState

import flaxckpt


@dataclasses.dataclass
class Model:
    weights: jax.Array


def init(seed: int) -> Model:
    return Model(jnp.ones(seed))


ckpt = flaxckpt.CheckpointManager("run")
model = init(1)
reveal_type(flaxckpt.restore("path", model))  # Model
reveal_type(flaxckpt.restore("path", model, only="a", dtype="saved"))  # Model
reveal_type(flaxckpt.restore("path", {"a": model}))  # dict[str, Model]
reveal_type(flaxckpt.restore("path"))  # Any
reveal_type(flaxckpt.restore("path", None, as_numpy=True))  # Any
reveal_type(flaxckpt.abstract_state(init, 3))  # Model
reveal_type(ckpt.restore(model))  # Model
reveal_type(ckpt.restore(model, step=3, on_corrupt="previous"))  # Model
reveal_type(ckpt.restore())  # Any
reveal_type(ckpt.restore(step=3))  # Any
reveal_type(ckpt.restore_or_init(init, 3, missing={"a": "init"}))  # Model
reveal_type(ckpt.restore_or_init(lambda: (model, len("x"))))  # tuple[Model, int]
reveal_type(ckpt.update(nnx.Linear(1, 2, rngs=nnx.Rngs(0)), step=3))  # int | None


def resume(state: TrainState) -> TrainState:
    return ckpt.restore(state)


flaxckpt.restore("path", model, onli="a")  # error: No overloads for "restore"
flaxckpt.restore("path", model, dtype="smaller")  # error: assigned to parameter "dtype"
flaxckpt.restore("path", model, missing="ignore")  # error: assigned to parameter "missing"
ckpt.restore_or_init(init, 3, onli="a")  # error: No parameter named "onli"
ckpt.restore(model, step="3")  # error: assigned to parameter "step"
wrong: int = flaxckpt.restore("path", model)  # error: is not assignable to
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """What the type checker says of the script, with the numbers of its lines."""
    folder = tmp_path_factory.mktemp("types")
    (folder / "train.py").write_text(SCRIPT)
    settings = {
        "include": ["train.py"],
        "extraPaths": [str(Path(__file__).parents[1])],
        "typeCheckingMode": "standard",
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return json.loads(answer.stdout)["generalDiagnostics"]


def messages(found, severity):
    """The messages of one severity, by line."""
    return {
        item["range"]["start"]["line"]: item["message"]
        for item in found
        if item["severity"] == severity
    }


def test_a_restored_tree_has_the_type_of_its_target(found):
    lines = enumerate(SCRIPT.split("\n"))
    expected = {i: line.split("#")[1].strip() for i, line in lines if line.startswith("reveal")}
    shown = messages(found, "information")
    types = {i: re.sub(r'^Type of ".*" is "(.*)"$', r"\1", t, flags=re.S) for i, t in shown.items()}
    assert len(expected) == 13
    assert {i: types.get(i) for i in expected} == expected


def test_wrong_arguments_are_errors_and_right_ones_are_not(found):
    lines = enumerate(SCRIPT.split("\n"))
    expected = {i: line.split("# error: ")[1] for i, line in lines if "# error: " in line}
    told = messages(found, "error")
    assert told.keys() == expected.keys(), told
    for line, words in expected.items():
        assert words in told[line]
