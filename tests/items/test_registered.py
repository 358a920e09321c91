"""Items of the user's own types."""

import dataclasses

import pytest

import flaxckpt
from flaxckpt.errors import ItemError
from flaxckpt.items import item_kinds
from tests.items.helpers import again, saved


@dataclasses.dataclass
class Vocabulary:
    words: list

    def get_state(self):
        raise AssertionError("a registered handler goes first")

    set_state = get_state


@pytest.fixture(autouse=True)
def _registry(monkeypatch):
    monkeypatch.setattr(item_kinds, "_REGISTERED", {})


def register(encode=None):
    def decode(files, target):
        words = files["words/a.txt"].decode().split()
        if target is None:
            return Vocabulary(words)
        target.words = words
        return target

    encode = encode or (lambda v: {"words/a.txt": " ".join(v.words).encode(), "empty": b""})
    flaxckpt.register_item_handler("vocabulary", Vocabulary, encode, decode)


def test_it_is_saved_and_restored(tmp_path):
    register()
    value, target = Vocabulary(["a", "b"]), Vocabulary([])
    assert again(tmp_path / "x", value) == value
    assert again(tmp_path / "x", value, target) is target
    assert target == value
    assert (tmp_path / "x" / "it" / "files" / "words" / "a.txt").read_text() == "a b"


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", ".", "a//b", 3, "a\\b"])
def test_a_file_name_that_leads_elsewhere_is_refused(tmp_path, name):
    register(lambda value: {name: b""})
    with pytest.raises(ItemError, match="the item it: its handler 'vocabulary' gave a file"):
        saved(tmp_path / "x", it=Vocabulary([]))
    assert list(tmp_path.iterdir()) == []


def test_contents_must_be_bytes(tmp_path):
    register(lambda value: {"a": "text"})
    with pytest.raises(ItemError, match="type str"):
        saved(tmp_path / "x", it=Vocabulary([]))


def test_without_the_handler_the_error_says_what_to_register(tmp_path):
    register()
    path = saved(tmp_path / "x", it=Vocabulary(["a"]), config=[1])
    item_kinds._REGISTERED.clear()
    with pytest.raises(ItemError, match=r"register_item_handler\('vocabulary'"):
        flaxckpt.restore_items(path, {"it": None})
    assert flaxckpt.restore_items(path, {"config": None}) == {"config": [1]}
    assert flaxckpt.verify(path)


def test_a_kind_of_our_own_cannot_be_registered():
    with pytest.raises(ValueError, match="'json' is a kind of flaxckpt's own"):
        flaxckpt.register_item_handler("json", dict, dict, dict)
