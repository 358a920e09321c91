"""Files of flax and of Orbax's aggregate form, healthy and not."""

import tracemalloc

import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import pytest
from flax import serialization
from hypothesis import given, settings
from hypothesis import strategies as st
from orbax.checkpoint import msgpack_utils

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.formats.flax_msgpack import decode
from tests.formats.flax_states import SAMPLES
from tests.trees import assert_same

DTYPES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 "
    "complex128 bfloat16 int2 int4 uint2 uint4 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn "
    "datetime64[s] datetime64[25us] timedelta64[ns]"
).split()


def array(shape=(2,), name="float32", data=b"\0" * 8):
    """An array as flax writes it, whatever is in it."""
    return msgpack.ExtType(1, msgpack.packb((shape, name, data)))


def scalar(*args):
    return msgpack.ExtType(3, array(*args).data)


def chunked(chunks, shape=(4,)):
    numbered = {str(i): n for i, n in enumerate(shape)}
    pieces = {str(i): chunk for i, chunk in enumerate(chunks)}
    return {"__msgpack_chunked_array__": True, "shape": numbered, "chunks": pieces}


def nested(depth, wrap):
    """`depth` containers in one another."""
    value = 0
    for _ in range(depth):
        value = wrap(value)
    return value


SMALL = serialization.to_bytes(
    {
        "step": 3,
        "w": np.ones((2, 2), ml_dtypes.bfloat16),
        "s": np.float32(2),
        "c": 1 + 2j,
        "t": ("é", b"b", None, True, 0.5),
    }
)
AGGREGATE = msgpack_utils.msgpack_serialize(
    {"a": (1, (np.int8(2), [np.zeros(1, "i4")])), "n": None, "e": ()}
)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_of_flax_comes_back(name):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    values = np.zeros((2, 3), np.int64).astype(dtype)
    values[0, 1] = np.ones((), np.int64).astype(dtype)
    tree = {"a": values, "s": values[0, 1], "empty": values[:0], "axis free": values[0, 1, None][0]}
    found = decode(serialization.msgpack_serialize(tree), "f")
    assert_same(found, tree)
    assert found["a"].dtype == dtype
    assert type(found["s"]) is dtype.type


def test_text_scalars_come_back():
    tree = {"s": np.str_("hé"), "b": np.bytes_(b"ab"), "a": np.array(["x", "yz"])}
    assert_same(decode(serialization.msgpack_serialize(tree), "f"), tree)


def test_python_values_keep_their_types():
    tree = {"i": 7, "f": 0.5, "s": "hé", "b": True, "n": None, "c": 1 + 2j, "y": b"ab", "e": {}}
    tree |= {"big": 2**64 - 1, "small": -(2**63), "inf": float("inf")}
    assert_same(decode(serialization.msgpack_serialize(tree), "f"), tree)


def test_jax_arrays_are_numpy_arrays():
    found = decode(serialization.to_bytes({"a": jnp.arange(3)}), "f")
    assert_same(found, {"a": np.arange(3, dtype=np.int32)})


def test_a_lone_leaf_is_a_tree():
    assert_same(decode(serialization.to_bytes(np.arange(3)), "f"), np.arange(3))
    assert decode(serialization.to_bytes({}), "f") == {}


def test_integer_keys_stay_integers():
    assert decode(serialization.msgpack_serialize({0: {1: 2}}), "f") == {0: {1: 2}}


@pytest.mark.parametrize("size", [1, 4, 20, 10**6])
def test_chunked_arrays_are_whole(monkeypatch, size):
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", size)
    tree = {"a": {"b": np.arange(15.0).reshape(3, 5)}, "h": np.ones(3, ml_dtypes.bfloat16)}
    data = serialization.to_bytes(tree)
    assert (b"__msgpack_chunked_array__" in data) == (size < 100)
    assert_same(decode(data, "f"), tree)


def test_a_chunked_lone_array_is_whole(monkeypatch):
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 20)
    assert_same(decode(serialization.to_bytes(np.arange(15)), "f"), np.arange(15))


def test_named_tuples_of_old_are_dicts():
    old = {"name": "Adam", "fields": {"0": "mu", "1": "nu"}, "values": {"0": 1, "1": {"k": 2}}}
    assert decode(msgpack.packb({"o": old}), "f") == {"o": {"mu": 1, "nu": {"k": 2}}}


@pytest.mark.parametrize(
    "values", [{"0": 1}, 3, {"0": 1, "2": 2}], ids=["fewer", "number", "other keys"]
)
def test_dicts_that_only_look_like_named_tuples_stay(values):
    tree = {"name": "x", "fields": {"0": "a", "1": "b"}, "values": values}
    assert decode(msgpack.packb(tree), "f") == tree
    assert decode(msgpack.packb(tree | {"fields": 1}), "f") == tree | {"fields": 1}


def test_tuples_of_orbax_come_back():
    inner = (np.int8(2), [np.zeros(1, "i4")])
    assert_same(decode(AGGREGATE, "f"), {"a": (1, inner), "n": None, "e": ()})


@pytest.mark.parametrize("version", ["0.2.7", "0.4.4"])
def test_aggregate_files_of_orbax(version):
    file = SAMPLES / "orbax" / version / "agg" / "checkpoint"
    expected = {
        "a": np.array([0, 1, 2, 3], np.float32),
        "b": {"c": np.array([[1, 1], [1, 1]], ml_dtypes.bfloat16)},
        "e": {},
        "f": 2.5,
        "i": 3,
        "l": [np.array([1], np.float32), 2],
        "n": np.array([0, 1, 2], np.int64),
        "none": None,
        "t": [np.array([0], np.float32)],
    }
    assert_same(decode(file.read_bytes(), str(file)), expected)


DAMAGED = {
    "nothing": (b"", "incomplete"),
    "trailing bytes": (SMALL + b"\xc0", "extra data"),
    "two values": (SMALL + SMALL, "extra data"),
    "shape too large": ({"a": array((3,))}, "does not fit its bytes"),
    "shape too small": ({"a": array((1,))}, "does not fit its bytes"),
    "shape overflows": ({"a": array((2**62, 2**62))}, "does not fit its bytes"),
    "empty but endless": ({"a": array((0, 2**62, 2**62), data=b"")}, "damaged"),
    "negative shape": ({"a": array((-2,))}, "is not a shape"),
    "negative twice": ({"a": array((-1, -2))}, "is not a shape"),
    "shape of bools": ({"a": array((True, True))}, "is not a shape"),
    "shape of floats": ({"a": array((2.0,))}, "is not a shape"),
    "shape no list": ({"a": array(2)}, "is not a shape"),
    "too many axes": ({"a": array((1,) * 65, "int8", b"\0")}, "damaged"),
    "no such dtype": ({"a": array(name="float31")}, "float31"),
    "dtype of objects": ({"a": array(name="object")}, "object"),
    "dtype with fields": ({"a": array(name="f4,f4")}, "f4,f4"),
    "dtype no name": ({"a": array(name=7)}, "7"),
    "dtype not utf-8": ({"a": array(name=b"\xff")}, "damaged"),
    "void": ({"a": array(name="void64")}, "void64"),
    "no text": ({"a": array((), "str0", b"")}, "str0"),
    "bytes no bytes": ({"a": array(data="text")}, "does not fit its bytes"),
    "array without bytes": ({"a": msgpack.ExtType(1, msgpack.packb((2,)))}, "damaged"),
    "array is a number": ({"a": msgpack.ExtType(1, msgpack.packb(2))}, "damaged"),
    "array of nothing": ({"a": msgpack.ExtType(1, b"")}, "incomplete"),
    "scalar with axes": ({"a": scalar()}, "a scalar has the shape"),
    "not a character": ({"a": scalar((), "str32", b"\xff" * 4)}, "damaged"),
    "complex of one": ({"a": msgpack.ExtType(2, msgpack.packb(1.0))}, "damaged"),
    "complex of text": ({"a": msgpack.ExtType(2, msgpack.packb(("a", "b")))}, "damaged"),
    "another extension": ({"a": msgpack.ExtType(5, b"x")}, "extension type 5"),
    "a time": ({"a": msgpack.Timestamp(1)}, "Timestamp"),
    "tuple of no list": ({"a": msgpack.ExtType(4, msgpack.packb(3))}, "damaged"),
    "tuple cut": ({"a": msgpack.ExtType(4, b"\x92\x01")}, "incomplete"),
    "key none": ({None: 1}, "neither all strings"),
    "key float": ({1.5: 1}, "neither all strings"),
    "key bool": ({True: 1}, "neither all strings"),
    "keys of two types": ({"0": 1, 0: 2}, "neither all strings"),
    "key unhashable": (b"\x81\x90\x01", "damaged"),
    "key an array": (b"\x81" + msgpack.packb(array()) + b"\x01", "damaged"),
    "key twice": (b"\x82\xa1a\x01\xa1a\x02", "twice"),
    "text not utf-8": (b"\x81\xa1a\xa1\xff", "damaged"),
    "endless list": (b"\xdd\xff\xff\xff\xff", "damaged"),
    "endless dict": (b"\xdf\xff\xff\xff\xff", "damaged"),
    "endless bytes": (b"\xc6\xff\xff\xff\xff", "damaged"),
    "reserved byte": (b"\xc1", "damaged"),
    "deep dicts": (nested(1000, lambda x: {"a": x}), "500 levels"),
    "deep lists": (nested(501, lambda x: [x]), "500 levels"),
    "deeper lists": (b"\x91" * 100_000 + b"\xc0", "damaged"),
    "deep tuples": (nested(50, lambda x: msgpack.ExtType(4, msgpack.packb([x]))), "32 tuples"),
    "no chunks": ({"a": chunked([])}, "not an array"),
    "chunks do not fit": ({"a": chunked([array()], (3,))}, "damaged"),
    "chunks of two dtypes": ({"a": chunked([array(), array(name="int32")])}, "differ"),
    "chunks of numbers": ({"a": chunked([1, 2])}, "not an array"),
    "chunks with shape -1": ({"a": chunked([array()], (-1,))}, "is not a shape"),
    "chunks without shape": ({"a": {"__msgpack_chunked_array__": True}}, "damaged"),
    "chunks misnumbered": (
        {"a": chunked([array()], (2,)) | {"chunks": {"1": array()}}},
        "damaged",
    ),
    "chunks no dict": ({"a": chunked([array()], (2,)) | {"chunks": 2}}, "damaged"),
    "old fields misnumbered": (
        {"name": "A", "fields": {"1": "a"}, "values": {"1": 2}},
        "damaged",
    ),
    "old fields unhashable": (
        {"name": "A", "fields": {"0": [1]}, "values": {"0": 2}},
        "damaged",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_named(name):
    value, message = DAMAGED[name]
    data = value if isinstance(value, bytes) else msgpack.packb(value)
    with pytest.raises(CorruptCheckpointError) as caught:
        decode(data, "dir/checkpoint_7")
    assert "the msgpack file dir/checkpoint_7 is damaged: " in str(caught.value)
    assert message in str(caught.value)


def test_as_deep_as_a_checkpoint_may_be():
    data = msgpack.packb(nested(499, lambda x: {"a": x}))
    assert decode(data, "f") == nested(499, lambda x: {"a": x})
    tuples = msgpack.packb(nested(32, lambda x: msgpack.ExtType(4, msgpack.packb([x]))))
    assert decode(tuples, "f") == nested(32, lambda x: (x,))


def test_a_claim_costs_no_memory():
    data = msgpack.packb({"a": array((2**40,)), "b": b"x" * 1000})
    tracemalloc.start()
    with pytest.raises(CorruptCheckpointError):
        decode(data, "f")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000


def survives(data):
    """Decodes, or says that it is damaged; nothing else."""
    try:
        decode(data, "f")
    except CorruptCheckpointError:
        return False
    return True


@pytest.mark.parametrize("data", [SMALL, AGGREGATE], ids=["flax", "orbax"])
def test_every_truncation_is_found(data):
    assert not any(survives(data[:length]) for length in range(len(data)))


@pytest.mark.parametrize("data", [SMALL, AGGREGATE], ids=["flax", "orbax"])
def test_every_flip_of_a_byte_is_survived(data):
    for at in range(len(data)):
        for flip in range(1, 256):
            survives(data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])


@settings(max_examples=300)
@given(st.binary(max_size=60) | st.binary(max_size=40).map(lambda b: b"\x82\xa1a" + b))
def test_any_bytes_are_survived(data):
    survives(data)
