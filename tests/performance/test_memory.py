"""How much memory saves and restores take: the most that was resident, in processes of their own.

The bounds are those that `Options` promises, and a slack for what allocators and Python keep.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.memory_child import BUDGET, MIB
from tests.processes import environment

# Where the budget is ignored, saves take 90 MiB and more, and so do restores of many arrays.
SLACK = 28 * MIB
# Beside that, what threads of jax and TensorStore keep from one save to the next; no more of it
# than this, however many saves there were.
THREADS = 8 * MIB
# What a default save may have in flight, and room for the chunks of 8 MiB that are being made.
DEFAULT = (96 + 8) * MIB

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.access("/proc/self/clear_refs", os.W_OK), reason="this system does not tell peaks"
    ),
]


def grown(scenario, *args, devices=1):
    """What the child says of `scenario`."""
    command = [sys.executable, "-m", "tests.memory_child", scenario, *map(str, args)]
    child = subprocess.run(command, env=environment(devices), capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("written")
    grown("write", directory)
    return directory


def test_a_default_save_of_a_jax_state_takes_only_its_own_buffers(tmp_path):
    assert grown("save", tmp_path) < DEFAULT + 16 * MIB


@pytest.mark.parametrize(("kind", "devices"), [("jax", 1), ("jax", 8), ("numpy", 1)])
def test_a_save_within_a_loop_that_changes_the_state_keeps_its_budget(tmp_path, kind, devices):
    assert grown("loop", tmp_path, kind, 1, devices=devices) < BUDGET + SLACK


@pytest.mark.parametrize(("kind", "devices"), [("jax", 1), ("jax", 8), ("numpy", 1)])
def test_many_saves_together_keep_the_budget_of_one(tmp_path, kind, devices):
    assert grown("loop", tmp_path, kind, 8, devices=devices) < BUDGET + SLACK + THREADS


@pytest.mark.parametrize("layout", ["one", "many"])
@pytest.mark.parametrize(("how", "devices"), [("jax", 1), ("jax", 8), ("numpy", 1), ("cast", 1)])
def test_a_restore_takes_its_result_and_its_budget(written, layout, how, devices):
    assert grown("restore", written, layout, how, devices=devices) < BUDGET + SLACK


@pytest.mark.parametrize("layout", ["one", "many"])
def test_verify_keeps_its_budget(written, layout):
    assert grown("verify", written, layout) < BUDGET + SLACK


def test_nothing_piles_up_over_hundreds_of_saves_and_restores(tmp_path):
    early, late, *restored = grown("leaks", tmp_path)
    for (before, *held), (after, *holds) in ((early, late), restored):
        assert after - before < 4 * MIB
        assert holds == held  # files and threads
