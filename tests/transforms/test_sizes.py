import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import flaxckpt
from flaxckpt import Apply, Cast, Drop, Fallback, Rename, Resize, Stack
from flaxckpt.errors import RuleError, StructureMismatchError
from tests.reads import Reads
from tests.transforms import refused, state_of, values_of

TREE = {
    "embedding": np.arange(12.0).reshape(4, 3),
    "jax": jnp.arange(6.0).reshape(2, 3),
    "text": "words",
    "key": jax.random.key(0),
    "step": 7,
}
# 200,000 bytes in chunks of 4,000.
LARGE = np.arange(50_000, dtype=np.float32).reshape(500, 100)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("sizes") / "x"
    flaxckpt.save(path, TREE)
    return path


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    path = tmp_path_factory.mktemp("large") / "x"
    flaxckpt.save(path, {"w": LARGE}, options=flaxckpt.Options(chunk_bytes=4000))
    return path


def resized(array, shape, **how):
    """`array` after a `Resize` to `shape`."""
    state = Resize("w", **how)(state_of({"w": array}), {"w": np.zeros(shape)})
    return state["w"].read()


def expected(array, shape, pad):
    """What numpy makes of it."""
    cut = array[tuple(map(slice, shape))]
    widths = [(0, size - there) for size, there in zip(shape, cut.shape, strict=True)]
    return np.pad(cut, widths, constant_values=pad) if shape else cut


# What comes out


def test_rows_are_added(saved):
    target = {**TREE, "embedding": np.ones((6, 3))}
    restored = flaxckpt.restore(saved, target, transforms=[Resize("embedding", pad=-1)])
    assert restored["embedding"].tolist() == [*TREE["embedding"].tolist(), [-1] * 3, [-1] * 3]
    assert restored["embedding"].flags.writeable
    assert restored["step"] == 7


def test_rows_are_cut(saved):
    target = {**TREE, "embedding": np.ones((2, 3))}
    restored = flaxckpt.restore(saved, target, transforms=[Resize("embedding", truncate=True)])
    assert restored["embedding"].tolist() == TREE["embedding"][:2].tolist()


def test_one_axis_grows_and_another_is_cut(saved):
    target = {**TREE, "embedding": np.ones((5, 2))}
    rule = Resize("embedding", pad=9, truncate=True)
    restored = flaxckpt.restore(saved, target, transforms=[rule])
    assert restored["embedding"].tolist() == [*TREE["embedding"][:, :2].tolist(), [9, 9]]


def test_what_has_the_shape_already_stays_as_it_is(saved):
    rule = Resize("embedding|jax")
    restored = flaxckpt.restore(saved, TREE, transforms=[rule])
    assert (restored["embedding"] == TREE["embedding"]).all()
    weak = state_of({"w": jnp.asarray(1.0)})
    assert Resize("w")(weak, {"w": jnp.asarray(2.0)})["w"].spec == weak["w"].spec


def test_a_jax_array_stays_one_and_keeps_its_dtype(saved):
    target = {**TREE, "jax": jax.ShapeDtypeStruct((3, 4), jnp.float32)}
    restored = flaxckpt.restore(saved, target, transforms=[Resize("jax", pad=0)])["jax"]
    assert isinstance(restored, jax.Array)
    assert restored.tolist() == [[0, 1, 2, 0], [3, 4, 5, 0], [0, 0, 0, 0]]


def test_the_dtype_is_that_of_the_checkpoint(saved):
    rule = Resize("jax", pad=0)
    target = {**TREE, "jax": jax.ShapeDtypeStruct((3, 3), jnp.bfloat16)}
    with pytest.raises(StructureMismatchError) as raised:
        flaxckpt.restore(saved, target, transforms=[rule])
    (row,) = raised.value.mismatches
    assert (row.problem, row.checkpoint, row.target) == ("dtype", "float32[3,3]", "bfloat16[3,3]")
    restored = flaxckpt.restore(saved, target, transforms=[rule], dtype="cast")["jax"]
    assert restored.dtype == jnp.bfloat16
    assert restored[2].tolist() == [0, 0, 0]


DTYPES = {"f4": 0.5, "bfloat16": -1.5, "int8": -7, "uint8": 200, "bool": True, "c8": 2, "int4": -8}
DTYPES |= {"float8_e4m3fn": 1.5, ">f4": 0.5, "float16": float("inf")}


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_padded_with_its_own(name):
    array = np.ones(2, jnp.dtype(name))
    result = resized(array, (4,), pad=DTYPES[name])
    assert result.dtype == array.dtype
    assert result.tolist() == [*array.tolist(), *np.full(2, DTYPES[name], array.dtype).tolist()]


@pytest.mark.parametrize("array", [np.array(["a", "b", "c"]), np.array([1, 2, 3], "M8[s]")])
def test_what_is_only_cut_may_be_of_any_dtype(array):
    assert resized(array, (2,), truncate=True).tolist() == array[:2].tolist()


def test_nan_pads_floats():
    assert np.isnan(resized(np.ones(1), (2,), pad=float("nan"))).tolist() == [False, True]


@pytest.mark.parametrize(
    ("old", "new"), [((0, 2), (3, 2)), ((3, 2), (0, 2)), ((0,), (0,)), ((2, 0), (0, 3)), ((), ())]
)
def test_axes_of_no_elements(old, new, tmp_path):
    flaxckpt.save(tmp_path / "x", {"w": np.ones(old)})
    target = {"w": np.zeros(new)}
    rule = Resize("w", pad=5, truncate=True)
    restored = flaxckpt.restore(tmp_path / "x", target, transforms=[rule])["w"]
    np.testing.assert_array_equal(restored, expected(np.ones(old), new, 5))


@given(
    hnp.arrays(
        st.sampled_from(["f4", "i1", "bool"]), hnp.array_shapes(max_dims=3, min_side=0, max_side=5)
    ),
    st.data(),
)
@settings(max_examples=120)
def test_it_is_what_numpy_pads_and_slices(array, data):
    shape = data.draw(st.tuples(*[st.integers(0, 6)] * array.ndim))
    grows = any(n > o for n, o in zip(shape, array.shape, strict=True))
    shrinks = any(n < o for n, o in zip(shape, array.shape, strict=True))
    rule = Resize("w", pad=1 if grows else None, truncate=shrinks)
    leaf = rule(state_of({"w": array}), {"w": np.zeros(shape)})["w"]
    wanted = expected(array, shape, 1)
    assert (leaf.shape, leaf.dtype, leaf.spec.kind) == (shape, array.dtype, "numpy")
    index = data.draw(hnp.basic_indices(shape, allow_newaxis=False))
    for part in (..., index):
        np.testing.assert_array_equal(leaf.read(part), wanted[part])


# Which leaves


def test_only_what_matches_and_what_the_target_has():
    state = state_of({"a": np.ones(2), "b": np.ones(2), "c": np.ones(2), "d": "text"})
    target = {"a": np.zeros(3), "b": np.zeros(3)}
    assert values_of(Resize("[acd]", pad=0)(state, target)) == {
        "a": [1, 1, 0],
        "b": [1, 1],
        "c": [1, 1],
        "d": "text",
    }


def test_without_a_target_nothing_changes(saved):
    restored = flaxckpt.restore(saved, transforms=[Resize("embedding", pad=0, truncate=True)])
    assert restored["embedding"].shape == (4, 3)


def test_a_rule_that_matches_nothing():
    with pytest.raises(RuleError, match="'no' matches no key path as a whole"):
        Resize("no", pad=0)(state_of({"a": 1}), {"a": 1})
    rule = Resize("no", pad=0, optional=True)
    assert values_of(rule(state_of({"a": 1}), {"a": 1})) == {"a": 1}


def test_with_other_rules(saved):
    rules = [
        Rename("embedding", "new/embedding"),
        Apply("new/embedding", lambda path, x: x + 1),
        Resize("new/.*", pad=0),
        Cast("new/.*", "float32"),
        Drop("jax|text|key|step"),
    ]
    target = {"new": {"embedding": np.ones((5, 3), np.float32)}}
    restored = flaxckpt.restore(saved, target, transforms=rules)["new"]["embedding"]
    assert restored.tolist() == [*(TREE["embedding"] + 1).tolist(), [0, 0, 0]]


def test_layers_of_another_number_are_stacked():
    state = state_of({f"layer_{i}": np.full(2, i) for i in range(3)})
    state = Stack(r"layer_(?P<index>\d+)", "w")(state, {})
    state = Resize("w", pad=-1, truncate=True)(state, {"w": np.zeros((4, 1))})
    assert values_of(state) == {"w": [[0], [1], [2], [-1]]}


def test_what_is_computed_and_not_wanted_is_not_computed():
    state = Apply("x", refused)(state_of({"x": 1}), {})
    Resize("x", pad=0)(state, {})


def test_what_is_initialised_has_its_size_already(tmp_path):
    """As `Cast` does, it leaves the value of the target alone, which is not there yet."""
    flaxckpt.save(tmp_path / "old", {"body": np.ones((2, 3), np.float32)})

    def init():
        return {"body": jnp.zeros((4, 3)), "head": jnp.full(3, 5.0)}

    rules = [Fallback("head", "target"), Resize(".*", pad=0)]
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        restored = ckpt.restore_or_init(init, init_from=tmp_path / "old", transforms=rules)
    assert restored["head"].tolist() == [5, 5, 5]
    assert restored["body"].sum() == 6
    assert ckpt.report.initialised == ("head",)


# What is refused

REFUSED = {
    "to grow": (
        {"truncate": True},
        (5, 2),
        "Resize(pattern='w', pad=None, truncate=True, optional=False): w would have to grow, and "
        "no pad= is given.\n  checkpoint: (4, 3)\n  target:     (5, 2)",
    ),
    "to be cut": (
        {"pad": 0},
        (5, 2),
        "Resize(pattern='w', pad=0, truncate=False, optional=False): w would have to be cut, and "
        "truncate=True is not given.\n  checkpoint: (4, 3)\n  target:     (5, 2)",
    ),
    "both": (
        {},
        (5, 2),
        "Resize(pattern='w', pad=None, truncate=False, optional=False): w would have to grow, and "
        "no pad= is given.\n  checkpoint: (4, 3)\n  target:     (5, 2)",
    ),
    "more axes": (
        {"pad": 0, "truncate": True},
        (4, 3, 1),
        "Resize(pattern='w', pad=0, truncate=True, optional=False): w has another number of axes."
        "\n  checkpoint: (4, 3)\n  target:     (4, 3, 1)",
    ),
    "fewer axes": (
        {"pad": 0, "truncate": True},
        (4,),
        "Resize(pattern='w', pad=0, truncate=True, optional=False): w has another number of axes."
        "\n  checkpoint: (4, 3)\n  target:     (4,)",
    ),
    "no axes": (
        {"pad": 0, "truncate": True},
        (),
        "Resize(pattern='w', pad=0, truncate=True, optional=False): w has another number of axes."
        "\n  checkpoint: (4, 3)\n  target:     ()",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_allowed_is_refused(name):
    how, shape, message = REFUSED[name]
    with pytest.raises(RuleError) as raised:
        resized(np.ones((4, 3)), shape, **how)
    assert str(raised.value) == message


@pytest.mark.parametrize(("name", "spec"), [("text", "str"), ("key", "key<threefry2x32>[]")])
def test_what_has_no_sizes_is_refused(name, spec, saved):
    with pytest.raises(RuleError) as raised:
        flaxckpt.restore(saved, TREE, transforms=[Resize(name, pad=0)])
    rule = f"Resize(pattern={name!r}, pad=0, truncate=False, optional=False)"
    assert str(raised.value) == (
        f"{rule} cannot be used for {name}, which is {spec}. Let its pattern match arrays only."
    )


@pytest.mark.parametrize(
    ("dtype", "pad"), [("int8", 300), ("uint8", -1), ("int32", 0.5), ("int32", float("nan"))]
)
def test_a_pad_that_the_dtype_cannot_hold_is_refused(dtype, pad):
    """Not rounded, and not only when it is read."""
    state = state_of({"w": np.ones(2, dtype)})
    with pytest.raises(RuleError, match=re.escape(f"pad={pad!r}")):
        Resize("w", pad=pad)(state, {"w": np.zeros(3, dtype)})


# What is read


def test_only_what_is_needed_is_read(large, monkeypatch):
    leaf = flaxckpt.lazy(large)["w"]
    rule = Resize("w", pad=0, truncate=True)
    (leaf,) = rule({"w": leaf}, {"w": np.zeros((1000, 50))}).values()
    reads = Reads(monkeypatch)
    assert (leaf.read(np.s_[:10]) == LARGE[:10, :50]).all()
    assert 4_000 <= reads.nbytes < 10_000
    assert reads.of(lambda: leaf.read(np.s_[500:])) == 0
    assert reads.of(lambda: leaf.read(np.s_[499:600])) < 5_000


def sharded(rows, columns):
    """A target of that shape, with its rows over eight devices."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    return {"w": jax.ShapeDtypeStruct((rows, columns), jnp.float32, sharding=where)}


@pytest.mark.parametrize(
    ("rows", "columns", "read"), [(1000, 120, 200_000), (80, 100, 32_000), (504, 100, 200_000)]
)
def test_devices_read_their_own_parts_and_nothing_twice(rows, columns, read, large, monkeypatch):
    target = sharded(rows, columns)
    reads = Reads(monkeypatch)
    rule = Resize("w", pad=-1, truncate=True)
    restored = flaxckpt.restore(large, target, transforms=[rule])["w"]
    assert restored.sharding == target["w"].sharding
    np.testing.assert_array_equal(restored, expected(LARGE, (rows, columns), -1))
    assert reads.nbytes < 1.1 * read + 8 * 4_500  # a chunk may lie on two devices
