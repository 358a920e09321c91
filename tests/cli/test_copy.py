"""`flaxckpt cp`."""

import os
import pathlib
import shutil

import pytest

import flaxckpt
from flaxckpt.store import layout
from flaxckpt.testing import differences
from tests import stores
from tests.cli.conftest import damage, state
from tests.cli.shell import SAMPLES, Shell, arguments


def test_one_checkpoint(made, shell, tmp_path):
    (line,) = shell.lines("cp", made / "2", tmp_path / "new" / "copy")
    assert line.startswith(f"{made}/2 -> {tmp_path}/new/copy: copied, ")
    copy = tmp_path / "new" / "copy"
    names = {str(p.relative_to(copy)): p for p in copy.rglob("*") if p.is_file()}
    assert {n: p.read_bytes() for n, p in names.items()} == {
        str(p.relative_to(made / "2")): p.read_bytes()
        for p in (made / "2").rglob("*")
        if p.is_file()
    }
    assert flaxckpt.verify(copy)
    assert os.listdir(copy.parent) == ["copy"]


def test_a_run_with_its_pins_and_again(made, shell, tmp_path):
    found, status = shell.json("cp", made, tmp_path / "run")
    assert (status, [c["state"] for c in found["copies"]]) == (0, ["copied"] * 4)
    assert shell.json("ls", tmp_path / "run")[0]["steps"][0]["pinned"]
    assert sorted(os.listdir(tmp_path / "run")) == ["1", "2", "3", "4"]
    shutil.rmtree(tmp_path / "run" / "3")
    found, _ = shell.json("cp", made, tmp_path / "run")
    states = [c["state"] for c in found["copies"]]
    assert states == ["already copied", "already copied", "copied", "already copied"]
    assert shell("verify", tmp_path / "run").status == 0


def test_another_checkpoint_is_only_replaced_when_asked(made, shell, tmp_path):
    shell.lines("cp", made / "1", tmp_path / "x")
    assert "--overwrite" in shell.error("cp", made / "2", tmp_path / "x")
    shell.lines("cp", made / "2", tmp_path / "x", "--overwrite")
    assert flaxckpt.restore(tmp_path / "x")["step"] == 2
    shell.lines("cp", made, tmp_path / "run")
    pinned = tmp_path / "run" / "1"
    assert "is pinned" in shell.error("cp", made / "2", pinned, "--overwrite")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    assert "is not a flaxckpt checkpoint" in shell.error("cp", made / "2", tmp_path / "other")


def test_what_is_damaged_is_not_copied(damaged, shell, tmp_path):
    assert "params/dense/kernel is damaged" in shell.error("cp", damaged / "3", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_copy_that_fails_is_never_there(made, shell, tmp_path, monkeypatch):
    from flaxckpt.cli import cp

    copied = []

    def failing(source, target, **settings):
        copied.append(target)
        if len(copied) == 4:
            raise OSError(28, "No space left on device")
        return real(source, target, **settings)

    real = cp.copy_file
    monkeypatch.setattr(cp, "copy_file", failing)
    assert "No space left" in shell.error("cp", made / "2", tmp_path / "out" / "x")
    assert os.listdir(tmp_path / "out") == []


def test_what_is_read_from_the_copy_must_be_what_was_written(made, shell, tmp_path, monkeypatch):
    from flaxckpt.store.local import LocalStore

    real = LocalStore.create_from

    def flipping(self, at, blocks):
        real(self, at, blocks)
        if (path := pathlib.Path(at)).stat().st_size > 3000:
            path.write_bytes(b"x" + path.read_bytes()[1:])

    monkeypatch.setattr(LocalStore, "create_from", flipping)
    assert "reads back differently from its source" in shell.error(
        "cp", made / "2", tmp_path / "out" / "x"
    )
    assert os.listdir(tmp_path / "out") == []


def test_a_source_that_is_deleted_meanwhile(run_dir, shell, tmp_path, monkeypatch):
    from flaxckpt.cli import cp

    real = cp.verify

    def deleting(path, **settings):
        result = real(path, **settings)
        if path.name == "2":
            shutil.rmtree(path)
        return result

    monkeypatch.setattr(cp, "verify", deleting)
    states = [c["state"] for c in shell.json("cp", run_dir, tmp_path / "out")[0]["copies"]]
    assert states == ["copied", "deleted during the copy", "copied", "copied"]
    assert sorted(os.listdir(tmp_path / "out")) == ["1", "3", "4"]


def test_what_cannot_be_copied(made, shell, tmp_path):
    assert "to itself" in shell.error("cp", made / "1", made / "1")
    assert "convert" in shell.error("cp", SAMPLES / "t5x/checkpoint_1", tmp_path / "x")
    assert "no such directory" in shell.error("cp", tmp_path / "none", tmp_path / "x")


def test_a_place_without_an_atomic_rename(made, shell, tmp_path):
    shell.lines("cp", made / "2", tmp_path / "x", "--no-atomic-rename")
    assert (tmp_path / "x" / layout.CLAIM).exists()
    assert flaxckpt.verify(tmp_path / "x")
    shell.lines("cp", tmp_path / "x", tmp_path / "y")
    assert not (tmp_path / "y" / layout.CLAIM).exists()
    assert flaxckpt.verify(tmp_path / "y")


@pytest.mark.parametrize("kind", stores.BUCKETS)
def test_there_and_back_again(kind, run_dir, capsys, tmp_path):
    for step in (3, 4):
        shutil.rmtree(run_dir / str(step))
    with stores.opened(kind, tmp_path) as store:
        shell, options = Shell(capsys, *arguments(store)), store.options()
        url = store.url("run")
        shell.lines("cp", run_dir, url)
        assert shell("verify", url).status == 0
        assert store.strays("run") == []
        found, _ = shell.json("ls", url)
        assert [s["pinned"] for s in found["steps"]] == [True, False]
        assert shell.json("cp", f"{url}/2", store.url("other"))[1] == 0
        shell.lines("cp", url, tmp_path / "back")
        shell.lines("cp", store.url("other"), tmp_path / "back" / "5")
        assert shell("verify", tmp_path / "back").status == 0
        assert shell("diff", run_dir / "2", tmp_path / "back" / "5").status == 0
        assert differences(flaxckpt.restore(tmp_path / "back" / "1"), state(1)) == []
        restored = flaxckpt.restore_items(f"{url}/2", {"data": None, "ema": None}, options)
        assert restored["data"] == {"position": 2}


def test_a_step_that_was_saved_to_a_bucket(capsys, tmp_path):
    with stores.opened("s3", tmp_path) as store:
        url, options = store.url("run/1"), store.options()
        flaxckpt.save(url, state(1), items={"data": {"p": 1}, "key": {"a": [1]}}, options=options)
        shell = Shell(capsys, *arguments(store))
        shell.lines("cp", url, tmp_path / "disk")
        assert flaxckpt.verify(tmp_path / "disk").problems == ()
        assert differences(flaxckpt.restore(tmp_path / "disk"), state(1)) == []
        shell.lines("cp", tmp_path / "disk", store.url("run/2"))
        assert flaxckpt.verify(store.url("run/2"), options=options).problems == ()


def test_a_copy_to_a_bucket_that_was_cut_short_is_done_again(made, capsys, tmp_path, monkeypatch):
    from flaxckpt.cli import cp
    from flaxckpt.store.bucket import BucketStore

    with stores.opened("s3", tmp_path) as store:
        shell, url = Shell(capsys, *arguments(store)), store.url("run/2")
        calls = []

        def dying(source, target, **settings):
            calls.append(target)
            if len(calls) == 3:
                raise OSError("dead")
            return real(source, target, **settings)

        real = cp.copy_file
        with monkeypatch.context() as patch:
            patch.setattr(cp, "copy_file", dying)
            patch.setattr(
                BucketStore, "_remove", lambda self, final, attempt: None
            )  # no time to clean up
            assert "dead" in shell.error("cp", made / "2", url)
        assert store.objects("run") != []
        assert shell.json("ls", store.url("run"))[0]["steps"] == []
        shell.lines("cp", made / "2", url)
        assert shell("verify", url).status == 0
        assert store.strays("run") == []


def test_damage_in_a_bucket(made, capsys, tmp_path, run_dir):
    damage(run_dir / "4")
    with stores.opened("s3", tmp_path) as store:
        shell = Shell(capsys, *arguments(store))
        assert "is damaged" in shell.error("cp", run_dir / "4", store.url("x"))
        assert store.objects("x") == []
