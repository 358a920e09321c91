"""`flaxckpt rm` and `flaxckpt pin`."""

import pytest

import flaxckpt
from tests import stores
from tests.cli.shell import Shell
from tests.cli.test_ls import arguments


def steps(run):
    return flaxckpt.CheckpointManager(run, read_only=True).steps()


def test_without_yes_nothing_is_done(run_dir, shell):
    lines = shell.lines("rm", run_dir, "--step", 2, 3)
    assert [line.split("  ")[0] for line in lines[:2]] == [
        "would delete step 2",
        "would delete step 3",
    ]
    assert lines[2].endswith("; dry run, nothing deleted: pass --yes to delete")
    assert steps(run_dir) == [1, 2, 3, 4]
    found, _ = shell.json("rm", run_dir, "--keep-last", 1)
    assert (found["done"], found["deleted"], found["kept"]) == (False, [2, 3], [1, 4])
    assert found["pinned"] == [1]
    assert found["nbytes"] > 0
    assert steps(run_dir) == [1, 2, 3, 4]


def test_steps_are_deleted(run_dir, shell):
    assert shell.lines("rm", run_dir, "--step", 3, "--yes")[0].startswith("deleted step 3  ")
    assert steps(run_dir) == [1, 2, 4]


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (["--keep-last", 2], [1, 3, 4]),
        (["--keep-best", 1], [1, 2, 4]),
        (["--keep-best", 1, "--mode", "max"], [1, 4]),
        (["--keep-every", 2], [1, 2, 4]),
        (["--keep-every", 3, "--keep-best", 1, "--metric", "loss"], [1, 2, 3, 4]),
    ],
)
def test_rules(rule, kept, run_dir, shell):
    found, status = shell.json("rm", run_dir, *rule, "--yes")
    assert (status, found["kept"], steps(run_dir)) == (0, kept, kept)


def test_what_is_not_deleted(run_dir, shell):
    assert "is pinned" in shell.error("rm", run_dir, "--step", 2, 1, "--yes")
    assert "has no step 9" in shell.error("rm", run_dir, "--step", 2, 9, "--yes")
    assert "either --step" in shell.error("rm", run_dir, "--yes")
    assert "either --step" in shell.error("rm", run_dir, "--step", 2, "--keep-last", 1)
    assert "is not a positive integer" in shell.error("rm", run_dir, "--keep-last", 0)
    assert "no step of" in shell.error("rm", run_dir, "--keep-best", 1, "--metric", "nope")
    assert steps(run_dir) == [1, 2, 3, 4]
    assert shell.lines("rm", run_dir, "--keep-last", 4) == ["nothing to delete"]


def test_best_needs_a_metric(tmp_path, shell):
    with flaxckpt.CheckpointManager(tmp_path / "r", async_=False) as ckpt:
        ckpt.save(1, {"x": 1})
        ckpt.save(2, {"x": 1})
        assert "has a metric" in shell.error("rm", tmp_path / "r", "--keep-best", 1)
        ckpt.save(3, {"x": 1}, metrics={"a": 1, "b": 2})
        ckpt.save(4, {"x": 1}, metrics={"a": 1})
        assert "needs a ranking: the steps have the metrics a, b" in shell.error(
            "rm", tmp_path / "r", "--keep-best", 1
        )
        ranking = ("--metric", "b", "--mode", "min")
        found, _ = shell.json("rm", tmp_path / "r", "--keep-best", 1, *ranking)
        assert found["kept"] == [1, 2, 3, 4]  # nobody judged the others


def test_best_is_what_the_run_records_and_never_a_guess(tmp_path, shell):
    for name, keep in {
        "recorded": flaxckpt.Keep(metric="accuracy", mode="max"),
        "not": flaxckpt.Keep(),
    }.items():
        with flaxckpt.CheckpointManager(tmp_path / name, keep=keep, async_=False) as ckpt:
            for step, accuracy in enumerate([0.1, 0.9, 0.5]):
                ckpt.save(step, {"x": 1}, metrics={"accuracy": accuracy})
    found, _ = shell.json("rm", tmp_path / "recorded", "--keep-best", 1, "--yes")
    assert found["kept"] == [1, 2]
    error = shell.error("rm", tmp_path / "not", "--keep-best", 1, "--yes")
    assert "Pass --mode min or --mode max" in error
    assert steps(tmp_path / "not") == [0, 1, 2]
    found, _ = shell.json("rm", tmp_path / "not", "--keep-best", 1, "--mode", "max", "--yes")
    assert found["kept"] == [1, 2]


def test_a_damaged_step_is_kept_unless_it_is_named(run_dir, shell):
    (run_dir / "2" / "_CHECKPOINT_METADATA").write_bytes(b'{"flaxckpt":')
    assert shell.json("rm", run_dir, "--keep-last", 1, "--yes")[0]["kept"] == [1, 2, 4]
    shell.lines("rm", run_dir, "--step", 2, "--yes")
    assert steps(run_dir) == [1, 4]


def test_pin_and_unpin(run_dir, shell):
    assert shell.lines("pin", run_dir, 2) == [f"step 2 of {run_dir} is pinned"]
    found, _ = shell.json("pin", run_dir, 1, "--unpin")
    assert found == {"run": str(run_dir), "step": 1, "pinned": False}
    assert shell.json("rm", run_dir, "--keep-last", 1, "--yes")[0]["kept"] == [2, 4]
    assert "has no step 9" in shell.error("pin", run_dir, 9)
    assert "is not a step" in shell.error("pin", run_dir, "x")


def test_a_bucket(capsys, tmp_path):
    with stores.opened("s3", tmp_path) as store:
        url = store.url("run")
        with flaxckpt.CheckpointManager(url, options=store.options(), async_=False) as ckpt:
            for step in range(3):
                ckpt.save(step, {"x": step})
        shell = Shell(capsys, *arguments(store))
        shell.lines("pin", url, 0)
        assert shell.json("rm", url, "--keep-last", 1, "--yes")[0]["deleted"] == [1]
        assert store.strays("run") == []
