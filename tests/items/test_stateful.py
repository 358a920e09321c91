"""Data iterators, and other objects that know their own state."""

import json

import grain
import numpy as np
import pytest

import flaxckpt
from flaxckpt.errors import ItemError
from tests.items.helpers import again, saved


def taken(iterator, count=5):
    return [np.asarray(next(iterator)).tolist() for _ in range(count)]


class Source:
    """What a grain loader reads from."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return index * 3

    def __repr__(self):
        return "Source()"


class Plus(grain.transforms.RandomMap):
    """Depends on the random state, too."""

    def random_map(self, element, rng):
        return element + int(rng.integers(1000))


def dataset():
    numbers = grain.MapDataset.range(60).seed(3).shuffle().random_map(Plus()).repeat()
    return iter(numbers.to_iter_dataset().batch(4))


def mixed():
    """A dataset whose state is nested."""
    parts = [grain.MapDataset.range(n, n + 50).shuffle(seed=n).repeat() for n in (0, 100)]
    mix = grain.MapDataset.mix(parts, [0.3, 0.7]).to_iter_dataset().filter(lambda x: x % 3)
    return iter(mix.batch(3))


def loader():
    sampler = grain.samplers.IndexSampler(
        num_records=40,
        shard_options=grain.sharding.NoSharding(),
        shuffle=True,
        seed=5,
        num_epochs=None,
    )
    return iter(
        grain.DataLoader(
            data_source=Source(), sampler=sampler, operations=[Plus(), grain.transforms.Batch(3)]
        )
    )


@pytest.mark.parametrize("make", [dataset, mixed, loader])
def test_a_grain_iterator_goes_on(tmp_path, make):
    it = make()
    taken(it)
    path = saved(tmp_path / "x", data=it)
    expected = taken(it, 20)
    fresh, used = make(), make()
    taken(used, 9)
    for target in (fresh, used):
        found = flaxckpt.restore_items(path, {"data": target})
        assert found == {"data": target}
        assert taken(target, 20) == expected
    assert (path / "data" / "process_0-of-1.json").exists()


class Getter:
    """Has what most iterators have."""

    def __init__(self, state):
        self.state = state

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


class Torchlike:
    """Has what modules and loaders of PyTorch have."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Filer:
    """Writes several files, one in a directory."""

    def __init__(self, state):
        self.state = state

    def save(self, path):
        path.mkdir()
        (path / "a").write_text(self.state)
        (path / ".hidden").write_bytes(b"\0")
        path.with_name("state.index").write_text("i")

    def load(self, path):
        assert (path / ".hidden").read_bytes() == b"\0"
        assert path.with_name("state.index").read_text() == "i"
        self.state = (path / "a").read_text()


STATES = [
    b"\x00\xff",
    b"",
    b'{"a": 1}',
    "text",
    "",
    '{"a": 1}',
    "\ud800",
    {"a": [1, 2.5, None]},
    5,
    [True],
]


@pytest.mark.parametrize("cls", [Getter, Torchlike])
@pytest.mark.parametrize("state", STATES)
def test_a_state_comes_back_with_its_type(tmp_path, cls, state):
    path = saved(tmp_path / "x", it=cls(state))
    target = cls(None)
    assert flaxckpt.restore_items(path, {"it": target}) == {"it": target}
    assert type(target.state) is type(state)
    assert target.state == state
    assert flaxckpt.restore_items(path, {"it": None}) == {"it": state}


def test_a_state_in_files(tmp_path):
    target = Filer("")
    assert again(tmp_path / "x", Filer("here"), target) is target
    assert target.state == "here"


def test_a_state_that_would_not_be_found_again_is_refused(tmp_path):
    class Numbered(Filer):
        def save(self, path):
            path.with_name(f"{path.name}-1.index").write_text("i")

    with pytest.raises(ItemError, match="wrote state-1.index, and nothing under the name"):
        saved(tmp_path / "x", it=Numbered(""))


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (
            {"a": (1, 2)},
            r"get_state\(\) result does not survive a JSON round trip: \['a'\] is a tuple",
        ),
        ({"a": np.int64(1)}, r"\['a'\] is a int64.*register_item_handler"),
        ({1: 2}, "is a dict"),
        ({"a": float("nan")}, "is nan"),
    ],
)
def test_a_state_that_json_does_not_hold_is_refused(tmp_path, state, text):
    with pytest.raises(ItemError, match=f"the item it: its {text}" if "gave" in text else text):
        saved(tmp_path / "x", it=Getter(state))
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_cannot_be_set_is_refused(tmp_path):
    path = saved(tmp_path / "x", get=Getter(1), torch=Torchlike(1), file=Filer(""))
    for name, target in [
        ("get", Torchlike(1)),
        ("torch", Getter(1)),
        ("file", Getter(1)),
        ("file", None),
    ]:
        with pytest.raises(ItemError, match=f"the item {name} is the state of an object"):
            flaxckpt.restore_items(path, {name: target})


def test_an_object_that_fails_is_named(tmp_path):
    class Broken(Getter):
        def get_state(self):
            raise RuntimeError("no state")

        def set_state(self, state):
            raise RuntimeError("no such shard")

    with pytest.raises(ItemError, match="the item it cannot be saved: RuntimeError: no state"):
        saved(tmp_path / "x", it=Broken(1))
    with pytest.raises(
        ItemError, match="the item it cannot be restored: RuntimeError: no such shard"
    ):
        again(tmp_path / "x", Getter(1), Broken(1))


def test_a_class_is_no_object_with_a_state(tmp_path):
    with pytest.raises(flaxckpt.errors.UnsupportedLeafError, match="the item it: the leaf"):
        saved(tmp_path / "x", it=Getter)


def test_grain_reads_it_through_orbax(tmp_path):
    import orbax.checkpoint as ocp

    it = dataset()
    taken(it)
    with flaxckpt.CheckpointManager(tmp_path / "run") as ckpt:
        ckpt.save(3, {"step": 3}, items={"data": it})
    expected, target = taken(it), dataset()
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.restore(3, args=ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(target)))
    assert taken(target) == expected
    assert (
        json.loads((tmp_path / "run/3/data/metadata").read_text())["flaxckpt"]["kind"] == "stateful"
    )


def tf_iterator(checkpoint=True):
    import tensorflow as tf
    from clu.data import dataset_iterator

    data = tf.data.Dataset.range(50).shuffle(20, seed=3).batch(4).map(lambda x: {"x": x}).repeat()
    return dataset_iterator.TfDatasetIterator(data, checkpoint=checkpoint)


def test_an_iterator_of_clu_goes_on(tmp_path):
    it = tf_iterator()
    for _ in range(3):
        next(it)
    path = saved(tmp_path / "x", data=it)
    expected = [next(it)["x"].tolist() for _ in range(8)]
    target = tf_iterator()
    next(target)
    assert flaxckpt.restore_items(path, {"data": target})["data"] is target
    assert [next(target)["x"].tolist() for _ in range(8)] == expected


def test_an_iterator_of_clu_without_checkpoints_is_refused(tmp_path):
    with pytest.raises(ItemError, match="wrote nothing. A TfDatasetIterator needs checkpoint=True"):
        saved(tmp_path / "x", data=tf_iterator(checkpoint=False))
