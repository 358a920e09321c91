"""Makes the report of a run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from flaxckpt import text
from flaxckpt.comparing import bytes_to_read, subtree_changes
from flaxckpt.errors import FlaxckptError
from flaxckpt.metadata.step_metadata import Mode
from flaxckpt.options import Options
from flaxckpt.report.facts import Facts, gather
from flaxckpt.report.figures import (
    Plot,
    changes_plot,
    costs,
    metrics,
    sizes,
    timeline,
    without_changes,
)
from flaxckpt.report.page import page
from flaxckpt.run.run import Run

PAIRS, MAX_BYTES = 10, 20 * 10**9
Progress = Callable[[int], None]


def write_report(
    run: Run,
    out: Path,
    *,
    metric: str | None = None,
    mode: Mode = "min",
    pairs: int = PAIRS,
    max_bytes: int = MAX_BYTES,
    options: Options = Options(),
    progress: Progress = lambda nbytes: None,
) -> Facts:
    """Writes the report of `run` to the file `out`; returns the facts in it.

    Args:
      run: it has a step.
      out: is replaced when it exists.
      metric: which metric decides what is best; by default the only one there is.
      mode: whether its best value is the smallest or the largest.
      pairs: of so many neighbouring steps, the newest, the difference is shown.
      max_bytes: when more had to be read for that, it is left out.
      options: how to read.
      progress: is given the bytes that were read, as they are.

    Raises:
      ModuleNotFoundError: when plotly is not installed.
      CheckpointNotFoundError: when there is no step.
      InvalidMetricError: when no step has that metric.
    """
    library = plotly_source()  # before anything is read
    facts = gather(run, metric=metric, mode=mode, options=options)
    changed = _changes(run, facts, pairs, max_bytes, options, progress)
    plots = [timeline(facts), metrics(facts), costs(facts), _sizes(run, facts, options), changed]
    out.write_text(page(facts, plots, library), "utf-8")
    return facts


def plotly_source() -> str:
    """The source of Plotly's JavaScript library, which comes with its Python package.

    Raises:
      ModuleNotFoundError: when that is not installed.
    """
    if importlib.util.find_spec("plotly") is None:
        raise ModuleNotFoundError("a report needs plotly: pip install 'flaxckpt[report]'")
    from plotly.offline import get_plotlyjs

    source: str = get_plotlyjs()
    return source


def _sizes(run: Run, facts: Facts, options: Options) -> Plot:
    """The bytes of the newest step that can be opened."""
    from flaxckpt.source.checkpoint import open_checkpoint

    for step in reversed(facts.readable):
        try:
            leaves = open_checkpoint(run.path(step.step), options).leaves
        except FlaxckptError:
            continue
        return sizes(step.step, {leaf.name: leaf.nbytes for leaf in leaves if leaf.array})
    return Plot("sizes", "What takes the room", "No step of this run can be opened.")


def _changes(
    run: Run, facts: Facts, pairs: int, max_bytes: int, options: Options, progress: Progress
) -> Plot:
    """The differences of the newest steps, or why they are not shown."""
    from flaxckpt.formats.opening import open_source

    steps = [step.step for step in facts.readable[-pairs - 1 :]]
    if pairs < 1 or len(steps) < 2:
        return without_changes("Two steps are needed to tell how much changed between them.")
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
