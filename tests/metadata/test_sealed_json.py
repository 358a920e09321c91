from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flaxckpt.errors import CorruptCheckpointError
from flaxckpt.metadata.sealed_json import seal, unseal

SMALL = {"tree": ["a}", {}], "custom": {"note": "}}", "flaxckpt": {"format": 1, "meshes": []}}}
TEXT = seal(SMALL)
_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


def without_seal(data: dict) -> dict:
    """`data` without the member that `seal` added."""
    del data["flaxckpt"]["crc32c"]
    return data


@given(st.dictionaries(st.text(max_size=3), _json), _json)
def test_unseal_gives_back_what_was_sealed(data, inner):
    data = {k: v for k, v in data.items() if k != "flaxckpt"} | {"flaxckpt": {"x": inner}}
    # When `inner` ends in an object, the seal lies in there; so a member follows it.
    data["flaxckpt"]["last"] = 0
    assert without_seal(unseal(seal(data), "file")) == data


def test_every_changed_byte_is_found():
    for at in range(len(TEXT)):
        for value in range(256):
            if value != TEXT[at]:
                with pytest.raises(CorruptCheckpointError):
                    unseal(TEXT[:at] + bytes([value]) + TEXT[at + 1 :], "file")


def test_every_truncation_is_found():
    for end in range(len(TEXT)):
        with pytest.raises(CorruptCheckpointError):
            unseal(TEXT[:end], "file")


def test_every_lost_beginning_is_found():
    for start in range(1, len(TEXT)):
        with pytest.raises(CorruptCheckpointError):
            unseal(TEXT[start:], "file")


@pytest.mark.parametrize("tail", [b"}", b" ", b"\n", b"\0", b',"crc32c":"00000000"}', TEXT])
def test_anything_appended_is_found(tail):
    with pytest.raises(CorruptCheckpointError):
        unseal(TEXT + tail, "file")


@pytest.mark.parametrize("text", [b"", b"\0" * 512, b"{}", b"null", b"\xff\xfe", b'{"a":1}'])
def test_what_was_never_sealed_is_refused(text):
    with pytest.raises(CorruptCheckpointError, match="it does not end in a checksum"):
        unseal(text, "file")


def test_a_sealed_text_is_json_with_the_checksum_as_its_last_member():
    data = orjson.loads(TEXT)
    assert list(data["custom"]["flaxckpt"]) == ["format", "meshes", "crc32c"]
    assert TEXT.endswith(b'"}}}')


def test_the_written_form_never_changes():
    assert seal({"a": {"b": 1}}) == b'{"a":{"b":1,"crc32c":"ec65066f"}}'


def test_the_error_names_the_file_and_both_checksums():
    text = TEXT.replace(b'"a}"', b'"b}"')
    with pytest.raises(CorruptCheckpointError) as caught:
        unseal(text, "run/1/_METADATA")
    assert "run/1/_METADATA is damaged: its checksum is " in str(caught.value)
    assert f"stored is {orjson.loads(TEXT)['custom']['flaxckpt']['crc32c']}" in str(caught.value)


def test_a_sealed_list_is_refused():
    sealed = b'[{"a":1'
    text = seal({"a": 1})
    assert unseal(text, "file")["a"] == 1
    with pytest.raises(CorruptCheckpointError):
        unseal(sealed + text[text.index(b',"crc32c"') :], "file")
