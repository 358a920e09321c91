from __future__ import annotations

import decimal
import fractions
import threading

import numpy as np
import pytest

from flaxckpt.errors import UnsupportedLeafError
from flaxckpt.leaves.kinds import describe, encode, handler_of, register_leaf_handler
from tests.leaves.helpers import round_trip


@pytest.mark.parametrize(
    ("leaf", "type_name"),
    [
        (threading.Lock(), "_thread.lock"),
        (print, "builtins.builtin_function_or_method"),
        ({1, 2}, "builtins.set"),
        (decimal.Decimal(1), "decimal.Decimal"),
        (np.array([None]), "numpy.ndarray of dtype object"),
    ],
)
def test_an_unsupported_leaf_is_named_with_its_path_and_type(leaf, type_name):
    with pytest.raises(UnsupportedLeafError) as caught:
        describe(leaf, "opt_state/0/lock")
    assert f"the leaf opt_state/0/lock is a {type_name}, which" in str(caught.value)
    assert "flaxckpt.register_leaf_handler(kind, " in str(caught.value)


def test_the_error_for_an_unsupported_leaf_in_full():
    with pytest.raises(UnsupportedLeafError) as caught:
        describe({1}, "a/b")
    assert str(caught.value) == (
        "the leaf a/b is a builtins.set, which no checkpoint can hold. Take it out of the tree, "
        "make it static, or call flaxckpt.register_leaf_handler(kind, set, encode, decode)."
    )


def test_an_unsupported_tree_that_is_one_leaf_is_named():
    with pytest.raises(UnsupportedLeafError, match=r"the leaf \(the whole tree\) is a"):
        describe({1}, "")


def test_a_registered_type_comes_back_from_json():
    register_leaf_handler("test.fraction", fractions.Fraction, str, fractions.Fraction)
    assert round_trip(fractions.Fraction(1, 3)) == fractions.Fraction(1, 3)


def test_a_registered_type_comes_back_from_an_array():
    class Weights:
        def __init__(self, array):
            self.array = array

    register_leaf_handler("test.weights", Weights, lambda w: w.array, Weights)
    assert (round_trip(Weights(np.arange(3))).array == np.arange(3)).all()


def test_a_subclass_of_a_registered_type_is_included():
    class Base:
        pass

    register_leaf_handler("test.base", Base, lambda _: 0, lambda _: Base())
    assert describe(type("Sub", (Base,), {})(), "x")[0].kind == "test.base"


def test_a_registered_type_wins_over_a_builtin_kind():
    class Text(np.ndarray):
        pass

    register_leaf_handler("test.text", Text, lambda a: a.tolist(), np.array)
    assert describe(np.zeros(2).view(Text), "x")[0].kind == "test.text"


@pytest.mark.parametrize("kind", ["jax", "int", "str", "generator"])
def test_a_kind_of_our_own_cannot_be_taken(kind):
    with pytest.raises(ValueError, match=f"'{kind}' is a kind of flaxckpt's own"):
        register_leaf_handler(kind, set, list, set)


def test_a_kind_that_is_not_registered_here_says_what_to_do():
    with pytest.raises(UnsupportedLeafError) as caught:
        handler_of("mine", "a/b")
    assert str(caught.value) == (
        "the leaf a/b was saved by a handler of kind 'mine', which is not registered here. "
        "Call flaxckpt.register_leaf_handler('mine', ...) before restoring."
    )


def test_an_error_of_the_callers_encode_names_the_leaf():
    class Broken:
        pass

    register_leaf_handler("test.broken", Broken, lambda _: 1 / 0, lambda _: None)
    with pytest.raises(UnsupportedLeafError, match="the leaf x: its handler failed") as caught:
        encode(Broken(), "x")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
