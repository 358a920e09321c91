"""`flaxckpt ls`."""

import os
import re
import shutil
import time

import pytest

import flaxckpt
from flaxckpt.store import layout
from tests import stores
from tests.cli.conftest import state
from tests.cli.shell import SAMPLES, Shell, arguments
from tests.stores import at


def test_steps_with_age_size_metrics_and_notes(made, shell):
    lines = shell.lines("ls", made)
    assert lines[0].split() == ["STEP", "AGE", "SIZE", "METRICS", "NOTES"]
    cells = [re.split(r" {2,}", line.strip()) for line in lines[1:5]]
    assert [(c[0], *c[3:]) for c in cells] == [
        ("1", "loss=0.5", "pinned"),
        ("2", "loss=0.1", "best"),
        ("3", "loss=nan"),
        ("4", "loss=0.25"),
    ]
    assert all(re.fullmatch(r"\d+ (s|min)", c[1]) and c[2].endswith(" kB") for c in cells)
    host = layout.host_name()
    assert lines[5:] == [
        f"unfinished: 5.flaxckpt-tmp-{host}-0123456789ab (its writer is gone)",
        "unfinished: 6.flaxckpt-tmp-elsewhere-0123456789ab (possibly being written by elsewhere)",
        "other files: 7, events.out",
    ]


def test_the_document(made, shell):
    found, status = shell.json("ls", made, "--mode", "max")
    assert status == 0
    assert (found["run"], found["latest"], found["best"]) == (str(made), 4, 1)
    assert [step["step"] for step in found["steps"]] == [1, 2, 3, 4]
    step = found["steps"][2]
    assert step["metrics"] == {"loss": "nan"}
    assert step["metadata"] == {"lang": "en"}
    assert step["items"] == ["data", "ema"]
    assert (step["best"], step["pinned"], step["damaged"]) == (False, False, False)
    assert step["nbytes"] == sum(p.stat().st_size for p in (made / "3").rglob("*") if p.is_file())
    assert 0 <= step["age_seconds"] < 3600
    assert [u["name"][0] for u in found["unfinished"]] == ["5", "6"]
    assert found["foreign"] == ["7", "events.out"]
    assert found["others"] == []


def test_a_step_whose_metadata_are_damaged_is_named(run_dir, shell):
    (run_dir / "2" / "_CHECKPOINT_METADATA").write_bytes(b'{"flaxckpt":')
    found, _ = shell.json("ls", run_dir)
    assert [s["damaged"] for s in found["steps"]] == [False, True, False, False]
    assert found["steps"][1]["time"] is None
    assert re.search(r"^ +2 +- .* damaged$", shell("ls", run_dir).out, re.MULTILINE)


def test_a_step_that_is_being_written(tmp_path, shell):
    final = at(tmp_path / "3")
    with final.store.commit(final, "0123456789ab", overwrite=False):
        assert "(being written)" in shell("ls", tmp_path).out
    with pytest.raises(RuntimeError, match="stop"):
        final = at(tmp_path / "3", atomic_rename=False)
        with final.store.commit(final, "0123456789ab", overwrite=False):
            assert "unfinished: 3 (being written)" in shell("ls", tmp_path).out
            raise RuntimeError("stop")


def test_several_metrics_need_a_name(tmp_path, shell):
    with flaxckpt.CheckpointManager(tmp_path / "r", async_=False) as ckpt:
        ckpt.save(1, {"x": 1}, metrics={"a": 1.0, "b": 2.0})
        ckpt.save(2, {"x": 1}, metrics={"a": 2.0, "b": 1.0})
    assert shell.json("ls", tmp_path / "r")[0]["best"] is None
    assert "best unknown: the steps have the metrics a, b" in shell("ls", tmp_path / "r").out
    ranking = ("--metric", "b", "--mode", "min")
    assert shell.json("ls", tmp_path / "r", *ranking)[0]["best"] == 2
    assert "no step" in shell.error("ls", tmp_path / "r", "--metric", "c")
    assert "Pass --mode min or" in shell.error("ls", tmp_path / "r", "--metric", "b")


def test_the_run_records_what_is_best_and_otherwise_ls_does_not_guess(tmp_path, shell):
    for name, keep in {
        "recorded": flaxckpt.Keep(metric="accuracy", mode="max"),
        "not": flaxckpt.Keep(last=5),
    }.items():
        with flaxckpt.CheckpointManager(tmp_path / name, keep=keep, async_=False) as ckpt:
            for step, accuracy in enumerate([0.1, 0.9, 0.5]):
                ckpt.save(step, {"x": 1}, metrics={"accuracy": accuracy})
    assert shell.json("ls", tmp_path / "recorded")[0]["best"] == 1
    assert shell.json("ls", tmp_path / "recorded", "--mode", "min")[0]["best"] == 0
    assert shell.json("ls", tmp_path / "not")[0]["best"] is None
    last = shell.lines("ls", tmp_path / "not")[-1]
    assert last.startswith("best unknown: the run does not record whether the smallest or the")
    assert shell.json("ls", tmp_path / "not", "--mode", "max")[0]["best"] == 1


def test_what_is_no_run(made, shell, tmp_path):
    assert "is a single checkpoint, not a run" in shell.error("ls", made / "1")
    assert "there is nothing at" in shell.error("ls", tmp_path / "none")
    assert shell.lines("ls", tmp_path) == [f"{tmp_path} has no steps of flaxckpt."]
    for foreign, name in {"orbax/0.6.4/mgr/3": "Orbax", "safetensors": "safetensors"}.items():
        assert f"is a single checkpoint of {name}, not a run. Use" in shell.error(
            "ls", SAMPLES / foreign
        )


def test_checkpoints_of_other_libraries(tmp_path, shell):
    shutil.copytree(SAMPLES / "t5x/checkpoint_1", tmp_path / "checkpoint_10")
    shutil.copytree(SAMPLES / "orbax/0.6.4/mgr/3", tmp_path / "9")
    shutil.copy(next(SAMPLES.glob("safetensors/*.safetensors")), tmp_path / "9.safetensors")
    (tmp_path / "events.out").touch()
    for name in ("9", "9.safetensors", "checkpoint_10"):
        os.utime(tmp_path / name, (time.time() - 7200,) * 2)
    lines = [line.split() for line in shell.lines("ls", tmp_path)]
    assert lines[0] == [*f"{tmp_path} has no steps of flaxckpt, but".split()]
    assert lines[1] == ["NAME", "AGE", "SIZE", "FORMAT"]
    assert [(c[0], *c[1:3], c[5]) for c in lines[2:5]] == [
        ("9", "2", "h", "Orbax"),
        ("9.safetensors", "2", "h", "safetensors"),
        ("checkpoint_10", "2", "h", "T5X"),
    ]
    assert lines[5:] == [["other", "files:", "events.out"]]
    found, _ = shell.json("ls", tmp_path)
    assert found["foreign"] == ["9", "9.safetensors", "checkpoint_10", "events.out"]
    other = found["others"][1]
    assert other["nbytes"] == (tmp_path / "9.safetensors").stat().st_size
    assert (other["name"], other["format"]) == ("9.safetensors", "safetensors")
    assert other["path"] == str(tmp_path / "9.safetensors")
    assert abs(other["time"] - time.time() + 7200) < 60


def test_checkpoints_of_other_libraries_in_a_bucket(capsys, tmp_path):
    source = SAMPLES / "t5x/checkpoint_1"
    with stores.opened("s3", tmp_path) as store:
        for file in (path for path in source.rglob("*") if path.is_file()):
            store.write("run", f"checkpoint_1/{file.relative_to(source)}", file.read_bytes())
        shell = Shell(capsys, *arguments(store))
        lines = shell.lines("ls", store.url("run"))
        assert [line.split() for line in lines[1:]] == [
            ["NAME", "AGE", "SIZE", "FORMAT"],
            ["checkpoint_1", "-", "-", "T5X"],
        ]


@pytest.mark.parametrize("kind", stores.BUCKETS)
def test_a_bucket(kind, capsys, tmp_path):
    with stores.opened(kind, tmp_path) as store:
        url = store.url("run")
        options, keep = store.options(), flaxckpt.Keep(metric="loss", mode="min")
        with flaxckpt.CheckpointManager(url, keep=keep, options=options, async_=False) as ckpt:
            for step in (1, 2):
                ckpt.save(step, state(step), metrics={"loss": step}, items={"data": {"p": 1}})
            ckpt.pin(2)
        store.write("run", "_claims/3", b"0123456789ab writing")
        store.write("run", "notes.txt", b"")
        shell = Shell(capsys, *arguments(store))
        found, status = shell.json("ls", url)
        assert (status, found["best"], found["foreign"]) == (0, 1, ["notes.txt"])
        assert found["unfinished"][0]["name"] == "3"
        assert [s["pinned"] for s in found["steps"]] == [False, True]
        assert all(32000 < s["nbytes"] < 34000 for s in found["steps"])
        assert "there is nothing at" in shell.error("ls", store.url("none"))
