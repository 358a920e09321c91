"""Items of several processes: each has its own state of the data, and the rest is the same."""

import jax
import numpy as np
import pytest

import flaxckpt
from flaxckpt import Every
from flaxckpt.errors import ItemError, ProcessFailedError
from tests import cluster, stores
from tests.items.test_manager_items import Counter
from tests.multiprocess import jobs

pytestmark = pytest.mark.slow

CONFIG = {"lr": 0.1}


def raised(call, *args, **kwargs):
    """The name of the class and the text of what `call` raises."""
    try:
        call(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the test judges it
        return type(error).__name__, str(error)
    return None


def items(index, step=1):
    return {
        "data": Counter(10 * index + step),
        "config": CONFIG,
        "rng": np.random.default_rng(index),
        "same": np.random.default_rng(5),
        "old": np.random.RandomState(5),
        "ema": jobs.state(step),
        "key": jax.random.key(3),
    }


def save_and_restore(context, url, options, local):
    settings = {"local": local / f"host{context.index}", "local_every": Every(steps=1)}
    with jobs.manager(url, options, save_every=Every(steps=2), **settings) as ckpt:
        for step in (2, 3):
            ckpt(step, jobs.state(step), items=items(context.index, step))
    with jobs.manager(url, options, **settings) as ckpt:
        found = []
        for step in (3, 2):
            it, rng = Counter(), np.random.default_rng(9)
            target = jobs.state(0)
            wanted = {"data": it, "rng": rng, "config": None, "old": None}
            wanted |= {"ema": target, "key": jax.random.key(0), "same": None}
            restored = ckpt.restore(target, step=None if step == 3 else 2, items=wanted)
            jobs.check(restored, step)
            jobs.check(ckpt.items["ema"], step)
            assert ckpt.items["config"] == CONFIG
            assert (ckpt.items["key"] == jax.random.key(3)).all()
            assert ckpt.items["same"].random() == np.random.default_rng(5).random()
            assert ckpt.items["old"].random_sample() == np.random.RandomState(5).random_sample()
            assert rng.random() == np.random.default_rng(context.index).random()
            found.append((it.at, str(ckpt.report.path)))
        return found


@pytest.mark.parametrize("place", ["disk", "marked", "s3"])
def test_each_process_has_its_own_state_back(tmp_path, place):
    is_marked = place == "marked"
    with stores.opened("disk" if is_marked else place, tmp_path) as store:
        url, options = store.url("run"), store.options(atomic_rename=not is_marked)
        arguments = (url, options, tmp_path / "local")
        results = cluster.run(save_and_restore, 2, *arguments, env=store.env)
        for index, result in enumerate(results):
            (local, path), (of_run, run_path) = result.value
            assert (local, of_run) == (10 * index + 3, 10 * index + 2)
            assert f"host{index}" in path
            assert run_path.endswith("/2")
        assert store.strays("run") == []
        step = f"{url}/2"
        report = flaxckpt.verify(step, options=options)
        assert report, report.problems
        # One process: what is each one's own is refused, what is the same on all is not.
        with pytest.raises(ItemError, match="per-process state of 2 processes.* this job has 1"):
            flaxckpt.restore_items(step, {"data": Counter()}, options)
        with pytest.raises(ItemError, match="item rng .* per-process state of 2 processes"):
            flaxckpt.restore_items(step, {"rng": None}, options)
        found = flaxckpt.restore_items(step, {"same": None, "config": None, "ema": None}, options)
        assert found["same"].random() == np.random.default_rng(5).random()
        jobs.check(found["ema"], 2)


def save_different(context, directory):
    index, found = context.index, []
    differing = [
        {"config": {"a": index}},
        {"ema": {"host": np.full(3, index)}},
        {"config": 1} if index else {},
        {"it": Counter()} if index else {"it": {"a": 1}},
        {"config": {"a": float("nan")}} if index else {"config": {"a": 1.0}},
    ]
    for number, wanted in enumerate(differing):
        path = f"{directory}/{number}"
        found.append(raised(flaxckpt.save, path, jobs.state(1), items=wanted))
    return found


def test_what_must_be_the_same_and_is_not_is_refused(tmp_path):
    results = cluster.run(save_different, 2, tmp_path)
    for result in results:
        texts = [f"{kind}: {text}" for kind, text in result.value]
        for text, name in zip(texts, ["config", "ema", "config", "it", "config"], strict=True):
            assert text.startswith((ProcessFailedError.__name__, ItemError.__name__))
            assert name in text
    assert list(tmp_path.iterdir()) == []


def die_after_writing(context, url, options):
    """Process 1 dies when its own files are there; process 0 gives up."""
    from flaxckpt.saving import writing

    real = writing._write_item_files

    def dying(*args):
        real(*args)
        context.die()

    if context.index == 1:
        writing._write_item_files = dying
    with jobs.manager(url, options) as ckpt:
        ckpt.save(1, jobs.state(1), wait=True, items=items(context.index))


@pytest.mark.parametrize("place", ["disk", "s3"])
def test_what_a_dead_process_left_is_removed(tmp_path, place):
    with stores.opened(place, tmp_path) as store:
        url, options = store.url("run"), store.options(timeout_secs=2)
        cluster.run(die_after_writing, 2, url, options, env=store.env, check=False, grace=15)
        if place == "s3":  # and what it had still on its way comes when all is cleaned up
            name = "process_1-of-2-0123456789ab.json"
            store.write("run", f"1/data/{name}", b"late")
            store.write("run", "1/ema/ocdbt.process_1-0123456789ab/d/aa", b"late")
        with jobs.manager(url, store.options()) as ckpt:
            assert ckpt.steps() == []
            ckpt.save(1, {"a": 1}, items={"data": Counter(5)}, wait=True)
            assert ckpt.restore(items={"data": None}) == {"a": 1}
            assert ckpt.items["data"] == {"at": 5}
        assert store.strays("run") == []
        assert flaxckpt.verify(f"{url}/1", options=store.options())
