"""The model of large checkpoints: what it counts and fits, and a simulated save that is real."""

import json

import numpy as np
import pytest

import flaxckpt
from benchmarks import (
    process,
    scale_fit,
    scale_model,
    scale_parts,
    scale_pieces,
    scale_predict,
    scale_report,
    scale_states,
)
from benchmarks.scale_states import MODELS, Layout
from tests.gcs_server import GcsServer

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("name", "params"), [("8B", 8.03e9), ("70B", 70.55e9), ("405B", 405.9e9)])
def test_the_models_have_the_parameters_that_they_are_known_for(name, params):
    model = MODELS[name]
    assert model.params == pytest.approx(params, rel=1e-3)
    for scanned in (False, True):
        sizes = [size * times for size, times, _ in scale_states.arrays(model, scanned)]
        assert sum(sizes) == model.params


def test_a_leaf_of_every_layer_costs_a_chunk_on_every_device():
    found = scale_states.count(MODELS["405B"], Layout(512, scanned=False))
    matrices, copies, devices = 126 * 7 + 2, 4, 512 * 8
    assert found["leaves"] == copies * (126 * 9 + 3)
    assert found["entries"] == copies * (matrices * devices + 126 * 2 + 1) + found["leaves"]
    scanned = scale_states.count(MODELS["405B"], Layout(512, scanned=True))
    assert scanned["leaves"] == copies * 12
    assert scanned["stored"] == found["stored"] == 14 * MODELS["405B"].params


def test_sharding_is_left_out_of_large_states_and_the_plan_is_made_of_few_pairs():
    names = [*scale_fit.FORMS, *(f"bucket_{n}_requests" for n in ("leader", "restore", "commit"))]
    fitted = {name: {"1": 1.0} for name in names}
    rows = {
        scanned: scale_predict.predict(
            MODELS["405B"], Layout(512, scanned), fitted, scale_predict.Rates()
        )
        for scanned in (False, True)
    }
    assert rows[False]["sharding_bytes"] == 0
    assert rows[True]["sharding_bytes"] == rows[True]["leaves"]
    assert [rows[scanned]["plan_secs"] for scanned in (False, True)] == [8, 9]


def test_larger_chunks_are_fewer():
    few, many = (
        scale_states.count(MODELS["70B"], Layout(8, scanned=True, chunk_bytes=size << 20))
        for size in (64, 8)
    )
    assert few["entries"] < many["entries"] / 4


POINTS = [
    {"leaves": n, "processes": p, "entries": n * p, "merge_secs": 0.01 + 2e-5 * n + 3e-6 * n * p}
    for n in (10, 100, 1000)
    for p in (2, 8, 64)
]


def test_a_fit_finds_the_coefficients_and_says_how_far_it_is_off():
    found = scale_fit.fit("merge_secs", POINTS)
    expected = {"1": 0.01, "leaves": 2e-5, "processes": 0, "entries": 3e-6}
    assert found == pytest.approx(expected, abs=1e-9)
    exact = POINTS[-1]
    twice = {**exact, "merge_secs": 2 * exact["merge_secs"]}
    assert scale_fit.errors("merge_secs", POINTS, [exact, twice]) == pytest.approx([0, -0.5])


def test_a_fit_never_has_a_negative_coefficient():
    falling = [{"processes": p, "open_secs": 1 / p} for p in (1, 2, 4)]
    assert min(scale_fit.fit("open_secs", falling).values()) >= 0


def test_the_numbers_in_the_report_are_those_of_its_fit():
    found = json.loads((scale_model.FOLDER / "scaling.json").read_text())
    rates = scale_predict.Rates(**found["rates"])
    again = scale_model.computed(found["measured"], rates, found["known"], found["machine"])
    assert _rounded(again) == _rounded(found)
    assert (scale_model.FOLDER / "SCALING.md").read_text() == scale_report.markdown(found)


def _rounded(value):
    """`value` without the last digits of its numbers, which depend on the machine."""
    return json.loads(json.dumps(value), parse_float=lambda text: f"{float(text):.6g}")


def test_what_takes_longest_beside_the_data_is_named():
    row = {"restore_data_secs": 2.0, "restore_index_secs": 8.0, "restore_opening_secs": 1.0}
    assert scale_predict.bottleneck(row, "restore") == ("index", 4.0)


def test_what_simulated_processes_save_is_a_checkpoint(tmp_path):
    found = scale_pieces.simulate(str(tmp_path), 3, 9)
    restored = flaxckpt.restore(tmp_path / "0", as_numpy=True)
    for n in range(9):
        kernel = restored["opt_state"][f"layers_{n:04d}"]["mu"]["kernel"]
        rows = np.arange(3, dtype="f4")[:, None] if n % scale_pieces.REPLICATED else np.zeros(1)
        assert np.array_equal(kernel, np.broadcast_to(rows, kernel.shape))
    # Of each of seven sharded leaves three chunks, of two replicated ones one; the attempt.
    assert (found["chunks"], found["entries"]) == (7 * 3 + 2, 7 * 3 + 2 + 9 + 1)
    measured = {piece for piece in scale_fit.FORMS if piece in found}
    assert {"merge_secs", "leader_bytes", "index_secs", "metadata_bytes"} <= measured
    assert found["merge_secs"] > 0


def test_the_requests_of_process_0_are_those_that_a_bucket_saw(monkeypatch):
    with GcsServer() as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        found = process.call(scale_pieces.lead, "gs://bkt/run/0", 2, 4)
        names = [r.query.get("name", "") + r.path for r in server.log]
        assert any("ocdbt.process_1" in name for name in names)
    assert 0 < found["leader_requests"] < len(server.log)


def test_a_transaction_is_a_file(tmp_path):
    found = scale_parts.commits(str(tmp_path), 3)
    assert found["transactions"] == 3
    assert found["commit_files"] == 4  # and the manifest
