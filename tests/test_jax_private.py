"""Each private name of jax that flaxckpt uses, and what it must do.

A new version of jax breaks these tests first. What breaks then is in flaxckpt/jax_private.py.
"""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import flaxckpt
from flaxckpt import jax_private
from tests import cluster

PACKAGE = Path(flaxckpt.__file__).parent
# Names of jax that are private without an underscore: its documentation lacks them.
UNDOCUMENTED = {"convert_element_type_p", "batched_device_put", "global_state", "ShapedArray"}


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_a_key_dtype_names_its_implementation(impl):
    """`dtype._impl.name`, of a concrete and of an abstract key."""
    key = jax.random.key(0, impl=impl)
    abstract = jax.eval_shape(lambda: key)
    assert jax_private.key_impl_name(key.dtype) == jax_private.key_impl_name(abstract.dtype) == impl
    assert str(jax.random.key_impl(key)) == impl


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "complex64"])
def test_an_array_becomes_weak_and_nothing_else_changes(dtype):
    """`jax.lax.convert_element_type_p.bind`, also of an array on several devices."""
    sharding = NamedSharding(jax.make_mesh((4,), ("x",)), PartitionSpec("x"))
    for array in (jnp.arange(8, dtype=dtype), jax.device_put(np.arange(8).astype(dtype), sharding)):
        weak = jax_private.as_weak(array)
        assert weak.weak_type
        assert not array.weak_type
        assert (weak.dtype, weak.sharding) == (array.dtype, array.sharding)
        np.testing.assert_array_equal(weak, array)


def test_a_weak_array_gives_way_to_other_types():
    array, half = jnp.ones(2, jnp.float32), jnp.ones(2, jnp.float16)
    assert (array + half).dtype == jnp.float32
    assert (jax_private.as_weak(array) + half).dtype == jnp.float16


@pytest.mark.parametrize("committed", [True, False])
def test_arrays_on_a_device_are_those_of_device_put(committed):
    """`pxla.batched_device_put` and `ShapedArray`."""
    device = jax.devices()[3 if committed else 0]
    sharding = SingleDeviceSharding(device) if committed else None
    values = [np.arange(3, dtype=np.float32), np.zeros((), np.int32), np.ones((2, 0), bool)]
    found = jax_private.batched_device_put(values, device, committed=committed)
    for ours, jaxs in zip(found, jax.device_put(values, sharding), strict=True):
        assert (ours.aval, ours.sharding) == (jaxs.aval, jaxs.sharding)
        assert ours.committed is jaxs.committed is committed
        np.testing.assert_array_equal(ours, jaxs)


def use_client(context):
    client = jax_private.coordination_client()
    assert all(hasattr(client, name) for name in jax_private.COORDINATION_METHODS)
    client.key_value_set("a/b", "c")
    with pytest.raises(jax.errors.JaxRuntimeError, match="ALREADY_EXISTS"):
        client.key_value_set("a/b", "d")
    with pytest.raises(jax.errors.JaxRuntimeError, match="NOT_FOUND"):
        client.key_value_try_get("a/c")
    with pytest.raises(jax.errors.JaxRuntimeError, match="DEADLINE_EXCEEDED"):
        client.blocking_key_value_get("a/c", 10)
    found = client.key_value_try_get("a/b"), client.blocking_key_value_get("a/b", 10)
    below = client.key_value_dir_get("a/")
    client.key_value_delete("a/")
    return found, below, client.key_value_dir_get("a/")


def test_the_coordination_service_keeps_values():
    """`jax._src.distributed.global_state.client`, its five methods, and the texts of its errors."""
    (result,) = cluster.run(use_client, 1)
    assert result.value == (("c", "c"), [("a/b", "c")], [])


def test_without_a_service_there_is_no_client():
    assert jax_private.coordination_client() is None


def test_a_client_that_lacks_a_method_is_not_used(monkeypatch):
    """Then processes meet in the storage: see tests/multiprocess/test_saves.py."""
    from jax._src.distributed import global_state

    complete = dict.fromkeys(jax_private.COORDINATION_METHODS)
    monkeypatch.setattr(global_state, "client", type("Client", (), complete))
    assert jax_private.coordination_client() is global_state.client
    del complete["key_value_try_get"]
    monkeypatch.setattr(global_state, "client", type("Client", (), complete))
    assert jax_private.coordination_client() is None


def private_names(source):
    """The private names of jax that a module imports or reads."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jax":
            parts = [*node.module.split("."), *(alias.name for alias in node.names)]
            yield from (p for p in parts if p.startswith("_") or p in UNDOCUMENTED)
        elif isinstance(node, ast.Attribute):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            is_jax = isinstance(root, ast.Name) and root.id in ("jax", "jnp")
            if (
                node.attr in UNDOCUMENTED
                or node.attr == "_impl"
                or (is_jax and node.attr.startswith("_"))
            ):
                yield node.attr


def test_the_search_finds_private_names():
    found = "import jax\nfrom jax._src.core import ShapedArray\njax._src.x\ny._impl\njax.numpy.a"
    assert list(private_names(found)) == ["_src", "ShapedArray", "_impl", "_src"]


def test_no_other_module_uses_private_names():
    modules = [path for path in PACKAGE.rglob("*.py") if path.stem != "jax_private"]
    assert len(modules) > 50
    found = {str(path): list(private_names(path.read_text())) for path in modules}
    assert {path: names for path, names in found.items() if names} == {}
