"""Damage to any file of a checkpoint is noticed, and nothing wrong is ever restored."""

import random
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import flaxckpt
from flaxckpt import errors
from flaxckpt.testing import differences

OPTIONS = flaxckpt.Options(chunk_bytes=2048, max_host_bytes=32768)
# The kinds of files; `state/d/*` are those whose names are random.
KINDS = (
    "_CHECKPOINT_METADATA",
    "state/_METADATA",
    "state/manifest.ocdbt",
    "state/d/*",
    "state/_sharding",
    "state/array_metadatas/process_0",
    "state/_strings.json",
)
# Of each kind, so many bits are flipped, and so many files cut: fewer of what is for Orbax only,
# which no restore reads.
FLIPS = {kind: (100, 20) if i > 3 else (500, 100) for i, kind in enumerate(KINDS)}
DTYPES = (
    np.bool_,
    np.int8,
    np.uint32,
    np.float16,
    np.float32,
    np.complex64,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    ml_dtypes.int4,
    ml_dtypes.uint4,
)


def numbers(shape, dtype=np.float32, seed=0):
    """An array of `dtype` with every kind of bits in it."""
    values = np.random.default_rng(seed).integers(0, 8, shape)
    return values.astype(dtype)


def inlined():
    """Many small leaves: all arrays lie in the nodes of the B-tree."""
    return {
        "arrays": {np.dtype(d).name: jnp.asarray(numbers((3, 5), d)) for d in DTYPES},
        "scalars": [7, 2**70, True, 0.5, 1 - 2j, np.float32(3), "text", b"bytes", None],
        "strings": [np.array(["a", "bcd"]), np.array([b"a", b"bcd"])],
        "keys": [jax.random.key(1), jax.random.split(jax.random.key(2, impl="rbg"), 3)],
        "generator": np.random.default_rng(3),
        "empty": {"array": jnp.zeros((0, 3)), "numpy": np.zeros((2, 0), np.int8), "dict": {}},
    }


def data_files():
    """A few large leaves, of one chunk each, in data files."""
    leaves = {np.dtype(d).name: jnp.asarray(numbers((64, 33), d)) for d in DTYPES}
    return leaves | {"int64": numbers(300, np.int64), "complex128": numbers(200, np.complex128)}


def chunked():
    """Several chunks for each leaf, written in several transactions."""
    leaves = {np.dtype(d).name: jnp.asarray(numbers((70, 90), d)) for d in DTYPES[3:9]}
    return leaves | {"float64": numbers((33, 50), np.float64), "text": "text"}


def sharded():
    """Arrays over eight devices, a chunk or more for each."""
    mesh = jax.make_mesh((4, 2), ("x", "y"))

    def put(array, *spec):
        return jax.device_put(array, NamedSharding(mesh, P(*spec)))

    return {
        "rows": put(numbers((64, 40)), "x"),
        "both": put(numbers((64, 64), ml_dtypes.bfloat16), "x", "y"),
        "whole": put(numbers(9, np.int32)),
        "keys": put(jax.random.split(jax.random.key(0), 8), "x"),
    }


LAYOUTS = {
    "inlined": (inlined, flaxckpt.Options()),
    "data files": (data_files, flaxckpt.Options()),
    "chunked": (chunked, OPTIONS),
    "sharded": (sharded, OPTIONS),
}


class Saved(NamedTuple):
    """A checkpoint, and what was saved."""

    path: Path
    tree: object

    def files(self, kind):
        """The files of one kind."""
        return sorted(file for file in self.path.glob(kind) if file.is_file())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of each layout."""
    if jax.device_count() < 8:
        pytest.skip("eight devices are needed: XLA_FLAGS is set by tests/conftest.py")
    made = {}
    for name, (build, options) in LAYOUTS.items():
        made[name] = Saved(tmp_path_factory.mktemp("flips") / "x", build())
        flaxckpt.save(made[name].path, made[name].tree, metadata={"m": 1}, options=options)
    return made


def damages(checkpoints, kind, rng):
    """Damaged contents for files of `kind`: `(checkpoint, file, what was done, bytes)`."""
    files = [(saved, file) for saved in checkpoints for file in saved.files(kind)]
    flips, truncations = FLIPS[kind]
    for n in range(flips):
        # Every file has its turn, however small it is.
        saved, file = files[n % len(files)]
        data = file.read_bytes()
        position, bit = rng.randrange(len(data)), rng.randrange(8)
        flipped = bytearray(data)
        flipped[position] ^= 1 << bit
        yield saved, file, f"bit {bit} of byte {position} flipped", bytes(flipped)
    for n in range(truncations):
        saved, file = files[n % len(files)]
        data = file.read_bytes()
        size = rng.randrange(len(data))
        yield saved, file, f"cut to {size} of {len(data)} bytes", data[:size]


def is_noticed(saved):
    """Whether `verify` finds the damage."""
    try:
        return not flaxckpt.verify(saved.path)
    except errors.FlaxckptError:
        return True


def is_safe(saved, target):
    """`error` or `right`, or what is wrong with what was restored."""
    try:
        restored = flaxckpt.restore(saved.path, target)
    except errors.FlaxckptError:
        return "error"
    return "; ".join(differences(saved.tree, restored)) or "right"


def test_each_kind_of_file_is_there_and_no_other(saved):
    for checkpoint in saved.values():
        found = {file for file in checkpoint.path.rglob("*") if file.is_file()}
        assert found == {file for kind in KINDS for file in checkpoint.files(kind)}
    for kind in KINDS:
        assert any(checkpoint.files(kind) for checkpoint in saved.values()), kind
    assert len(saved["chunked"].files("state/d/*")) > 4


@pytest.mark.parametrize("name", LAYOUTS)
def test_undamaged_all_is_well(name, saved):
    assert not is_noticed(saved[name])
    assert is_safe(saved[name], saved[name].tree) == is_safe(saved[name], None) == "right"


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_noticed_and_never_restored(kind, saved, capsys):
    rng = random.Random(kind)
    checkpoints = [checkpoint for checkpoint in saved.values() if checkpoint.files(kind)]
    outcomes = {"error": 0, "right": 0}
    unnoticed, wrong, count = [], [], 0
    for checkpoint, file, what, data in damages(checkpoints, kind, rng):
        whole = file.read_bytes()
        file.write_bytes(data)
        where = f"{file.relative_to(checkpoint.path.parent.parent)}: {what}"
        try:
            count += 1
            if not is_noticed(checkpoint):
                unnoticed.append(where)
            outcome = is_safe(checkpoint, checkpoint.tree if count % 2 else None)
            if outcome in outcomes:
                outcomes[outcome] += 1
            else:
                wrong.append(f"{where}: {outcome}")
        except Exception as error:
            error.add_note(where)
            raise
        finally:
            file.write_bytes(whole)
    with capsys.disabled():
        print(
            f"\n{kind}: {count} bits flipped or files cut, {count - len(unnoticed)} noticed by "
            f"verify; restored: {outcomes['error']} errors, {outcomes['right']} right"
        )
    assert wrong == []
    assert unnoticed == []
    assert count == sum(FLIPS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_file_is_noticed_and_never_restored(kind, saved):
    for checkpoint in saved.values():
        for file in checkpoint.files(kind):
            aside = file.rename(checkpoint.path.parent / "aside")
            try:
                assert is_noticed(checkpoint), file
                assert is_safe(checkpoint, checkpoint.tree) in ("error", "right")
            finally:
                aside.rename(file)


@pytest.mark.parametrize("name", ["extra", "state/extra", "state/d/0", "state/e/extra"])
def test_a_file_too_many_is_noticed(name, saved):
    checkpoint = saved["inlined"]
    file = checkpoint.path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"extra")
    try:
        assert is_noticed(checkpoint)
        assert is_safe(checkpoint, None) in ("error", "right")
    finally:
        file.unlink()
        if name == "state/e/extra":
            file.parent.rmdir()
