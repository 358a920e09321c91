"""What `import flaxckpt` costs and brings."""

import inspect
import re

import numpy as np
import pytest

import flaxckpt
from tests.processes import ROOT, run_fresh

pytestmark = pytest.mark.slow


def test_it_imports_neither_orbax_nor_tensorflow_and_needs_no_device():
    code = """
        import sys, flaxckpt
        flaxckpt.CheckpointManager, flaxckpt.save, flaxckpt.restore
        heavy = {"orbax", "tensorflow", "matplotlib", "clu.periodic_actions", "optax", "flax.linen"}
        print(sorted(heavy & sys.modules.keys()))
        from jax._src import xla_bridge
        print(xla_bridge.backends_are_initialized())
    """
    status, out, err = run_fresh(code)
    assert status == 0, err
    assert out.splitlines()[0].count("orbax") + out.splitlines()[0].count("tensorflow") == 0
    assert "matplotlib" not in out
    assert "periodic_actions" not in out
    assert out.splitlines()[1] == "False"


def test_the_metadata_of_a_checkpoint_are_read_without_jax(tmp_path):
    flaxckpt.save(tmp_path / "x", {"w": np.arange(10)})
    code = """
        import sys
        from flaxckpt.source.checkpoint import open_checkpoint
        print(open_checkpoint(sys.argv[1]).tree.records[0].name, "jax" in sys.modules)
    """
    assert run_fresh(code, tmp_path / "x") == (0, "w False\n", "")


@pytest.mark.parametrize("name", flaxckpt.__all__)
def test_every_public_name_is_there_and_no_module_takes_its_place(name):
    if name != "errors":
        assert not inspect.ismodule(getattr(flaxckpt, name))
    assert name in dir(flaxckpt)


def test_looking_into_a_checkpoint_needs_no_device(tmp_path):
    code = """
        import sys, numpy as np, flaxckpt
        flaxckpt.save(sys.argv[1], {"w": np.arange(10)})
        assert flaxckpt.verify(sys.argv[1])
        print(flaxckpt.inspect(sys.argv[1]).tree["w"].shape)
        print(flaxckpt.restore(sys.argv[1], as_numpy=True)["w"].sum())
        from jax._src import xla_bridge
        print(xla_bridge.backends_are_initialized())
    """
    status, out, err = run_fresh(code, tmp_path / "x")
    assert status == 0, err
    assert out == "(10,)\n45\nFalse\n"


def test_only_tests_and_benchmarks_import_orbax():
    pattern = re.compile(r"^\s*(import|from)\s+orbax", re.MULTILINE)
    files = [p for top in ("flaxckpt", "examples") for p in (ROOT / top).rglob("*.py")]
    assert len(files) > 40
    # One example begins with a checkpoint that Orbax writes.
    found = [p.name for p in files if pattern.search(p.read_text())]
    assert found == ["warm_start_bigger_head.py"]
