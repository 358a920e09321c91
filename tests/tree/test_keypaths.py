from __future__ import annotations

import enum

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flaxckpt.errors import UnsupportedKeyError
from flaxckpt.tree.keypaths import decode_key, encode_key, name_of, parse_name
from tests.tree.strategies import HOSTILE_STRINGS, keys

paths = st.lists(keys, max_size=4).map(tuple)


@given(paths)
def test_parse_name_gives_back_the_exact_keys(path):
    # repr, because True == 1 == 1.0, 0.0 == -0.0, and NaN != NaN.
    assert repr(parse_name(name_of(path))) == repr(path)


@given(st.lists(paths, max_size=8, unique_by=repr))
def test_different_paths_have_different_names(many):
    assert len({name_of(path) for path in many}) == len(many)


def test_no_two_short_paths_of_hostile_strings_share_a_name():
    hostile = [*HOSTILE_STRINGS, 0, 7, -7, True, False, None, 0.0, -0.0, b"", b"0", (), ("a",)]
    paths = [(), *((a,) for a in hostile), *((a, b) for a in hostile for b in hostile)]
    assert len({name_of(path) for path in paths}) == len(paths)


@given(st.lists(keys, min_size=1, max_size=4).map(tuple))
def test_a_name_has_one_component_for_each_key(path):
    assert len(name_of(path).split("/")) == len(path)


@given(keys)
def test_a_key_survives_json(key):
    assert repr(decode_key(orjson.loads(orjson.dumps(encode_key(key))))) == repr(key)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ((), ""),
        (("",), "%"),
        (("", ""), "%/%"),
        (("a.b",), "a.b"),
        (("a/b",), "a%2Fb"),
        (("a", "b"), "a/b"),
        (("%",), "%25"),
        (("%2F",), "%252F"),
        (("%!",), "%25!"),
        ((0,), "0"),
        ((-7,), "-7"),
        (("0",), "%30"),
        (("-7",), "%2D7"),
        (("٣",), "٣"),
        ((True,), '%!{"bool":true}'),
        ((None,), '%!{"none":0}'),
        ((b"/",), '%!{"bytes":"Lw=="}'),
        ((1.5,), '%!{"float":"0x1.8000000000000p+0"}'),
        (((1, "/"),), '%!{"tuple":[1,"%2F"]}'),
    ],
)
def test_the_written_form_never_changes(path, name):
    assert name_of(path) == name


def test_an_enum_key_is_named_like_its_int():
    assert name_of((enum.IntEnum("Color", ["RED"]).RED,)) == "1"


@pytest.mark.parametrize("key", [object(), frozenset(), np.int32(1), 1j, (1, {2})])
def test_a_key_of_another_type_is_refused(key):
    with pytest.raises(UnsupportedKeyError, match="cannot be saved"):
        name_of((key,))


@pytest.mark.parametrize("key", ["\ud800", ("a", "\udfff"), "x\ud83d\ude00"])
def test_half_a_surrogate_pair_is_refused(key):
    with pytest.raises(UnsupportedKeyError, match="not valid unicode"):
        name_of((key,))


@pytest.mark.parametrize(
    "data",
    [None, True, 1.5, [], {}, {"bool": 1}, {"int": 1}, {"float": 1.0}, {"bytes": "?"}, {"none": 1},
     {"tuple": "ab"}, {"object": "x"}, {"tuple": [None]}, {"int": "x"}, {"float": "x"}],
)  # fmt: skip
def test_json_that_is_no_key_is_refused(data):
    with pytest.raises(ValueError, match=r"."):
        decode_key(data)
