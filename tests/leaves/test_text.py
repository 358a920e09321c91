from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flaxckpt.errors import UnsupportedLeafError
from flaxckpt.leaves import kinds
from tests.leaves.helpers import round_trip


@given(st.text(st.characters()))
@example("\ud800")
@example("\ud83d\ude00")  # two halves side by side are not the character that they would make
@example("😀\ud83d")
@example('\0\n"\\')
def test_any_string_comes_back(value):
    back = round_trip(value)
    assert type(back) is str
    assert back == value


@given(st.binary())
def test_any_bytes_come_back(value):
    back = round_trip(value)
    assert type(back) is bytes
    assert back == value


def test_a_string_is_stored_as_itself():
    assert kinds.encode("adam", "x")[1] == "adam"


@given(st.lists(st.text(), max_size=4), st.sampled_from([(-1,), (1, -1)]))
def test_an_array_of_strings_comes_back(strings, shape):
    array = np.array(strings, np.dtypes.StringDType()).reshape(shape if strings else (0, 2))
    back = round_trip(array)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tolist() == array.tolist()


def test_an_array_with_missing_strings_is_refused():
    array = np.array(["a", None], np.dtypes.StringDType(na_object=None))
    with pytest.raises(UnsupportedLeafError, match="StringDType"):
        round_trip(array)


@pytest.mark.parametrize("value", [bytearray(b"a"), memoryview(b"a"), type("S", (str,), {})("a")])
def test_other_types_of_text_are_refused(value):
    with pytest.raises(UnsupportedLeafError, match="register_leaf_handler"):
        round_trip(value)
