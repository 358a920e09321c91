"""Configurations: exactly what was saved, or an error."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flaxckpt
from flaxckpt.errors import ItemError
from flaxckpt.items import json_item
from flaxckpt.items.item import ProcessRank
from flaxckpt.items.item_kinds import encode
from tests.items.helpers import again, saved

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
PLAIN = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=20,
)
CONFIG = {
    "model": {"layers": [12, 24], "rate": 1e-3, "name": "vit/β"},
    "resume": None,
    "big": 2**80,
}


def typed(value):
    """`value` with its types and signs, which `==` does not tell."""
    return [(path, type(inner), repr(inner)) for path, inner in json_item.walk(value)]


@settings(max_examples=200)
@given(PLAIN)
def test_plain_data_come_back_exactly(value):
    found = json.loads(json_item.dumps(value))
    assert found == value
    assert typed(found) == typed(value)
    assert encode("it", value, ProcessRank(0, 1)).kind == "json"


@pytest.mark.parametrize("value", [CONFIG, [], {}, [1, [2.5, -0.0]], "text", None, True, 3])
def test_a_config_is_saved_and_restored(tmp_path, value):
    found = again(tmp_path / "x", value)
    assert typed(found) == typed(value)
    assert json.loads((tmp_path / "x" / "it" / "metadata").read_text()) == value


def test_the_order_of_keys_is_kept(tmp_path):
    assert list(again(tmp_path / "x", {"b": 1, "a": 2})) == ["b", "a"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            {"a": [1.0, math.nan]},
            r"the item it: .*\['a'\]\[1\] is nan, which JSON cannot represent",
        ),
        ({"a": math.inf}, r"\['a'\] is inf"),
        ("\ud83d\ude00", "no valid unicode"),
    ],
)
def test_what_json_cannot_hold_is_refused_before_anything_is_written(tmp_path, value, text):
    with pytest.raises(ItemError, match=text):
        saved(tmp_path / "x", it=value)
    assert list(tmp_path.iterdir()) == []


def test_a_dict_that_holds_itself_is_refused(tmp_path):
    config = {}
    config["self"] = config
    with pytest.raises(ItemError, match="nested more than"):
        saved(tmp_path / "x", it=config)


def test_what_is_not_plain_is_a_tree(tmp_path):
    found = again(tmp_path / "x", {"a": (1, 2), "b": np.float32(1)})
    assert found == {"a": (1, 2), "b": np.float32(1)}
    assert (tmp_path / "x" / "it" / "_METADATA").exists()


def test_several_items_and_only_those_that_are_asked_for(tmp_path):
    path = saved(tmp_path / "x", config=CONFIG, notes=["a"])
    assert flaxckpt.restore_items(path, {"notes": None}) == {"notes": ["a"]}
    assert flaxckpt.restore_items(path, {}) == {}
