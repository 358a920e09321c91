"""The page of a real run, also in a real browser."""

import argparse
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import flaxckpt
from flaxckpt.cli import report as command
from flaxckpt.cli.command import CliError, Output, add_common
from flaxckpt.report.figures import sizes, timeline
from flaxckpt.report.page import page, write_report
from flaxckpt.run.run import Run
from tests import stores
from tests.cli.shell import arguments
from tests.report import browser, sample
from tests.stores import at

pytestmark = pytest.mark.slow

IMAGE = Path(__file__).parents[2] / "docs" / "images" / "report.png"
SCREENSHOT = "FLAXCKPT_SCREENSHOT"

SELECTORS = {
    "steps": "#plot-timeline .scatterlayer .point",
    "metrics": "#plot-metrics .scatterlayer .point",
    "bars": "#plot-costs .barlayer .point",
    "slices": "#plot-sizes .slice",
    "heat": "#plot-changes .heatmaplayer image",
    "cells": "#plot-changes .heatmap-label",
    "rows": "tbody tr",
}


def report(*arguments):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    add_common(parser)
    return command.run(parser.parse_args(list(map(str, arguments))), Output(is_json=False))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run, and its page."""
    pytest.importorskip("plotly")
    directory = tmp_path_factory.mktemp("made")
    sample.save_run(directory / "run")
    out = directory / "report.html"
    assert report(directory / "run", "--out", out, "--metric", "loss") == 0
    return directory / "run", out


def words(html):
    """The page without its scripts and its style."""
    return re.sub(r"<(script|style)[^>]*>.*?</\1>", "", html, flags=re.DOTALL)


def test_the_page_tells_of_the_run(made):
    run, out = made
    with flaxckpt.CheckpointManager(run, read_only=True) as ckpt:
        steps, best = ckpt.steps(), ckpt.best_step()
    text = words(out.read_text())
    assert str(run) in text
    assert f"<b>{len(steps)}</b>" in text
    assert f"<b>{best:,}</b>" in text
    assert f'<th scope="row">{best:,}</th><td>kept, best</td>' in text
    assert '<th scope="row">300</th><td>kept, pinned</td>' in text
    assert '<tr class="gone"><th scope="row">100</th><td>deleted</td>' in text


def test_the_page_needs_nothing_else(made):
    html = made[1].read_text()
    assert re.findall(r"""(?:src|href)\s*=\s*["'][^#]""", words(html)) == []
    assert "default-src 'none'" in html
    assert "@import" not in html
    assert "url(" not in re.search(r"<style>(.*?)</style>", html, re.DOTALL)[1]
    assert html.count("</script>") == 3


def test_every_plot_is_drawn_on_wide_and_narrow_screens(made):
    _, out = made
    seen = browser.look(out, (1280, 390), SELECTORS)
    assert seen.keys() == {1280, 390}
    for width, found in seen.items():
        marks = found["marks"]
        assert found["errors"] == []
        assert found["fetched"] == []
        assert (found["inner"], found["wide"]) == (width, width)
        # All 19 saves are kept or deleted; of those, one is the best and one pinned too.
        assert (marks["steps"], marks["metrics"], marks["rows"]) == (21, 20, 19)
        # Of three kinds; one whose value is not known is empty.
        assert marks["bars"] == 3 * 19
        assert marks["slices"] > 30
        assert marks["heat"] == 1
        # Nine pairs of ten steps, by 18 subtrees and the whole state.
        assert marks["cells"] == (9 * 19 if width == 1280 else 0)
        assert found["colour"] == "rgb(42, 120, 214)"
        assert "accuracy" in found["text"]
        assert "time (UTC)" in found["text"]


def test_a_picture_for_the_documentation(made, tmp_path):
    if not os.environ.get(SCREENSHOT):
        pytest.skip(f"{SCREENSHOT} is not set")
    run, out = made
    named = tmp_path / "report.html"
    named.write_text(out.read_text().replace(str(run), "runs/transformer"))
    IMAGE.parent.mkdir(exist_ok=True)
    browser.screenshot(named, IMAGE, height=1700)
    assert IMAGE.stat().st_size < 300_000


def test_differences_that_would_be_too_much_to_read_are_left_out(made, tmp_path):
    run, _ = made
    out = tmp_path / "report.html"
    assert report(run, "--out", out, "--pairs", 2, "--max-bytes", "1MB") == 0
    assert re.search(r"Left out: \d+\.\d MB would have to be read", words(out.read_text()))
    assert 'id="plot-changes"' not in words(out.read_text())


def test_a_run_with_one_step_and_nothing_else(tmp_path):
    pytest.importorskip("plotly")
    flaxckpt.save(tmp_path / "run" / "3", {"w": np.zeros((0, 3))})
    facts = write_report(Run(at(tmp_path / "run")), tmp_path / "report.html")
    text = words((tmp_path / "report.html").read_text())
    assert [step.step for step in facts.kept] == [3]
    assert "saved without metrics" in text
    assert "Step 3 has no arrays" in text
    assert "Two steps are needed" in text


@pytest.mark.parametrize("kind", stores.BUCKETS)
def test_a_run_in_a_bucket(kind, tmp_path):
    pytest.importorskip("plotly")
    with stores.opened(kind, tmp_path) as store:
        url = store.url("run")
        with flaxckpt.CheckpointManager(url, options=store.options()) as ckpt:
            for step in (1, 2):
                ckpt.save(step, {"w": np.full(5000, step / 3)}, metrics={"loss": 1 / step})
        assert report(url, "--out", tmp_path / "report.html", *arguments(store)) == 0
    text = words((tmp_path / "report.html").read_text())
    for plot in ("timeline", "metrics", "costs", "sizes", "changes"):
        assert f'id="plot-{plot}"' in text
    assert url in text


def test_a_damaged_array_is_said_and_the_rest_is_there(tmp_path):
    pytest.importorskip("plotly")
    for step in (1, 2):
        flaxckpt.save(tmp_path / "run" / str(step), {"w": np.full(5000, step / 3)})
    data = max((tmp_path / "run" / "1").rglob("*"), key=lambda p: p.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    write_report(Run(at(tmp_path / "run")), tmp_path / "report.html")
    text = words((tmp_path / "report.html").read_text())
    assert "This could not be computed" in text
    assert 'id="plot-sizes"' in text


def test_without_plotly_one_line_says_what_to_install(tmp_path, monkeypatch):
    flaxckpt.save(tmp_path / "run" / "1", {"w": np.ones(3)})
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(
        CliError, match=r"^a report needs plotly: pip install 'flaxckpt\[report\]'$"
    ):
        report(tmp_path / "run", "--out", tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_no_name_becomes_a_part_of_the_page():
    hostile = "</script><script>alert(1)</script>"
    facts = sample.facts()
    steps = [*facts.steps, sample.ReportedStep(60, None, {hostile: 1.0})]
    facts = sample.facts(steps=steps, metric=hostile)
    html = page(facts, [timeline(facts), sizes(1, {hostile: 8})], f'x = "{hostile}"')
    assert "<script>alert" not in html.replace('x = "<\\/script><script>alert(1)', "")
    assert html.count("</script>") == 3
