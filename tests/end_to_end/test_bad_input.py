"""Bad input gets a clear error, before anything is written or believed."""

import json
import os
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flaxckpt
from flaxckpt import errors
from flaxckpt.metadata import sealed_json
from tests.processes import run

TREE = {"params": {"kernel": np.arange(3000.0).reshape(50, 60), "bias": jnp.zeros(3)}, "step": 7}


@pytest.fixture
def saved(tmp_path):
    flaxckpt.save(tmp_path / "x", TREE)
    return tmp_path / "x"


def rewrite(file, change):
    """Changes the JSON of `file` and seals it anew."""
    data = json.loads(file.read_text())
    change(data)
    for inner in (data.get("flaxckpt"), data.get("custom_metadata")):
        if inner:
            inner.get("flaxckpt", inner).pop("crc32c", None)
    file.write_bytes(sealed_json.seal(data))


# Paths


def test_a_missing_directory(tmp_path):
    with pytest.raises(errors.CheckpointNotFoundError, match="no such directory. Check the path"):
        flaxckpt.restore(tmp_path / "nothing")


def test_an_empty_directory(tmp_path):
    with pytest.raises(errors.CheckpointNotFoundError, match="holds no checkpoint of flaxckpt"):
        flaxckpt.restore(tmp_path)


def test_a_path_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.CheckpointNotFoundError, match="it is a file"):
        flaxckpt.restore(tmp_path / "file")
    with pytest.raises(errors.DirectoryError, match="is not a flaxckpt checkpoint"):
        flaxckpt.save(tmp_path / "file", TREE, overwrite=True)
    for directory in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(errors.DirectoryError, match="cannot create the directory"):
            flaxckpt.CheckpointManager(directory)


def test_a_level_too_high_or_too_deep(tmp_path):
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        for step in (9, 10):
            ckpt.save(step, TREE)
    with pytest.raises(errors.CheckpointNotFoundError, match="a run with the steps 9 to 10. Use"):
        flaxckpt.restore(tmp_path / "run")
    with pytest.raises(errors.CheckpointNotFoundError, match="lies within a checkpoint. Use"):
        flaxckpt.restore(tmp_path / "run/10/state")


@pytest.mark.parametrize("url", ["hdfs://host/x", "s3://", "gs://bucket/a//b", "s3://bucket/../x"])
def test_a_url_of_another_kind_or_an_incomplete_one_is_refused(url):
    with pytest.raises(errors.DirectoryError, match="bucket"):
        flaxckpt.save(url, TREE)


def test_relative_paths_and_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    flaxckpt.save("here", TREE)
    flaxckpt.save("~/there", TREE)
    with flaxckpt.CheckpointManager("run") as ckpt:
        ckpt.save(0, TREE)
        os.chdir("/")
    assert ckpt.steps() == [0]
    assert {p.name for p in tmp_path.iterdir()} == {"here", "there", "run"}


def test_an_unwritable_directory(tmp_path):
    """Root may write anywhere, so a child gives up being root first."""
    code = """
        import os, sys
        import flaxckpt
        flaxckpt.CheckpointManager, flaxckpt.save  # imported while everything may be read
        if os.getuid() == 0:
            os.setuid(65534)
        for call in (
            lambda: flaxckpt.CheckpointManager(sys.argv[1]),
            lambda: flaxckpt.CheckpointManager(sys.argv[1] + "/run"),
            lambda: flaxckpt.save(sys.argv[1] + "/x", {"w": 1}),
        ):
            try:
                call()
            except flaxckpt.errors.DirectoryError as error:
                print(error)
    """
    (tmp_path / "closed").mkdir(mode=0o555)
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.getuid() and parent != parent.parent:
            parent.chmod(parent.stat().st_mode | 0o555)
    status, out, err = run(code, tmp_path / "closed")
    assert status == 0, err
    lines = out.splitlines()
    assert len(lines) == 3
    assert "may not be written by this user" in lines[0]
    assert "cannot create the directory" in lines[1]
    assert "may not be written by this user" in lines[2]
    assert list((tmp_path / "closed").iterdir()) == []


def test_an_existing_checkpoint_is_not_overwritten_unasked(saved):
    with pytest.raises(errors.StepExistsError, match="Pass overwrite=True"):
        flaxckpt.save(saved, {"other": 1})
    assert flaxckpt.restore(saved)["step"] == 7


def test_a_directory_of_others_is_never_overwritten(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis.tex").write_text("years of work")
    with pytest.raises(errors.DirectoryError, match="it was left alone"):
        flaxckpt.save(tmp_path / "home", TREE, overwrite=True)
    assert (tmp_path / "home/thesis.tex").read_text() == "years of work"


# Damaged files


def test_half_of_a_checkpoint(saved):
    (saved / "_CHECKPOINT_METADATA").unlink()
    with pytest.raises(errors.CheckpointNotFoundError, match="half of one, whose save never ended"):
        flaxckpt.restore(saved)


@pytest.mark.parametrize("file", ["_CHECKPOINT_METADATA", "state/_METADATA"])
@pytest.mark.parametrize("content", [b"", b"{}", b"garbage \xff", b"[1]", b"null"])
def test_garbage_metadata(saved, file, content):
    (saved / file).write_bytes(content)
    with pytest.raises(errors.FlaxckptError) as raised:
        flaxckpt.restore(saved)
    assert str(saved) in str(raised.value)


@pytest.mark.parametrize("file", ["_CHECKPOINT_METADATA", "state/_METADATA"])
def test_truncated_metadata(saved, file):
    content = (saved / file).read_bytes()
    for length in range(0, len(content), 97):
        (saved / file).write_bytes(content[:length])
        with pytest.raises(errors.FlaxckptError):
            flaxckpt.restore(saved)


def test_missing_tree_metadata(saved):
    (saved / "state/_METADATA").unlink()
    with pytest.raises(
        errors.CorruptCheckpointError, match="incomplete: .*state/_METADATA is missing"
    ):
        flaxckpt.restore(saved)


@pytest.mark.parametrize("file", ["_CHECKPOINT_METADATA", "state/_METADATA"])
def test_a_newer_format(saved, file):
    def newer(data):
        ours = data["flaxckpt"] if "flaxckpt" in data else data["custom_metadata"]["flaxckpt"]
        ours["format"] = 2

    rewrite(saved / file, newer)
    with pytest.raises(errors.UnsupportedFormatError, match="is of format 2; .* Update flaxckpt"):
        flaxckpt.restore(saved)


def test_metadata_of_two_saves(saved, tmp_path):
    flaxckpt.save(tmp_path / "y", TREE)
    shutil.copy(tmp_path / "y/state/_METADATA", saved / "state/_METADATA")
    with pytest.raises(errors.CorruptCheckpointError, match="of two different saves"):
        flaxckpt.restore(saved)


def test_every_flipped_byte_of_every_data_file_is_found(tmp_path):
    flaxckpt.save(tmp_path / "x", {"w": np.arange(600, dtype=np.float32), "s": np.ones(3)})
    files = [tmp_path / "x/state/manifest.ocdbt", *(tmp_path / "x/state/d").iterdir()]
    for file in files:
        content = file.read_bytes()
        for position in range(0, len(content), 29):
            flipped = bytearray(content)
            flipped[position] ^= 0x10
            file.write_bytes(flipped)
            with pytest.raises(errors.CorruptCheckpointError):
                flaxckpt.restore(tmp_path / "x")
        file.write_bytes(content)
    assert flaxckpt.restore(tmp_path / "x")["w"][-1] == 599


def test_a_missing_data_file(saved):
    shutil.rmtree(saved / "state/d")
    for read in (flaxckpt.restore, flaxckpt.verify):
        with pytest.raises(errors.CorruptCheckpointError, match="24004 bytes, but its files have"):
            read(saved)


def test_a_missing_manifest(saved):
    (saved / "state/manifest.ocdbt").unlink()
    with pytest.raises(
        errors.CorruptCheckpointError, match="the arrays at .* are damaged: NOT_FOUND"
    ):
        flaxckpt.restore(saved)


def test_verify_names_the_leaf_and_strict_raises(saved):
    (data,) = [p for p in (saved / "state/d").iterdir() if p.stat().st_size > 24_000]
    content = bytearray(data.read_bytes())
    content[12_000] ^= 1
    data.write_bytes(content)
    (problem,) = flaxckpt.verify(saved).problems
    assert "the leaf params/kernel is damaged: its checksum is" in problem
    assert f"(chunk params.kernel/c/0/0, in {data}, 24004 bytes at " in problem
    with pytest.raises(errors.CorruptCheckpointError, match="params/kernel"):
        flaxckpt.verify(saved, strict=True)


# Targets


def test_a_wrong_target_lists_every_leaf(saved):
    target = {
        "params": {"kernel": np.zeros((50, 61)), "bais": jnp.zeros(3)},
        "step": 7,
        "opt_state": (),
    }
    with pytest.raises(errors.StructureMismatchError) as raised:
        flaxckpt.restore(saved, target)
    assert str(raised.value) == "\n".join(
        [
            f"the checkpoint at {saved} does not fit the target (3 of 4 leaves)",
            "  missing     params/bais    checkpoint: -               target: float32[3]"
            "      (did you mean params/bias?)",
            "  shape       params/kernel  checkpoint: float64[50,60]  target: float64[50,61]",
            "  unexpected  params/bias    checkpoint: float32[3]      target: -",
            'If that is meant, pass transforms=[flaxckpt.Rename("params/bias", "params/bais")]; '
            'gaps are allowed with missing="init" and unexpected="ignore".',
        ]
    )


@pytest.mark.parametrize(
    ("saved_leaf", "target_leaf", "problem"),
    [
        (jnp.float32(1.5), jnp.int32(0), "dtype"),
        (np.arange(3), np.arange(3.0), "dtype"),
        (1, 1.0, "kind"),
        (1.5, jnp.int32(0), "dtype"),
        (True, 1, "kind"),
        ("1", 1, "kind"),
        (jnp.zeros(3), jnp.zeros((3, 1)), "shape"),
        (jnp.zeros(()), np.zeros(1), "shape"),
        (jax.random.key(0), jax.random.key(0, impl="rbg"), "key impl"),
        (jax.random.PRNGKey(0), jax.random.key(0), "kind"),
        (jnp.zeros(3), None, "empty"),
        (None, jnp.zeros(3), "empty"),
        ({}, jnp.zeros(3), "empty"),
        (2**40, jnp.int32(0), "dtype"),
        (2**70, jnp.int32(0), "dtype"),
        (0.1, jnp.bfloat16(0), "dtype"),
        (1e300, jnp.float32(0), "dtype"),
        (np.random.default_rng(0), np.random.Generator(np.random.MT19937(0)), "kind"),
    ],
)
def test_what_does_not_fit(saved_leaf, target_leaf, problem, tmp_path):
    flaxckpt.save(tmp_path / "x", {"leaf": saved_leaf})
    with pytest.raises(errors.StructureMismatchError) as raised:
        flaxckpt.restore(tmp_path / "x", {"leaf": target_leaf})
    assert [m.problem for m in raised.value.mismatches] == [problem]


@pytest.mark.parametrize(
    ("saved_leaf", "target_leaf"),
    [
        (3, jnp.asarray(0)),
        (jnp.asarray(3), 0),
        (0.5, jnp.bfloat16(0)),
        (jnp.bfloat16(0.5), 0.0),
        (jnp.arange(3), np.zeros(3, np.int32)),
        (np.arange(3, dtype=np.int8), jax.ShapeDtypeStruct((3,), np.int8)),
        (np.float32(2), jnp.float32(0)),
        (1j, jnp.complex64(0)),
        (2**40, np.int64(0)),
    ],
)
def test_the_callers_type_wins_where_nothing_is_lost(saved_leaf, target_leaf, tmp_path):
    flaxckpt.save(tmp_path / "x", saved_leaf)
    restored = flaxckpt.restore(tmp_path / "x", target_leaf)
    wanted = jax.Array if isinstance(target_leaf, jax.ShapeDtypeStruct) else type(target_leaf)
    assert isinstance(restored, wanted)
    assert getattr(restored, "dtype", None) == getattr(target_leaf, "dtype", None)
    assert np.asarray(restored == saved_leaf).all()


def test_a_python_float_becomes_the_float32_that_jax_would_make(tmp_path):
    flaxckpt.save(tmp_path / "x", 0.1)
    assert flaxckpt.restore(tmp_path / "x", jnp.float32(0)) == jnp.asarray(0.1)
    assert flaxckpt.restore(tmp_path / "x", jnp.bfloat16(0), dtype="cast") == jnp.bfloat16(0.1)


@pytest.mark.parametrize(
    "tree",
    [np.zeros((1,) * 64), np.zeros((0, 1 << 50), np.int8), jnp.zeros((0, 7))],
    ids=["64 axes", "wide and empty", "empty"],
)
def test_what_can_be_saved_can_be_restored(tree, tmp_path):
    flaxckpt.save(tmp_path / "x", tree)
    assert flaxckpt.restore(tmp_path / "x", as_numpy=True).shape == tree.shape


def test_what_could_not_be_restored_is_not_saved(tmp_path):
    deep = 1
    for _ in range(600):
        deep = [deep]
    with pytest.raises(errors.UnsupportedLeafError, match="too deep"):
        flaxckpt.save(tmp_path / "x", deep)
    assert list(tmp_path.iterdir()) == []


def test_a_sharding_that_does_not_fit_names_the_leaf(saved):
    mesh = jax.make_mesh((8,), ("x",))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    target = flaxckpt.restore(saved)
    target["params"]["bias"] = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=where)
    with pytest.raises(errors.ShardingError, match="params/bias cannot be restored onto"):
        flaxckpt.restore(saved, target)


def test_eval_shape_under_an_explicit_mesh_is_a_target(tmp_path):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    flaxckpt.save(tmp_path / "x", {"w": jnp.arange(8.0)})
    with jax.set_mesh(mesh):
        spec = jax.sharding.PartitionSpec("x")
        target = jax.eval_shape(lambda: {"w": jax.numpy.zeros(8, out_sharding=spec)})
        restored = flaxckpt.restore(tmp_path / "x", target)
    assert restored["w"].sharding == jax.sharding.NamedSharding(mesh, spec)


@pytest.mark.parametrize("file", ["_CHECKPOINT_METADATA", "state/_METADATA"])
@pytest.mark.parametrize("what", ["link", "device", "fifo", "directory"])
def test_metadata_that_are_no_file(saved, file, what, tmp_path):
    path = saved / file
    path.rename(tmp_path / "moved")
    if what == "directory":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "moved" if what == "link" else "/dev/zero")
    for read in (flaxckpt.restore, flaxckpt.verify, flaxckpt.inspect):
        with pytest.raises(errors.CorruptCheckpointError, match="Restore another step"):
            read(saved)


def test_dtypes_change_only_when_asked(tmp_path):
    flaxckpt.save(tmp_path / "x", {"w": jnp.arange(3, dtype=jnp.bfloat16)})
    wider = {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}
    other = {"w": jax.ShapeDtypeStruct((3,), jnp.int8)}
    assert flaxckpt.restore(tmp_path / "x", wider, dtype="widen")["w"].dtype == jnp.float32
    with pytest.raises(errors.StructureMismatchError, match='dtype="cast"'):
        flaxckpt.restore(tmp_path / "x", other, dtype="widen")
    assert flaxckpt.restore(tmp_path / "x", other, dtype="cast")["w"].dtype == jnp.int8


def test_64_bits_where_jax_has_32(tmp_path):
    code = """
        import sys, jax; jax.config.update("jax_enable_x64", True)
        import jax.numpy as jnp, flaxckpt
        flaxckpt.save(sys.argv[1], {"n": jnp.arange(3) + 2**40})
    """
    status, _, err = run(code, tmp_path / "x")
    assert status == 0, err
    with pytest.raises(errors.StructureMismatchError, match="jax_enable_x64 is off") as raised:
        flaxckpt.restore(tmp_path / "x")
    assert "checkpoint: int64[3]  target: int32[3]" in str(raised.value)
    assert flaxckpt.restore(tmp_path / "x", as_numpy=True)["n"].tolist()[0] == 2**40
    assert flaxckpt.restore(tmp_path / "x", dtype="cast")["n"].dtype == jnp.int32
    target = {"n": jax.ShapeDtypeStruct((3,), np.int64)}
    with pytest.raises(errors.StructureMismatchError):
        flaxckpt.restore(tmp_path / "x", target)
    assert flaxckpt.restore(tmp_path / "x", {"n": np.zeros(3, int)})["n"].tolist()[0] == 2**40


# Leaves


@pytest.mark.parametrize(
    ("leaf", "described"),
    [
        (threading.Lock(), "_thread.lock"),
        (lambda: 0, "builtins.function"),
        (np.array([{}], dtype=object), "numpy.ndarray of dtype object"),
        (object(), "builtins.object"),
        (np.zeros(2, [("a", "i4")]), "numpy.ndarray of dtype"),
        ({1, 2}, "builtins.set"),
    ],
)
def test_a_leaf_nobody_can_hold_is_an_error_before_anything_is_written(leaf, described, tmp_path):
    with pytest.raises(errors.UnsupportedLeafError) as raised:
        flaxckpt.save(tmp_path / "x", {"ok": jnp.ones(3), "bad": [leaf]})
    assert f"the leaf bad/0 is a {described}" in str(raised.value)
    assert "flaxckpt.register_leaf_handler(" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_deleted_or_abstract_array_says_so(tmp_path):
    deleted = jnp.ones(3)
    deleted.delete()
    with pytest.raises(errors.UnsupportedLeafError, match="the leaf w: its buffer was deleted"):
        flaxckpt.save(tmp_path / "x", {"w": deleted})
    with pytest.raises(errors.UnsupportedLeafError, match="the leaf w: it is abstract"):
        flaxckpt.save(tmp_path / "x", {"w": jax.ShapeDtypeStruct((3,), jnp.float32)})
    with pytest.raises(errors.UnsupportedLeafError, match="the leaf w: it is abstract"):
        jax.jit(lambda w: flaxckpt.save(tmp_path / "x", {"w": w}))(jnp.ones(3))


@pytest.mark.parametrize("metadata", [{"a": (1,)}, {"a": object()}, {"flaxckpt": 1}, {"a": np.nan}])
def test_metadata_must_be_json(metadata, tmp_path):
    with pytest.raises(ValueError, match="metadata"):
        flaxckpt.save(tmp_path / "x", TREE, metadata=metadata)


@pytest.mark.parametrize("field", ["chunk_bytes", "max_host_bytes", "timeout_secs"])
def test_options_are_positive(field):
    with pytest.raises(ValueError, match=field):
        flaxckpt.Options(**{field: 0})
