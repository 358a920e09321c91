"""A checkpoint is data: whatever it holds, only `FlaxckptError`s come out, soon and cheaply.

The metadata are mutated and then sealed anew, so that no checksum stands in the way.
"""

import copy
import json
import resource
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flaxckpt
from flaxckpt.errors import CorruptCheckpointError, FlaxckptError
from flaxckpt.metadata import sealed_json
from tests import zoo
from tests.processes import run

pytestmark = pytest.mark.slow

TREE = {
    "state": zoo.BUILD["linen_adamw"](),
    "module": nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0))),
    "boxed": zoo.BUILD["logically_partitioned"](),
    "leaves": zoo.BUILD["python_leaves"](),
    "keys": jax.random.split(jax.random.key(0), 2),
    "u4": jnp.ones(3, jnp.uint4),
    "generator": np.random.default_rng(0),
    "odd": zoo.BUILD["ordered_defaultdict"](),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("hostile") / "x"
    flaxckpt.save(path, TREE)
    return path


@pytest.fixture(scope="module")
def unsealed(saved):
    """`_METADATA` without its checksum."""
    data = json.loads((saved / "state/_METADATA").read_bytes())
    del data["flaxckpt"]["crc32c"]
    return data


@pytest.fixture
def metadata(saved, unsealed):
    """Changes members of ours in `_METADATA`, sealed anew; the file is put back afterwards."""
    file = saved / "state/_METADATA"
    original = file.read_bytes()

    def write(change):
        changed = copy.deepcopy(unsealed)
        change(changed["flaxckpt"])
        file.write_bytes(sealed_json.seal(changed))
        return saved

    yield write
    file.write_bytes(original)


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([0, -1, 2**31, 2**62, 2**63 - 1, 1.5, 1e308])
    | st.sampled_from(["", "..", "/etc/passwd", "os.system", "numpy.ndarray", "O", "<U999999999"])
    | st.sampled_from(["float32", "jax", "dict", "tuple", "box", "complex", "generator", "0x"])
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


def places(data, path=()):
    """Every place in a JSON value."""
    yield path
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from places(value, (*path, key))


def assert_only_our_errors(path):
    """Everything that reads a checkpoint; each may only raise a `FlaxckptError`."""
    start = time.perf_counter()
    for read in (flaxckpt.inspect, flaxckpt.restore, flaxckpt.verify):
        try:
            read(path)
        except FlaxckptError:
            continue
    assert time.perf_counter() - start < 3.0


@given(data=st.data())
@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_in_the_metadata_may_be_replaced_by_anything(unsealed, metadata, data):
    place = data.draw(st.sampled_from([p for p in places(unsealed["flaxckpt"]) if p]))
    junk, delete = data.draw(JUNK), data.draw(st.booleans())

    def change(target):
        for key in place[:-1]:
            target = target[key]
        if delete and isinstance(target, dict):
            del target[place[-1]]
        else:
            target[place[-1]] = junk

    assert_only_our_errors(metadata(change))


@pytest.mark.parametrize("file", ["_CHECKPOINT_METADATA", "state/_METADATA", "state/_sharding",
                                  "state/_strings.json", "state/manifest.ocdbt"])  # fmt: skip
@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_of_a_small_file_may_be_replaced_by_any_others(saved, file, data):
    original = (saved / file).read_bytes()
    start = data.draw(st.integers(0, len(original)))
    end = data.draw(st.integers(start, min(len(original), start + 50)))
    try:
        (saved / file).write_bytes(
            original[:start] + data.draw(st.binary(max_size=50)) + original[end:]
        )
        assert_only_our_errors(saved)
    finally:
        (saved / file).write_bytes(original)


def leaf(ours, name):
    return next(leaf for leaf in ours["leaves"] if leaf["name"] == name)


CLAIMS = {
    "a huge array": {"shape": [1 << 40], "chunks": [1 << 40]},
    "an overflowing product": {"shape": [1 << 62, 1 << 62], "chunks": [1, 1]},
    "very many chunks": {"shape": [1 << 40], "chunks": [1]},
    "a huge empty array": {"shape": [0, 1 << 62], "chunks": [1, 1]},
    "too many axes": {"shape": [1] * 100, "chunks": [1] * 100},
    "wide strings": {"dtype": "<U999999999", "kind": "numpy"},
    "objects": {"dtype": "O", "kind": "numpy"},
    "a negative axis": {"shape": [-4]},
    "chunks of nothing": {"chunks": [0]},
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_what_a_leaf_claims_is_not_believed(claim, metadata):
    path = metadata(lambda ours: leaf(ours, "u4").update(CLAIMS[claim]))
    for read in (flaxckpt.restore, flaxckpt.verify, flaxckpt.inspect):
        with pytest.raises(CorruptCheckpointError):
            read(path)


def test_deep_and_long_structures_are_refused(metadata):
    deep = [{"kind": "list", "size": 1}] * 100_000
    for nodes in (deep, [{"kind": "list", "size": 10**12}], [], [None] * 5):
        with pytest.raises(CorruptCheckpointError):
            flaxckpt.restore(metadata(lambda ours, nodes=nodes: ours.update(structure=nodes)))


def test_a_class_that_is_named_is_neither_imported_nor_called(saved, tmp_path, metadata):
    def change(ours):
        for node in ours["structure"]:
            if node and node.get("class"):
                node["class"] = "antigravity.Popen"
        ours["structure"][0] = {"kind": "object", "class": "os.system", "keys": [
            ["dict", key] for key in ours["structure"][0]["keys"]]}  # fmt: skip

    path = metadata(change)
    code = """
        import sys, flaxckpt
        tree = flaxckpt.restore(sys.argv[1])
        assert "antigravity" not in sys.modules
        print(type(tree).__name__, tree.class_name)
    """
    status, out, err = run(code, path)
    assert status == 0, err
    assert out == "SavedNode os.system\n"


@pytest.mark.parametrize("what", ["a file", "a directory"])
def test_links_out_of_the_checkpoint_are_refused(what, tmp_path):
    flaxckpt.save(tmp_path / "x", {"w": np.arange(1000)})
    data = tmp_path / "x/state/d"
    if what == "a file":
        (data,) = data.iterdir()
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptCheckpointError, match="is a symbolic link"):
        flaxckpt.restore(tmp_path / "x")


def test_a_damaged_checkpoint_costs_less_than_a_gigabyte(metadata):
    metadata(lambda ours: leaf(ours, "u4").update(CLAIMS["a huge array"]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert_only_our_errors(
        metadata(lambda ours: leaf(ours, "u4").update(shape=[1 << 33], chunks=[1 << 33]))
    )
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20
