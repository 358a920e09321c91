"""`flaxckpt diff`."""

import ml_dtypes
import numpy as np
import pytest

import flaxckpt
from tests.cli.shell import SAMPLES

BASE = {
    "same": np.arange(6.0),
    "w": np.arange(6.0).reshape(2, 3),
    "n": 1,
    "text": "a",
    "gone": np.zeros(2),
    "cast": np.zeros(2, np.float32),
    "none": None,
}


@pytest.fixture
def two(tmp_path):
    """Two checkpoints that differ in everything."""
    other = {k: v for k, v in BASE.items() if k != "gone"}
    w = BASE["w"].copy()
    w[1, 2] = 10.0
    other |= {"w": w, "n": 3, "text": "b", "new": {"x": 1}, "none": {}}
    other["cast"] = np.zeros(2, ml_dtypes.bfloat16)
    flaxckpt.save(tmp_path / "a", BASE, items={"config": {"x": 1}, "old": {"x": 1}})
    flaxckpt.save(tmp_path / "b", other, items={"config": {"x": 2}, "ema": {"w": np.ones(1)}})
    return tmp_path / "a", tmp_path / "b"


def test_golden(two, shell):
    answer = shell("diff", *two)
    assert (answer.status, answer.err) == (1, "")
    assert answer.out.splitlines() == [
        "ONLY IN  NAME        TYPE",
        "A        gone        float64[2]",
        "A        item:old    json",
        "B        new/x       int",
        "B        item:ema/w  float64[1]",
        "B        item:ema    tree",
        "(both)   cast        float32[2] in A, bfloat16[2] in B",
        "(both)   none        none (empty) in A, dict (empty) in B",
        "CHANGED      TYPE          ELEMENTS  MAX ABS   MAX REL",
        "item:config  json            1 of 1        -         -",
        "text         str             1 of 1        -         -",
        "w            float64[2,3]    1 of 6        5       0.5",
        "n            int             1 of 1        2  0.666667",
        "2 only in A, 3 only in B, 2 of another type, 4 changed, 1 equal",
    ]


def test_the_document(two, shell):
    found, status = shell.json("diff", *two)
    assert (status, found["same"], found["equal"]) == (1, False, 1)
    assert found["only_in_a"][0] == {"name": "gone", "type": "float64[2]"}
    assert found["other_type"][0] == {"name": "cast", "a": "float32[2]", "b": "bfloat16[2]"}
    changed = {change["name"]: change for change in found["changed"]}
    assert changed["w"] == {
        "name": "w", "type": "float64[2,3]", "elements": 6, "changed_elements": 1,
        "max_abs": 5.0, "max_rel": 0.5,
    }  # fmt: skip


def test_without_values(two, shell, made):
    found, status = shell.json("diff", *two, "--no-values")
    assert (status, found["changed"], found["equal"]) == (1, [], None)
    assert shell("diff", made / "1", made / "2", "--no-values").status == 0


def test_what_is_the_same(made, shell):
    answer = shell("diff", made / "1", made / "1")
    assert answer.status == 0
    assert answer.out == "0 only in A, 0 only in B, 0 of another type, 0 changed, 7 equal\n"


def diff_of(shell, tmp_path, a, b):
    """The one change."""
    flaxckpt.save(tmp_path / "a", {"x": a}, overwrite=True)
    flaxckpt.save(tmp_path / "b", {"x": b}, overwrite=True)
    found, _ = shell.json("diff", tmp_path / "a", tmp_path / "b")
    changes = [(c["changed_elements"], c["max_abs"], c["max_rel"]) for c in found["changed"]]
    return changes[0] if changes else None


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([np.nan, 1.0], [np.nan, 1.0], None),
        ([0.0], [-0.0], None),
        ([np.inf], [np.inf], None),
        ([np.nan, 1.0], [2.0, 1.0], (1, "nan", "nan")),
        ([np.inf], [1.0], (1, "inf", "nan")),
        ([2**62], [2**62 + 1], (1, 1.0, pytest.approx(2.0**-62))),
        ([-(2**63)], [2**63 - 1], (1, pytest.approx(2.0**64), pytest.approx(2.0))),
        ([True, False], [True, True], (1, 1.0, 1.0)),
        ([1j], [-1j], (1, 2.0, 2.0)),
        (["a", "b"], ["a", "c"], (1, None, None)),
    ],
)
def test_values(a, b, expected, shell, tmp_path):
    assert diff_of(shell, tmp_path, np.array(a), np.array(b)) == expected


def test_values_of_other_types(shell, tmp_path):
    a = np.array([1, 2], ml_dtypes.bfloat16)
    assert diff_of(shell, tmp_path, a, a + a) == (2, 2.0, 0.5)
    i4 = np.array([-8, 7], ml_dtypes.int4)
    assert diff_of(shell, tmp_path, i4, i4[::-1].copy()) == (2, 15.0, pytest.approx(15 / 8))
    date = np.array(["2026-01-01"], "M8[D]")
    assert diff_of(shell, tmp_path, date, date + 1) == (1, None, None)
    assert diff_of(shell, tmp_path, 2**70, 2**71) == (1, None, None)
    assert diff_of(shell, tmp_path, 1, 2**70) == (1, None, None)


def test_arrays_of_other_chunks(shell, tmp_path, monkeypatch):
    from flaxckpt import comparing

    monkeypatch.setattr(comparing, "BLOCK_BYTES", 1000)
    values = np.random.default_rng(0).normal(size=(70, 90))
    flaxckpt.save(tmp_path / "a", {"w": values}, options=flaxckpt.Options(chunk_bytes=5000))
    changed = values.copy()
    changed[33, 44:50] += 1
    flaxckpt.save(tmp_path / "b", {"w": changed})
    (change,) = shell.json("diff", tmp_path / "a", tmp_path / "b")[0]["changed"]
    assert (change["changed_elements"], change["max_abs"]) == (6, pytest.approx(1.0))


def test_other_formats(shell, tmp_path):
    sample = SAMPLES / "t5x/checkpoint_1"
    flaxckpt.save(tmp_path / "x", flaxckpt.restore(sample))
    assert shell("diff", sample, tmp_path / "x").status == 0
