"""`flaxckpt verify`."""

import shutil

import pytest

import flaxckpt
from tests import stores
from tests.cli.conftest import state
from tests.cli.shell import SAMPLES, Shell, arguments


def test_a_run_and_a_checkpoint_that_are_whole(made, shell):
    lines = shell.lines("verify", made, made / "1")
    assert [line.split(":")[0] for line in lines] == [
        *(f"ok    {made}/{step}" for step in (1, 2, 3, 4)),
        f"ok    {made}/1",
    ]
    assert "6 leaves, 32.8 kB, " in lines[0]
    assert lines[0].endswith("B/s")


def test_damage_names_the_leaf(damaged, shell):
    answer = shell("verify", damaged)
    assert answer.status == 1
    assert [line[:4] for line in answer.out.splitlines()] == [
        "ok  ",
        "ok  ",
        "BAD ",
        "    ",
        "ok  ",
    ]
    assert "the leaf params/dense/kernel is damaged" in answer.out
    found, status = shell.json("verify", damaged)
    assert (status, found["ok"]) == (1, False)
    assert [c["ok"] for c in found["checkpoints"]] == [True, True, False, True]
    assert "params/dense/kernel" in found["checkpoints"][2]["problems"][0]
    assert found["checkpoints"][0]["problems"] == []
    assert found["checkpoints"][0]["leaves"] == 6


def test_damaged_metadata_are_an_answer(run_dir, shell):
    file = run_dir / "2" / "_CHECKPOINT_METADATA"
    file.write_bytes(file.read_bytes()[:-5])
    found, status = shell.json("verify", run_dir)
    assert (status, [c["ok"] for c in found["checkpoints"]]) == (1, [True, False, True, True])
    assert shell("verify", run_dir / "2").status == 1


def test_other_formats_are_read(shell, tmp_path):
    (line,) = shell.lines("verify", SAMPLES / "t5x/checkpoint_1")
    assert line.endswith("; fully readable (T5X has no checksums)")
    broken = shutil.copytree(SAMPLES / "t5x/checkpoint_1", tmp_path / "checkpoint_1")
    chunk = broken / "target.Dense_0.kernel" / "0.0"
    chunk.write_bytes(chunk.read_bytes()[:5])
    answer = shell("verify", broken)
    assert answer.status == 1
    assert "params/Dense_0/kernel" in answer.out
    whole = SAMPLES / "safetensors/model.safetensors"
    cut = tmp_path / "model.safetensors"
    cut.write_bytes(whole.read_bytes()[:-4])
    assert shell("verify", cut).status == 1


def test_nothing_there_is_an_error(shell, tmp_path):
    assert "Check the path" in shell.error("verify", tmp_path / "none")


def test_a_step_that_is_deleted_meanwhile_is_no_damage(run_dir, shell, monkeypatch):
    from flaxckpt.cli import verify as cli_verify

    verify = cli_verify.verify

    def deleting(path, **settings):
        if path.name == "2":
            shutil.rmtree(path)
        return verify(path, **settings)

    monkeypatch.setattr(cli_verify, "verify", deleting)
    answer = shell("verify", run_dir)
    assert answer.status == 0
    assert f"gone  {run_dir}/2: deleted during the check" in answer.out


@pytest.mark.parametrize("kind", stores.BUCKETS)
def test_a_bucket(kind, capsys, tmp_path):
    with stores.opened(kind, tmp_path) as store:
        url, options = store.url("run/1"), store.options()
        flaxckpt.save(url, state(1), options=options)
        shell = Shell(capsys, *arguments(store))
        assert shell("verify", url).status == 0
        name = next(n for n in store.objects("run/1") if "/d/" in n)
        store.write("run/1", name, b"x" + store.read("run/1", name)[1:])
        assert shell("verify", url).status == 1
