"""Items in a run: saved with a step, captured at once, restored with it."""

import json
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import flaxckpt
from flaxckpt import CheckpointManager, Every, Keep, Options
from flaxckpt.errors import (
    BackgroundSaveError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ItemError,
    StepExistsError,
)
from flaxckpt.run import writer


class Counter:
    """A data iterator."""

    def __init__(self, at=0):
        self.at = at

    def __next__(self):
        self.at += 1
        return self.at

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


def state(step):
    return {"w": jnp.full(8, float(step)), "step": step}


def manager(path, **settings):
    return CheckpointManager(path, options=Options(fsync=False), **settings)


def test_a_loop_goes_on_with_its_data(tmp_path):
    it, rng, config = Counter(), np.random.default_rng(3), {"lr": 0.1}
    drawn = {}
    with manager(tmp_path, save_every=Every(steps=3)) as ckpt:
        for step in range(8):
            drawn[step] = (next(it), rng.random())
            ckpt(step, state(step), items={"data": it, "rng": rng, "config": config})
    it, rng = Counter(), np.random.default_rng(0)
    with manager(tmp_path, save_every=Every(steps=3)) as ckpt:
        wanted = {"data": it, "rng": rng, "config": None}
        found = ckpt.restore_or_init(lambda: state(0), items=wanted)
        assert found["step"] == 6
        assert ckpt.items == {"data": it, "rng": rng, "config": {"lr": 0.1}}
        assert (next(it), rng.random()) == drawn[7]
        assert ckpt.restore(step=3)["step"] == 3
        assert ckpt.items == {}
        assert ckpt.restore(state(0), step=0, items={"data": it})["step"] == 0
        assert it.at == 1


def test_when_there_is_nothing_to_restore_items_are_left_alone(tmp_path):
    it = Counter(5)
    with manager(tmp_path) as ckpt:
        assert ckpt.restore_or_init(lambda: state(0), items={"data": it})["step"] == 0
        assert ckpt.items == {}
        assert it.at == 5


@pytest.mark.parametrize("limit", [None, 4 << 10])
def test_what_is_saved_is_what_there_was_when_save_was_called(tmp_path, monkeypatch, limit):
    go_on, real = threading.Event(), writer.write

    def late(job, pieces, collective):
        if limit is None:
            assert go_on.wait(30)
        real(job, pieces, collective)

    monkeypatch.setattr(writer, "write", late)
    it, config, host, rng = Counter(4), {"a": [1]}, np.arange(3000.0), np.random.RandomState(1)
    expected = np.random.RandomState(1).random_sample()
    sizes = {} if limit is None else {"chunk_bytes": limit // 4, "max_host_bytes": limit}
    with CheckpointManager(tmp_path, options=Options(fsync=False, **sizes)) as ckpt:
        ckpt.save(
            1, {"w": host}, items={"data": it, "config": config, "ema": {"w": host}, "rng": rng}
        )
        next(it)
        config["a"].append(2)
        host[:] = -1
        rng.random_sample()
        go_on.set()
        ckpt.wait()
        it = Counter()
        wanted = {"data": it, "config": None, "ema": None, "rng": None}
        np.testing.assert_array_equal(ckpt.restore(items=wanted)["w"], np.arange(3000.0))
    assert (it.at, ckpt.items["config"]) == (4, {"a": [1]})
    np.testing.assert_array_equal(ckpt.items["ema"]["w"], np.arange(3000.0))
    assert ckpt.items["rng"].random_sample() == expected
    assert flaxckpt.verify(tmp_path / "1")


def test_an_item_that_is_not_there_is_named_with_those_that_are(tmp_path):
    with manager(tmp_path) as ckpt:
        ckpt.save(1, state(1), items={"data": Counter(), "config": []})
        ckpt.save(2, state(2))
        with pytest.raises(CheckpointNotFoundError, match="no item rng. It has data, config."):
            ckpt.restore(step=1, items={"rng": None})
        with pytest.raises(CheckpointNotFoundError, match="2 has no item rng. It has none."):
            ckpt.restore(items={"rng": None})


NAMES = ["state", "default", "metrics", "descriptor", "PINNED", "_a", "a-b", "a/b", "..", "", "ß"]


@pytest.mark.parametrize("name", [*NAMES, "a" * 65, 3, "a\n"])
def test_a_name_with_another_meaning_is_refused_before_anything_is_written(tmp_path, name):
    with pytest.raises(ValueError, match="cannot be an item name"):
        flaxckpt.save(tmp_path / "x", state(1), items={name: 1})
    with manager(tmp_path / "run") as ckpt:
        with pytest.raises(ItemError, match="cannot be an item name"):
            ckpt.save(1, state(1), items={name: 1})
    assert [path.name for path in tmp_path.rglob("*")] == ["run"]


def test_an_item_that_cannot_be_held_leaves_the_run_as_it_was(tmp_path):
    with manager(tmp_path) as ckpt:
        ckpt.save(1, state(1))
        with pytest.raises(ItemError, match="the item config: .*nan"):
            ckpt.save(2, state(2), items={"config": {"a": float("nan")}})
        ckpt.save(3, state(3), items={"config": {"a": 1}})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"]


def test_a_damaged_item_is_the_damage_of_its_step(tmp_path):
    it = Counter()
    with manager(tmp_path) as ckpt:
        ckpt.save(1, state(1), items={"data": Counter(11), "config": 1})
        ckpt.save(2, state(2), items={"data": Counter(22), "config": 2})
        ckpt.wait()
        file = tmp_path / "2" / "config" / "metadata"
        file.write_text("3")
        with pytest.raises(CorruptCheckpointError, match="the item config at .*2 is damaged"):
            ckpt.restore(items={"data": it, "config": None})
        assert it.at == 0, "nothing is set before all is read"
        assert flaxckpt.verify(tmp_path / "2").problems == (
            f"the file {file} does not match its checksum",
        )
        with pytest.warns(UserWarning, match="skipping damaged step 2"):
            ckpt.restore(items={"data": it, "config": None}, on_corrupt="previous")
        assert (it.at, ckpt.items["config"]) == (11, 1)
        assert ckpt.restore(step=2, items={"data": it})["step"] == 2
        assert it.at == 22


@pytest.mark.parametrize("name", ["data/process_0-of-1.json", "data/metadata", "files/files/a"])
@pytest.mark.parametrize("how", ["gone", "short", "long", "stray"])
def test_verify_lists_every_file_of_an_item(tmp_path, name, how, monkeypatch):
    monkeypatch.setattr("flaxckpt.items.item_kinds._REGISTERED", {})
    flaxckpt.register_item_handler(
        "range", range, lambda r: {"a": str(r).encode()}, lambda files, target: files["a"]
    )
    flaxckpt.save(tmp_path / "x", {}, items={"data": Counter(), "files": range(3)})
    file = tmp_path / "x" / name
    data = file.read_bytes()
    match how:
        case "gone":
            file.unlink()
        case "short":
            file.write_bytes(data[:-1])
        case "long":
            file.write_bytes(data + b" ")
        case "stray":
            file = file.with_name("stray")
            file.write_bytes(b"")
    problems = flaxckpt.verify(tmp_path / "x").problems
    assert len(problems) == 1
    assert str(file) in problems[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("../x", {"kind": "json", "files": []}),
        ("state", {"kind": "json", "files": []}),
        ("it", {"kind": "json", "files": [["../../secret", 1, 1]]}),
        ("it", {"kind": "json", "files": [["/etc/passwd", 1, 1]]}),
        ("it", {"kind": "tree", "tree": "../state", "files": []}),
        ("it", {"kind": "json", "files": [["metadata", -1, 1]]}),
        ("it", {"kind": "json", "files": 3}),
        ("it", 3),
    ],
)
def test_metadata_that_lead_elsewhere_are_damage(tmp_path, name, value):
    from flaxckpt.metadata import sealed_json

    flaxckpt.save(tmp_path / "x", {})
    file = tmp_path / "x" / "_CHECKPOINT_METADATA"
    data = json.loads(file.read_bytes())
    ours = data["custom_metadata"]["flaxckpt"]
    del ours["crc32c"]
    data["custom_metadata"]["flaxckpt"] = {"format": 1, "items": {name: value}} | ours
    file.write_bytes(sealed_json.seal(data))
    with pytest.raises(CorruptCheckpointError, match="_CHECKPOINT_METADATA is damaged"):
        flaxckpt.restore_items(tmp_path / "x", {"it": None})


def test_a_link_is_not_followed(tmp_path):
    flaxckpt.save(tmp_path / "x", {}, items={"config": 12})
    secret = tmp_path / "secret"
    secret.write_text("12")
    file = tmp_path / "x" / "config" / "metadata"
    file.unlink()
    file.symlink_to(secret)
    with pytest.raises(CorruptCheckpointError, match="the item config .* cannot be read"):
        flaxckpt.restore_items(tmp_path / "x", {"config": None})


def test_in_marker_mode(tmp_path):
    options, it = Options(atomic_rename=False, fsync=False), Counter()
    with CheckpointManager(tmp_path, options=options) as ckpt:
        ckpt.save(
            1,
            state(1),
            items={"data": Counter(3), "ema": {"a": np.ones(3)}, "rng": np.random.RandomState(1)},
        )
        ckpt.save(2, state(2), items={"data": Counter(4)})
        ckpt.wait()
        assert all(flaxckpt.verify(tmp_path / str(step)) for step in (1, 2))
        assert ckpt.restore(step=1, items={"data": it, "ema": None, "rng": None})["step"] == 1
    assert it.at == 3
    # Half a step with items is known for one.
    (tmp_path / "2" / "commit_success.txt").unlink()
    assert CheckpointManager(tmp_path, options=options).steps() == [1]
    assert not (tmp_path / "2").exists()


def test_overwrite_retention_and_deletion(tmp_path):
    with manager(tmp_path, keep=Keep(last=2)) as ckpt:
        for step in range(4):
            ckpt.save(step, state(step), items={"data": Counter(step), "config": {"step": step}})
        with pytest.raises(StepExistsError):
            ckpt.save(3, state(3), items={"config": 1})
        ckpt.save(3, state(3), items={"other": [3]}, overwrite=True)
        ckpt.wait()
        assert ckpt.steps() == [2, 3]
        assert sorted(p.name for p in (tmp_path / "3").iterdir()) == [
            "_CHECKPOINT_METADATA",
            "other",
            "state",
        ]
        ckpt.delete(2)
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


def test_a_failure_in_the_background_leaves_nothing(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("the disk is full")

    with manager(tmp_path) as ckpt:
        ckpt.save(1, state(1), items={"data": Counter(1)}, wait=True)
        monkeypatch.setattr("flaxckpt.saving.writing._write_item_files", fail)
        ckpt.save(2, state(2), items={"data": Counter(2), "ema": state(2)})
        with pytest.raises(BackgroundSaveError, match="the disk is full"):
            ckpt.wait()
        assert ckpt.steps() == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_the_plan_of_a_tree_is_kept_and_items_may_come_and_go(tmp_path):
    with manager(tmp_path) as ckpt:
        for step, names in enumerate(["ab", "b", "", "ba", "c"]):
            trees = {name: {"w": jnp.full(3, float(step))} for name in names}
            ckpt.save(step, state(step), items=trees)
        for step, names in enumerate(["ab", "b", "", "ba", "c"]):
            ckpt.restore(step=step, items=dict.fromkeys(names))
            assert {name: ckpt.items[name]["w"][0] for name in names} == dict.fromkeys(names, step)


def test_local_steps_have_items_too(tmp_path):
    settings = {"local": tmp_path / "local", "local_every": Every(steps=1)}
    with manager(tmp_path / "run", save_every=Every(steps=4), **settings) as ckpt:
        for step in range(7):
            ckpt(step, state(step), items={"data": Counter(step), "ema": state(step)})
    it = Counter()
    with manager(tmp_path / "run", save_every=Every(steps=4), **settings) as ckpt:
        assert ckpt.restore(items={"data": it, "ema": None})["step"] == 6
        assert "local" in str(ckpt.report.path)
        assert (it.at, ckpt.items["ema"]["step"]) == (6, 6)


def test_hooks_pass_items_on(tmp_path):
    it = Counter()
    with manager(tmp_path) as ckpt:
        hook = flaxckpt.PeriodicCheckpoint(ckpt, every_steps=2, items_fn=lambda: {"notes": [it.at]})
        for step in range(1, 6):
            next(it)
            hook(step, state=state(step), items={"data": it})
        ckpt.wait()
        assert ckpt.steps() == [2, 4]
        ckpt.restore(items={"data": it, "notes": None})
        assert (it.at, ckpt.items["notes"]) == (4, [4])
