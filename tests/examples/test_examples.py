"""Every example as a user runs it: it resumes, and ends in the same bits as if uninterrupted."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flaxckpt
from flaxckpt.testing import differences
from tests import processes

EXAMPLES = Path(__file__).parents[2] / "examples"

needs_clu = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("clu", "tensorflow"))), reason="CLU needs TensorFlow"
)
needs_grain = pytest.mark.skipif(not importlib.util.find_spec("grain"), reason="needs grain")
needs_jupyter = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("nbclient", "ipykernel"))),
    reason="needs nbclient and ipykernel",
)


# Runs a script as `__main__`. A second run takes the programs that the first has compiled.
SCRIPT = """
import os, runpy, sys, jax
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_example(name, cwd, *args, flags=""):
    """The output of an example that ends well within the time it has."""
    script = map(str, (EXAMPLES / name, *args))
    return output_of(processes.Process([SCRIPT, *script], **kept(cwd, flags)))


def run_python(cwd, *args):
    """The output of a script, in an interpreter of its own."""
    return output_of(subprocess.Popen([sys.executable, *args], **kept(cwd)))


def kept(cwd, flags=""):
    """How a script is started whose output is kept."""
    compiled_once = {
        "JAX_COMPILATION_CACHE_DIR": str(cwd / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags} | compiled_once
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return {"cwd": cwd, "env": environment, **pipes}


def output_of(process):
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, f"{out}\n{err[-4000:]}"
    return out


def final(run):
    """The newest checkpoint of a run."""
    return flaxckpt.CheckpointManager(run, read_only=True).restore()


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_is_short(name):
    lines = (EXAMPLES / name).read_text().splitlines()
    whole_loops = "demo.py", "imagenet_style.py", "lm1b_style.py", "ppo_style.py"
    assert len(lines) < (150 if name in whole_loops else 100)


def test_every_example_has_its_line():
    listed = re.findall(r"^\| \[(.*)\]\(\1\) \| .+ \|$", (EXAMPLES / "README.md").read_text(), re.M)
    assert sorted(listed) == sorted(
        path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")
    )


@pytest.mark.parametrize(
    ("name", "kept", "left"),
    [
        ("nnx_style", [0, 4, 8, 9], 4),
        pytest.param("lm1b_style", [0, 4, 8, 9], 4, marks=needs_grain),
        pytest.param("clu_hooks", [8, 9], 8, marks=needs_clu),
    ],
)
def test_an_example_resumes_bit_for_bit(name, kept, left, tmp_path):
    run = tmp_path / "run"
    args = ("--workdir", "run", "--steps", 10, "--save-every", 4)
    first = run_example(f"{name}.py", tmp_path, *args, flags=processes.QUICKLY_COMPILED)
    assert first.startswith("started\n")
    uninterrupted = final(run)
    with flaxckpt.CheckpointManager(run) as ckpt:
        assert ckpt.steps() == kept
        for step in kept[kept.index(left) + 1 :]:
            ckpt.delete(step)

    second = run_example(f"{name}.py", tmp_path, *args, flags=processes.QUICKLY_COMPILED)
    assert second.startswith(f"resumed from step {left}\n")
    assert second.splitlines()[-1] == first.splitlines()[-1]
    assert flaxckpt.CheckpointManager(run, read_only=True).steps()[-1] == 9
    assert differences(uninterrupted, final(run)) == []
    if name in MORE_OF:
        MORE_OF[name](run, second)


def check_nnx(run, output):
    """Every stream of random numbers has resumed."""
    del run
    assert "10 dropout masks, 10 shifts drawn" in output


def check_lm1b(run, output):
    """The state is restored on every mesh, and the data iterator has resumed."""
    where = re.findall(r"restored on (.*): loss [0-9.]+\n", output)
    assert where == ["{'data': 2, 'model': 4}", "one device"]
    saved = flaxckpt.inspect(run / "9").tree
    embeddings = (
        tree["Embed_0"]["embedding"].value for tree in (saved["params"], saved["opt_state"][0].mu)
    )
    assert [info.partition for info in embeddings] == [("model", "data")] * 2
    manager = flaxckpt.CheckpointManager(run, read_only=True)
    manager.restore(items={"data": None})
    assert manager.items["data"] == {"next_index": 10}


def check_clu(run, output):
    """TensorBoard finds the costs of saves."""
    del output
    costs = flaxckpt.metric_from_tensorboard("checkpoint/seconds", run)()
    assert costs.keys() == {0, 4, 8, 9}


MORE_OF = {"nnx_style": check_nnx, "lm1b_style": check_lm1b, "clu_hooks": check_clu}


@pytest.mark.parametrize(
    ("name", "metric"), [("imagenet_style", "accuracy"), ("ppo_style", "return")]
)
def test_the_best_steps_are_kept_and_the_rest_resumes_bit_for_bit(name, metric, tmp_path):
    run = tmp_path / "run"
    args = ("--workdir", "run", "--steps", 10, "--save-every", 2)
    first = run_example(f"{name}.py", tmp_path, *args, flags=processes.QUICKLY_COMPILED)
    assert first.startswith("started\n")
    uninterrupted = final(run)
    with flaxckpt.CheckpointManager(run) as ckpt:  # the run records its metric and mode
        kept, best_step = ckpt.steps(), ckpt.best_step()
        assert kept[-2:] == [8, 9]
        reached = re.findall(rf"step (\d+):.* {metric} ([0-9.]+)", first)
        assert float(max(reached, key=lambda found: float(found[1]))[1]) == pytest.approx(
            ckpt.metrics(best_step)[metric] * (100 if metric == "accuracy" else 1), abs=0.01
        )
        ckpt.delete(9)

    second = run_example(f"{name}.py", tmp_path, *args, flags=processes.QUICKLY_COMPILED)
    assert second.startswith("resumed from step 8\n")
    assert second.splitlines()[-1] == first.splitlines()[-1]
    assert differences(uninterrupted, final(run)) == []


@needs_jupyter
def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch):
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    notebook = EXAMPLES / "notebook.ipynb"
    code = [c for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    executed = tmp_path / "executed.ipynb"
    jupyter_execute = "from nbclient.cli import main; main()"
    run_python(tmp_path, "-c", jupyter_execute, notebook, "--output", executed)
    cells = json.loads(executed.read_text())["cells"]
    outputs = [out for cell in cells for out in cell.get("outputs", ())]
    assert not [out for out in outputs if out.get("name") == "stderr"]
    shown = "".join("".join(out.get("text", ())) for out in outputs)
    assert "from step 120: restored" in shown
    assert "('params/body/kernel', 'params/encoder/kernel')" in shown


def test_a_run_begins_with_the_orbax_checkpoint_of_another(tmp_path):
    first = run_example("warm_start_bigger_head.py", tmp_path, "--workdir", "here")
    assert first.startswith("started\nrestored 4 leaves, 10 initialised, 9 ignored")
    before, after = map(int, re.findall(r"at step \d+: (\d+)% of all digits right", first))
    assert 45 <= before <= 50 < 95 < after
    second = run_example("warm_start_bigger_head.py", tmp_path, "--workdir", "here")
    assert second.startswith("resumed from step 29\nrestored 14 leaves")
    assert "initialised" not in second
    assert re.findall(r"at step (\d+):", first + second) == ["0", "30", "30", "60"]
    assert final(tmp_path / "here" / "run")["params"]["head"]["kernel"].shape == (128, 10)


def test_a_checkpoint_of_t5x_is_restored_in_slices(tmp_path):
    output = run_example("from_t5x.py", tmp_path, "--workdir", "here")
    for name in ("parameter", "moment"):
        where = rf"{name} of \(32, 64\) as P.*\('data', 'model'\): \(8, 32\) on each device\n"
        assert re.search(where, output)
    assert output.splitlines()[-1] == "resumes at step 1000, Adam at 1000: (1, 8, 32)"
    assert flaxckpt.restore(tmp_path / "here" / "checkpoint_1000")["step"] == 1000


def test_a_model_goes_out_to_safetensors_and_in_again(tmp_path):
    output = run_example("safetensors_in_out.py", tmp_path, "--workdir", "here")
    names = re.findall(r"(model\.\w+\.\w+) bfloat16", output)
    layers = ("hidden", "out")
    assert sorted(names) == [f"model.{n}.{p}" for n in layers for p in ("bias", "kernel")]
    found = re.search(r"read at step 0: float32 .*'model'.*, (\d+)% right\n", output)
    assert int(found.group(1)) > 80


def test_a_preempted_job_is_resumed_by_another_number_of_processes(tmp_path):
    output = run_example("many_processes.py", tmp_path, "--workdir", "run")
    preempted_at = int(re.search(r"preempted at step (\d+)", output).group(1))
    assert "done at step 400" in output
    steps = flaxckpt.CheckpointManager(tmp_path / "run", read_only=True).steps()
    assert steps == sorted({0, 100, 200, 300, 400, preempted_at})
    assert flaxckpt.verify(tmp_path / "run" / "400")


def test_the_demo_survives_kill_9(tmp_path):
    """And so does linen_digits.py, which is what it trains."""
    output = run_example("demo.py", tmp_path)
    killed_at = int(re.search(r"newest committed step is (\d+) of 399", output).group(1))
    assert 100 <= killed_at < 399
    assert f"resumed from step {killed_at}\n" in output
    assert "equal, bit for bit" in output
    assert float(re.search(r"PASSED: test accuracy ([0-9.]+) %", output).group(1)) > 95
    with flaxckpt.CheckpointManager(tmp_path / "demo-run" / "killed", read_only=True) as ckpt:
        assert ckpt.steps() == [*range(0, 400, 20), 399]
