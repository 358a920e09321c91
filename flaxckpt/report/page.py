"""Writes the report of a run: one HTML file that needs nothing else, not even a network."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

import flaxckpt
from flaxckpt import text
from flaxckpt.comparing import bytes_to_read, subtree_changes
from flaxckpt.errors import FlaxckptError
from flaxckpt.formats.opening import open_source
from flaxckpt.metadata.step_metadata import Mode
from flaxckpt.options import Options
from flaxckpt.report.facts import Facts, gather
from flaxckpt.report.figures import (
    DARK,
    LIGHT,
    TEMPLATE,
    Plot,
    changes_plot,
    costs,
    metrics,
    sizes,
    timeline,
    without_changes,
    without_sizes,
)
from flaxckpt.run.run import Run

PAIRS, MAX_BYTES = 10, 20 * 10**9


def write_report(
    run: Run,
    out: Path,
    *,
    metric: str | None = None,
    mode: Mode | None = None,
    pairs: int = PAIRS,
    max_bytes: int = MAX_BYTES,
    options: Options = Options(),
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Facts:
    """Writes the report of `run` to the file `out`; returns the facts in it.

    Args:
      run: a run with at least one step.
      out: the file to write; an existing one is replaced.
      metric: the metric that ranks steps; by default the one that the run records.
      mode: whether its smallest or its largest value is best; by default as the run records.
      pairs: how many pairs of neighbouring steps to compare, the newest ones.
      max_bytes: no steps are compared if that would read more bytes than this.
      options: how to read.
      progress: takes the number of bytes that were read since its last call.

    Raises:
      ModuleNotFoundError: if plotly or jinja2 is not installed.
      CheckpointNotFoundError: if the run has no step.
      InvalidMetricError: if no step has `metric`, or nothing says whether its smallest or its
        largest value is best.
    """
    for library in ("plotly", "jinja2"):
        if importlib.util.find_spec(library) is None:
            raise ModuleNotFoundError(f"a report needs {library}: pip install 'flaxckpt[report]'")
    from plotly.offline import get_plotlyjs

    facts = gather(run, metric=metric, mode=mode, options=options)
    changed = _changes(run, facts, pairs, max_bytes, options, progress)
    plots = [timeline(facts), metrics(facts), costs(facts), _sizes(run, facts, options), changed]
    out.write_text(page(facts, plots, get_plotlyjs()), "utf-8")
    return facts


def page(facts: Facts, plots: Sequence[Plot], plotly: str) -> str:
    """The page as HTML; `plotly` is the source of Plotly's JavaScript library."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("flaxckpt.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "number": text.number,
        "size": text.size,
        "moment": text.moment,
        "duration": text.duration,
    }
    views = {plot.key: list(plot.figures.items()) for plot in plots if plot.figures}
    # A name in a checkpoint cannot end the script element that it is in.
    data = orjson.dumps({"template": TEMPLATE, "plots": views}).decode().replace("<", "\\u003c")
    best = facts.best
    values: dict[str, Any] = {
        "facts": facts,
        "best": best,
        "saves": {save.step: save for save in facts.saves},
        "plots": plots,
        "light": LIGHT,
        "dark": DARK,
        "data": data,
        "plotly": plotly.replace("</script", "<\\/script"),
        "version": flaxckpt.__version__,
    }
    return environment.get_template("page.html").render(values)


def _sizes(run: Run, facts: Facts, options: Options) -> Plot:
    """The sizes in the newest step that can be opened."""
    for step in reversed(facts.readable):
        try:
            leaves = open_source(run.path(step.step), options).leaves
        except FlaxckptError:
            continue
        return sizes(step.step, {leaf.name: leaf.nbytes for leaf in leaves if leaf.nbytes})
    return without_sizes("No step of this run can be opened.")


def _changes(
    run: Run,
    facts: Facts,
    pairs: int,
    max_bytes: int,
    options: Options,
    progress: Callable[[int], None],
) -> Plot:
    """The differences between the newest steps, or why they are not shown."""
    steps = [step.step for step in facts.readable[-pairs - 1 :]]
    if pairs < 1 or len(steps) < 2:
        return without_changes("Two steps are needed to show the changes between them.")
    try:
        opened = {step: open_source(run.path(step), options) for step in steps}
        if (wanted := bytes_to_read(opened.values())) > max_bytes:
            return without_changes(
                f"Left out: {text.size(wanted)} would have to be read, and --max-bytes allows "
                f"{text.size(max_bytes)}. Fewer --pairs need less."
            )
        return changes_plot(subtree_changes(opened, progress=progress))
    except FlaxckptError as error:
        return without_changes(f"This could not be computed: {error}")
