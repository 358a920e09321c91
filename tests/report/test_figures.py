"""The plots, from data that is made up."""

import math

import numpy as np
import pytest

from flaxckpt.comparing import SubtreeChanges
from flaxckpt.report import figures as module
from flaxckpt.report.figures import (
    TEMPLATE,
    changes_plot,
    costs,
    metrics,
    sizes,
    subtrees,
    timeline,
)
from tests.report import sample

LEAVES = {"params/a/w": 800, "params/b/w": 100, "opt/mu": 900, "step": 0}
CHANGES = SubtreeChanges([(1, 2), (2, 3)], ["", "a"], [[0.1, 0.0], [math.inf, math.nan]], 1)


def traces(figure):
    return {trace.get("name"): trace for trace in figure["data"]}


def coloured(value, colors):
    """As the page does it; a colour that the page has not is an error."""
    if isinstance(value, dict):
        return {key: coloured(inner, colors) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [coloured(inner, colors) for inner in value]
    return colors[value[1:]] if isinstance(value, str) and value.startswith("$") else value


@pytest.mark.parametrize("colors", [module.LIGHT, module.DARK])
def test_plotly_knows_all_that_is_asked_of_it(colors):
    objects = pytest.importorskip("plotly.graph_objects")
    facts = sample.facts()
    plots = [timeline(facts), metrics(facts), costs(facts), sizes(3, LEAVES), changes_plot(CHANGES)]
    for plot in plots:
        assert plot.figures
        for figure in plot.figures.values():
            objects.Figure(coloured(figure, colors))
    objects.Figure(layout={"template": coloured(TEMPLATE, colors)})


def test_both_themes_have_the_same_colours():
    assert module.LIGHT.keys() == module.DARK.keys()


def test_the_timeline_has_a_lane_for_each_kind():
    found = timeline(sample.facts(has_history=True))
    lanes = traces(found.figures["by step"])
    assert {name: lane["x"] for name, lane in lanes.items()} == {
        "kept": [10, 30, 40],
        "best": [40],
        "pinned": [10],
        "damaged": [50],
        "deleted": [0, 20],
    }
    assert traces(found.figures["by time"])["best"]["x"] == ["2025-10-09 08:57:20.000000"]
    assert found.text == "4 steps kept, 2 deleted."


def test_the_timeline_says_that_there_is_no_history():
    assert "records no earlier saves" in timeline(sample.facts(saves=[])).text


def test_the_metric_has_its_best_marked():
    found = metrics(sample.facts())
    curve = traces(found.figures["loss"])
    assert (curve["best"]["x"], curve["best"]["y"]) == ([40], [0.2])
    assert (curve["kept"]["x"], curve["deleted"]["x"]) == ([10, 30, 40], [0, 20])
    assert found.text == "Of the kept steps, 40 has the smallest loss: 0.2."


def test_metrics_of_which_none_decides_have_no_best():
    found = metrics(sample.facts(metric=None, unranked="Pass --metric."))
    assert "best" not in traces(found.figures["loss"])
    assert "--metric" in found.text
    assert metrics(sample.facts(steps=sample.facts().steps[-1:])).figures == {}


def test_the_costs_are_bars_beside_the_time_trained():
    found = costs(sample.facts())
    bars = traces(found.figures["times (logarithmic)"])
    assert bars["loop blocked"]["y"] == [0.5] * 5
    assert bars["until committed"]["y"] == [2.0] * 5
    assert bars["trained before it"]["y"] == [None, 59.5, 59.5, 59.5, 59.5]
    (shares,) = found.figures["share of the loop's time"]["data"]
    np.testing.assert_allclose(shares["y"], [0.5 / 60] * 4)
    assert found.text == "Saves blocked the loop for 2 s of 4 min: 0.83%."
    assert costs(sample.facts(saves=[])).figures == {}


def test_the_treemap_adds_up():
    (found,) = sizes(3, LEAVES).figures["sizes"]["data"]
    values = dict(zip(found["ids"], found["values"], strict=True))
    assert values == {
        "/": 1800,
        "/params": 900,
        "/params/a": 800,
        "/params/a/w": 800,
        "/params/b": 100,
        "/params/b/w": 100,
        "/opt": 900,
        "/opt/mu": 900,
    }
    for id_, value in values.items():
        below = [values[i] for i, p in zip(found["ids"], found["parents"], strict=True) if p == id_]
        assert not below or sum(below) == value
    assert sizes(3, {"step": 0}).figures == {}


def test_a_leaf_that_is_the_whole_state():
    (found,) = sizes(3, {"": 8}).figures["sizes"]["data"]
    assert (found["ids"], found["parents"]) == (["/"], [""])


def test_of_too_many_leaves_there_are_subtrees():
    leaves = {f"a/b{i % 10}/c{i}": 1 for i in range(1000)}
    found = subtrees(leaves, 100)
    assert len(found) == 12
    assert {(s.nbytes, s.leaves) for s in found if s.name.startswith("a/")} == {(100, 100)}


def test_the_heatmap_has_colours_by_logarithm_and_says_what_has_none():
    found = changes_plot(CHANGES)
    (heat,) = found.figures["changes"]["data"]
    assert heat["z"] == [[pytest.approx(-1), None], [None, None]]
    assert [[cell[1] for cell in row] for row in heat["customdata"]] == [
        ["1 → 2: 10%", "2 → 3: unchanged"],
        ["1 → 2: all zeros before", "2 → 3: cannot be compared"],
    ]
    assert "several shapes: 1." in found.text
    assert changes_plot(SubtreeChanges([(1, 2)], [], [])).figures == {}


def test_names_are_no_markup():
    (found,) = sizes(3, {"<b>bold": 8}).figures["sizes"]["data"]
    assert found["labels"][1] == "&lt;b&gt;bold"
