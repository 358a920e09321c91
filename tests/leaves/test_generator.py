from __future__ import annotations

import numpy as np
import pytest

from flaxckpt.errors import UnsupportedLeafError
from flaxckpt.leaves import kinds
from flaxckpt.leaves.generator import BIT_GENERATORS
from tests.leaves.helpers import round_trip


@pytest.mark.parametrize("name", BIT_GENERATORS)
@pytest.mark.parametrize("drawn", [0, 1, 1000])
def test_a_generator_goes_on_where_it_was(name, drawn):
    rng = np.random.Generator(BIT_GENERATORS[name](0))
    rng.integers(0, 2**32, drawn, np.uint32)  # an odd number leaves half a word in the buffer
    back = round_trip(rng)
    assert type(back.bit_generator) is BIT_GENERATORS[name]
    assert (back.integers(0, 2**32, 700, np.uint32) == rng.integers(0, 2**32, 700, np.uint32)).all()
    assert (back.normal(size=9) == rng.normal(size=9)).all()


def test_a_generator_that_came_back_spawns_the_same_children():
    back, rng = round_trip(np.random.default_rng(0)), np.random.default_rng(0)
    assert back.spawn(1)[0].integers(2**62) == rng.spawn(1)[0].integers(2**62)


def test_the_spec_names_the_bit_generator():
    spec, _ = kinds.describe(np.random.Generator(np.random.SFC64(0)), "x")
    assert (spec.kind, spec.impl) == ("generator", "SFC64")


def test_a_bit_generator_of_another_library_is_refused():
    class Mine(np.random.PCG64):
        pass

    with pytest.raises(UnsupportedLeafError, match="the leaf rng: its bit generator Mine"):
        kinds.encode(np.random.Generator(Mine(0)), "rng")


def test_the_old_random_state_is_refused():
    with pytest.raises(UnsupportedLeafError, match="RandomState"):
        round_trip(np.random.RandomState(0))
