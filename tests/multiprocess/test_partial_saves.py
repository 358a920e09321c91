"""The processes of a job save one checkpoint in several calls."""

import json
import os

import numpy as np

import flaxckpt
from flaxckpt import PartialSave, errors
from tests import cluster
from tests.multiprocess import jobs, states


def metadata_of(path):
    """What a checkpoint says of its tree, but for what differs from save to save."""
    found = json.loads((path / "state/_METADATA").read_text())["flaxckpt"]
    return {name: found[name] for name in ("structure", "leaves", "meshes")}


def partial_jobs(context, directory):
    """What becomes of a save by all, of parts that are refused, and of a block that raises."""
    state, options = jobs.state(5), states.options()
    refused = []
    with PartialSave(f"{directory}/whole", options=options) as saving:
        for name in ("rows", "text", "whole"):
            saving.add({name: state[name]})
        try:
            saving.add({"rows": state["rows"]})
        except errors.UnsupportedKeyError as error:
            refused.append(str(error)[:32])
        saving.add({"host": state["host"], "step": state["step"]})
    jobs.check(flaxckpt.restore(f"{directory}/whole", jobs.state(0)), 5)
    try:
        PartialSave(f"{directory}/whole", options=options).__enter__()
    except errors.StepExistsError:
        refused.append("exists")
    for victim in (0, 1):
        try:
            with PartialSave(f"{directory}/failed", options=options) as saving:
                saving.add({"rows": state["rows"]})
                if context.index == victim:
                    raise KeyError("the user's")
        except (KeyError, errors.FlaxckptError, OSError, RuntimeError) as error:
            refused.append((type(error).__name__, str(error)))
    with PartialSave(f"{directory}/failed", options=options) as saving:
        saving.add({"rows": state["rows"] + 1})
        saving.add({"same": np.arange(3)})
    return refused


def test_the_processes_of_a_job_save_in_parts_together(tmp_path):
    results = cluster.run(partial_jobs, 2, tmp_path, local_devices=2)
    for result in results:
        overlap, exists, *failed = result.value
        assert (overlap, exists) == ("two parts have something at rows", "exists")
        for victim, (kind, text) in enumerate(failed):
            if result.index == victim:
                assert (kind, text) == ("KeyError", repr("the user's"))
            else:
                assert kind == "ProcessFailedError"
                assert f"failed on process {victim}" in text
    assert sorted(os.listdir(tmp_path)) == ["failed", "whole"]
    assert flaxckpt.verify(tmp_path / "whole", strict=True).problems == ()
    jobs.check(flaxckpt.restore(tmp_path / "whole", as_numpy=True), 5)
    assert sorted(flaxckpt.restore(tmp_path / "failed")) == ["rows", "same"]
    # It is the checkpoint that the same job would have written at once.
    cluster.run(save_at_once, 2, tmp_path / "at once", local_devices=2)
    assert metadata_of(tmp_path / "whole") == metadata_of(tmp_path / "at once")


def save_at_once(context, path):
    flaxckpt.save(path, jobs.state(5), options=states.options())


def add_another_part(context, path):
    """Process 1 gives another part than process 0."""
    try:
        with PartialSave(path, options=states.options()) as saving:
            saving.add({"a": jobs.state(1)["rows"]})
            saving.add({"n": context.index})
    except errors.FlaxckptError as error:
        return type(error).__name__, str(error)
    return None


def test_processes_that_add_different_parts_are_told(tmp_path):
    (tmp_path / "here").mkdir()
    for result in cluster.run(add_another_part, 2, tmp_path / "here/x"):
        assert result.value is not None
        assert result.value[0] == "ProcessFailedError"
    assert os.listdir(tmp_path / "here") == []
