"""Protocol buffers, which nobody needs to have."""

import pytest

import flaxckpt
from flaxckpt.errors import ItemError
from tests.items.helpers import again, saved
from tests.processes import run_fresh

struct_pb2 = pytest.importorskip("google.protobuf.struct_pb2")
timestamp_pb2 = pytest.importorskip("google.protobuf.timestamp_pb2")
descriptor_pb2 = pytest.importorskip("google.protobuf.descriptor_pb2")


def message(**values):
    made = struct_pb2.Struct()
    made.update(values)
    return made


def test_a_message_is_restored_into_its_class_or_an_object(tmp_path):
    value = message(rate=0.1, name='a "quoted" β\n', nested={"on": True}, tiny=5e-324)
    assert again(tmp_path / "x", value, struct_pb2.Struct) == value
    target = message(other=1)
    assert again(tmp_path / "x", value, target) is target
    assert target == value
    assert (tmp_path / "x" / "it" / "proto.pbtxt").exists()


@pytest.mark.parametrize("target", [None, timestamp_pb2.Timestamp, timestamp_pb2.Timestamp(), {}])
def test_another_target_is_refused(tmp_path, target):
    with pytest.raises(ItemError, match="the item it is a message google.protobuf.Struct. Give"):
        again(tmp_path / "x", message(a=1), target)


def test_what_text_format_loses_is_refused(tmp_path):
    unknown = timestamp_pb2.Timestamp()
    unknown.MergeFromString(descriptor_pb2.FileDescriptorProto(package="p").SerializeToString())
    with pytest.raises(ItemError, match="the item it: it does not survive a text-format"):
        saved(tmp_path / "x", it=unknown)
    assert list(tmp_path.iterdir()) == []


def test_nothing_imports_protobuf_for_those_who_have_no_message(tmp_path):
    code = """
        import sys, numpy as np, flaxckpt
        flaxckpt.save(sys.argv[1], {}, items={"a": {"b": 1}, "c": np.arange(3)})
        flaxckpt.restore_items(sys.argv[1], {"a": None, "c": None})
        print([name for name in sys.modules if name.startswith("google.protobuf")])
        from jax._src import xla_bridge
        print(xla_bridge.backends_are_initialized())
    """
    status, out, err = run_fresh(code, tmp_path / "x")
    assert status == 0, err
    assert out == "[]\nFalse\n"


def test_a_message_is_nothing_that_a_restore_sets_before_all_is_read(tmp_path):
    path = saved(tmp_path / "x", a=message(x=1), b=message(x=2))
    target = message(before=True)
    file = path / "b" / "proto.pbtxt"
    file.write_bytes(b"?" + file.read_bytes()[1:])
    with pytest.raises(flaxckpt.errors.CorruptCheckpointError, match="the item b .* checksum"):
        flaxckpt.restore_items(path, {"a": target, "b": struct_pb2.Struct})
    assert target == message(before=True)
