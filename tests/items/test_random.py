"""Random generators go on exactly where they were."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.random import MT19937, PCG64, SFC64, Generator, Philox, RandomState

import flaxckpt
from flaxckpt.errors import CorruptCheckpointError, ItemError
from flaxckpt.items.item import ProcessRank
from flaxckpt.items.item_kinds import encode
from tests.items.helpers import again, saved

BITS = [PCG64, MT19937, Philox, SFC64]


def drawn(rng):
    """What a generator gives next, of every kind of cache that it has."""
    return [*rng.standard_normal(3), rng.random(), *rng.integers(0, 100, 5, dtype=np.uint32)]


def old_drawn(rng):
    return [*rng.standard_normal(3), rng.random_sample(), *rng.randint(0, 100, 5)]


@pytest.mark.parametrize("bits", BITS)
def test_a_generator_goes_on(tmp_path, bits):
    rng = Generator(bits(7))
    drawn(rng)
    rng.spawn(2)
    path = saved(tmp_path / "x", it=rng)
    expected, children = drawn(rng), [drawn(child) for child in rng.spawn(2)]
    made = flaxckpt.restore_items(path, {"it": None})["it"]
    target = Generator(bits(99))
    assert flaxckpt.restore_items(path, {"it": target})["it"] is target
    for found in (made, target):
        assert drawn(found) == expected
        assert [drawn(child) for child in found.spawn(2)] == children


@pytest.mark.parametrize("bits", [None, *BITS])
def test_an_old_generator_goes_on(tmp_path, bits):
    def make(seed):
        return RandomState(seed) if bits is None else RandomState(bits(seed))

    rng = make(7)
    rng.standard_normal(3)  # and one is kept for the next call
    path = saved(tmp_path / "x", it=rng)
    expected = old_drawn(rng)
    target = make(99)
    assert flaxckpt.restore_items(path, {"it": target})["it"] is target
    made = flaxckpt.restore_items(path, {"it": None})["it"]
    assert old_drawn(target) == old_drawn(made) == expected


@pytest.mark.parametrize(
    ("value", "target"),
    [
        (np.random.default_rng(1), Generator(Philox(1))),
        (np.random.default_rng(1), RandomState(1)),
        (RandomState(1), RandomState(PCG64(1))),
        (RandomState(PCG64(1)), RandomState(1)),
        (RandomState(1), object()),
    ],
)
def test_another_kind_of_target_is_refused(tmp_path, value, target):
    with pytest.raises(ItemError, match="the item it is a numpy"):
        again(tmp_path / "x", value, target)


def test_a_bit_generator_of_somebody_else_is_refused(tmp_path):
    class Mine(PCG64):
        pass

    with pytest.raises(ItemError, match="the item it: its bit generator Mine"):
        saved(tmp_path / "x", it=Generator(Mine(1)))
    assert list(tmp_path.iterdir()) == []


def test_generators_of_several_processes_are_their_own():
    for value in (np.random.default_rng(1), RandomState(1)):
        found = encode("it", value, ProcessRank(1, 4))
        assert found.encoded.own
        assert found.encoded.tree is None


def test_what_is_no_state_is_damage(tmp_path):
    path = saved(tmp_path / "x", it=np.random.default_rng(1))
    file = path / "it" / "process_0-of-1.json"
    file.write_bytes(file.read_bytes()[:-1] + b" ")
    with pytest.raises(CorruptCheckpointError, match="the item it .* checksum"):
        flaxckpt.restore_items(path, {"it": None})


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_typed_key(tmp_path, impl, shape):
    key = jax.random.key(7, impl=impl)
    key = jax.random.split(key, shape) if shape else key
    for target in (None, jax.random.split(jax.random.key(0, impl=impl), shape) if shape else key):
        found = again(tmp_path / "x", key, target)
        assert found.dtype == key.dtype
        assert (jax.random.key_data(found) == jax.random.key_data(key)).all()


def test_a_raw_key(tmp_path):
    key = jax.random.PRNGKey(7)
    found = again(tmp_path / "x", key, jnp.zeros(2, jnp.uint32))
    assert isinstance(found, jax.Array)
    assert (found == key).all()
    assert (tmp_path / "x" / "it" / "jax_random_key").is_dir()
