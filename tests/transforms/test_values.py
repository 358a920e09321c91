import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import flaxckpt
from flaxckpt import Cast, Drop, Fallback, Rename
from flaxckpt.errors import RuleError, StructureMismatchError
from tests.reads import Reads
from tests.transforms import state_of, values_of

BODY = {"body": {"kernel": np.arange(6.0, dtype=np.float32).reshape(2, 3)}, "step": 7}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("values") / "x"
    flaxckpt.save(path, BODY)
    return path


# Fallback


def test_a_value_where_the_checkpoint_has_none(saved):
    head = {"bias": np.ones(3, np.float32), "kernel": jnp.ones((3, 2), jnp.bfloat16), "n": 5}
    target = {**BODY, "head": head}
    restored = flaxckpt.restore(saved, target, transforms=[Fallback("head/[bk].*", 0.5),
                                                           Fallback("head/n", 3)])  # fmt: skip
    assert restored["head"]["bias"].tolist() == [0.5] * 3
    assert restored["head"]["bias"].dtype == np.float32
    assert restored["head"]["kernel"].dtype == jnp.bfloat16
    assert (restored["head"]["kernel"] == 0.5).all()
    assert restored["head"]["n"] == 3
    assert (restored["body"]["kernel"] == BODY["body"]["kernel"]).all()


def test_what_the_checkpoint_has_is_kept(saved):
    target = {"body": {"kernel": np.ones((2, 3), np.float32)}, "step": 0}
    restored = flaxckpt.restore(saved, target, transforms=[Fallback(".*", 0)])
    assert restored["step"] == 7
    assert (restored["body"]["kernel"] == BODY["body"]["kernel"]).all()


def test_an_array_for_all_and_each_has_its_own(saved):
    value = np.zeros(3)
    target = {**BODY, "a": np.ones(3), "b": np.ones(3)}
    restored = flaxckpt.restore(saved, target, transforms=[Fallback("[ab]", value)])
    restored["a"][0] = 5
    assert restored["b"][0] == value[0] == 0


def test_a_value_must_fit_the_target(saved):
    target = {**BODY, "a": np.ones(3)}
    with pytest.raises(StructureMismatchError) as raised:
        flaxckpt.restore(saved, target, transforms=[Fallback("a", np.zeros(4))])
    (row,) = raised.value.mismatches
    assert (row.problem, row.name, row.checkpoint) == ("shape", "a", "float64[4]")


def test_a_value_that_the_dtype_cannot_hold_is_a_rule_error(saved):
    target = {**BODY, "a": np.ones(3, np.int8)}
    with pytest.raises(RuleError):
        flaxckpt.restore(saved, target, transforms=[Fallback("a", 300)])


def test_the_value_that_the_target_has(saved):
    head = {"kernel": jnp.full(3, 2.0), "name": "new", "key": jax.random.key(3)}
    target = {**BODY, "head": head}
    rule = Fallback("head/.*", "target")
    restored = flaxckpt.restore(saved, target, transforms=[rule])
    assert restored["head"]["kernel"].tolist() == [2] * 3
    assert restored["head"]["name"] == "new"
    assert (jax.random.key_data(restored["head"]["key"]) == jax.random.key_data(head["key"])).all()
    assert restored["step"] == 7


def test_an_abstract_target_has_no_value(saved):
    target = {**BODY, "a": jax.ShapeDtypeStruct((3,), jnp.float32), "b": jnp.ones(2)}
    with pytest.raises(RuleError) as raised:
        flaxckpt.restore(saved, target, transforms=[Fallback("[ab]", "target")])
    assert str(raised.value) == (
        "the checkpoint has no value for a, and the target is abstract there. Give a concrete "
        "target, or use CheckpointManager.restore_or_init."
    )
    restored = flaxckpt.restore(saved, target, transforms=[Fallback("[ab]", 1)])
    assert restored["a"].tolist() == [1] * 3


def test_the_pattern_is_about_the_target(saved):
    with pytest.raises(RuleError, match="'head' matches no key path as a whole"):
        flaxckpt.restore(saved, BODY, transforms=[Fallback("head", 0)])
    assert flaxckpt.restore(saved, BODY, transforms=[Fallback("head", 0, optional=True)])["step"]
    with pytest.raises(RuleError, match="there are no leaves"):
        flaxckpt.restore(saved, transforms=[Fallback("step", 0)])


def test_a_fallback_after_a_drop(saved):
    rules = [Drop("step"), Fallback("step", 1)]
    assert flaxckpt.restore(saved, BODY, transforms=rules)["step"] == 1
    assert flaxckpt.restore(saved, BODY, transforms=rules[::-1][:1])["step"] == 7
    with pytest.raises(StructureMismatchError):
        flaxckpt.restore(saved, BODY, transforms=rules[::-1])


def test_the_report_tells_what_the_target_kept(tmp_path):
    with flaxckpt.CheckpointManager(tmp_path) as ckpt:
        ckpt.save(0, BODY)
        ckpt.restore({**BODY, "a": 1, "b": 2}, transforms=[Fallback("a", "target"),
                                                           Fallback("b", 3)])  # fmt: skip
    assert ckpt.report.initialised == ("a",)
    assert "b" in ckpt.report.restored


# Fallback with an abstract target that can be initialised


def explode():
    raise AssertionError("computed")


def init():
    """A state of which the body must not be computed."""
    body = jax.pure_callback(explode, jax.ShapeDtypeStruct((2, 3), jnp.float32))
    return {"body": {"kernel": body}, "head": jnp.full(2, 5.0), "step": jnp.zeros((), int)}


@pytest.mark.parametrize(
    "how",
    [
        {"transforms": [Fallback("head", "target")]},
        {"missing": "init"},
        {"missing": {"head": "init"}},
    ],
)
def test_only_what_is_missing_is_initialised(saved, tmp_path, how):
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        restored = ckpt.restore_or_init(init, init_from=saved, **how)
    assert restored["head"].tolist() == [5, 5]
    assert (restored["body"]["kernel"] == BODY["body"]["kernel"]).all()
    assert restored["step"] == 7
    assert ckpt.report.initialised == ("head",)


def test_what_is_missing_is_initialised_where_it_belongs(saved, tmp_path):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        restored = ckpt.restore_or_init(
            lambda: init() | {"body": {"kernel": jnp.zeros((2, 3))}},
            init_from=saved,
            mesh=mesh,
            specs={"head|body/kernel": jax.sharding.PartitionSpec("x")},
            transforms=[Fallback("head", "target")],
        )
    assert restored["head"].sharding.spec == restored["body"]["kernel"].sharding.spec
    assert restored["head"].sharding.spec == jax.sharding.PartitionSpec("x")
    assert restored["head"].tolist() == [5, 5]


def test_what_is_dropped_is_computed(saved, tmp_path):
    """The control: that the body must not be computed can be seen."""
    rules = [Drop("body/.*"), Fallback("head|body/.*", "target")]
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        with pytest.raises(jax.errors.JaxRuntimeError, match="AssertionError: computed"):
            ckpt.restore_or_init(init, init_from=saved, transforms=rules)["body"]["kernel"].sum()


def test_a_cast_after_a_fallback_leaves_what_is_initialised(saved, tmp_path):
    rules = [Fallback("head", "target"), Cast("body/.*", "float32")]
    everything = [Fallback("head", "target"), Cast(".*/kernel|head", "float32")]
    for number, transforms in enumerate((rules, everything)):
        with flaxckpt.CheckpointManager(tmp_path / str(number)) as ckpt:
            restored = ckpt.restore_or_init(init, init_from=saved, transforms=transforms)
        assert restored["head"].tolist() == [5, 5]


# Cast


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "float64", np.float64, ">i2",
                                   ml_dtypes.float8_e4m3fn, jnp.bfloat16])  # fmt: skip
def test_cast(saved, dtype):
    restored = flaxckpt.restore(saved, transforms=[Cast("body/kernel", dtype)])
    expected = BODY["body"]["kernel"].astype(dtype)
    assert restored["body"]["kernel"].dtype == expected.dtype
    assert (restored["body"]["kernel"] == expected).all()
    assert restored["step"] == 7


def test_cast_into_a_target(saved):
    target = {"body": {"kernel": jnp.zeros((2, 3), jnp.bfloat16)}, "step": 0}
    with pytest.raises(StructureMismatchError):
        flaxckpt.restore(saved, target)
    restored = flaxckpt.restore(saved, target, transforms=[Cast("body/.*", "bfloat16")])
    assert restored["body"]["kernel"].dtype == jnp.bfloat16
    assert (restored["body"]["kernel"] == BODY["body"]["kernel"]).all()


def test_a_number_becomes_a_scalar(saved):
    restored = flaxckpt.restore(saved, transforms=[Cast("step", "int8")])
    assert restored["step"] == 7
    assert type(restored["step"]) is np.int8
    assert flaxckpt.restore(saved, BODY, transforms=[Cast("step", "int8")])["step"] == 7


def test_jax_arrays_stay_jax_arrays(tmp_path):
    flaxckpt.save(tmp_path / "x", {"w": jnp.arange(3.0)})
    restored = flaxckpt.restore(tmp_path / "x", transforms=[Cast("w", "bfloat16")])
    assert isinstance(restored["w"], jax.Array)
    assert restored["w"].dtype == jnp.bfloat16


@pytest.mark.parametrize("value", ["text", jax.random.key(0), np.array(["a", "b"])])
def test_what_has_no_numbers_is_not_cast(value):
    with pytest.raises(RuleError, match="cannot be used for w, which is"):
        Cast("w", "float32")(state_of({"w": value}), {})["w"].read()


@pytest.mark.parametrize("dtype", ["float33", object, "O", "S3,i4"])
def test_what_is_no_dtype_of_a_checkpoint(dtype):
    with pytest.raises(RuleError):
        Cast("w", dtype)(state_of({"w": np.ones(2)}), {})


def test_a_cast_that_matches_nothing():
    with pytest.raises(RuleError, match="matches no key path as a whole"):
        Cast("no", "float32")(state_of({"w": 1}), {})
    assert values_of(Cast("no", "float32", optional=True)(state_of({"w": 1}), {})) == {"w": 1}


def test_the_last_cast_counts_and_loses_what_the_first_loses():
    state = state_of({"w": np.array([1.5, 2.5])})
    for rule in (Cast("w", "int8"), Rename("w", "v"), Cast("v", "float32")):
        state = rule(state, {})
    assert values_of(state) == {"v": [1, 2]}
    assert str(state["v"].spec) == "float32[2]"


def test_a_part_of_a_cast_array(tmp_path, monkeypatch):
    options = flaxckpt.Options(chunk_bytes=4000)
    flaxckpt.save(tmp_path / "x", {"w": np.arange(10_000.0)}, options=options)
    state = Cast("w", "float32")(dict(flaxckpt.lazy(tmp_path / "x")), {})
    reads = Reads(monkeypatch)
    assert state["w"].read(np.s_[5:7]).tolist() == [5, 6]
    assert 4_000 <= reads.nbytes < 6_000
    assert state["w"].nbytes == 40_000
