"""Orbax reads what several processes have saved to a bucket."""

import warnings

import jax
import numpy as np
import pytest

from tests import cluster, stores
from tests.multiprocess import jobs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import orbax.checkpoint as ocp

pytestmark = pytest.mark.filterwarnings("ignore")


def save(context, url, options):
    with jobs.manager(url, options) as ckpt:
        arrays = {name: leaf for name, leaf in jobs.state(3).items() if name != "text"}
        ckpt.save(3, arrays)  # Orbax takes no string as a target


@pytest.mark.parametrize("kind", stores.BUCKETS)
def test_a_step_that_was_copied_out_of_a_bucket(kind, tmp_path):
    with stores.opened(kind, None) as store:
        cluster.run(save, 2, store.url("run"), store.options(), env=store.env)
        for name in store.objects("run"):
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(store.read("run", name))
    assert len(list((tmp_path / "3/state").glob("ocdbt.process_*"))) == 2
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=where)
        if name != "host"
        else value
        for name, value in jobs.values(0).items()
    }
    restored = ocp.StandardCheckpointer().restore(tmp_path / "3/state", target | {"step": 0})
    assert restored["step"] == 3
    for name, value in jobs.values(3).items():
        np.testing.assert_array_equal(np.asarray(restored[name]), value)
