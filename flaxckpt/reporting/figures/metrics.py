"""The metrics of the steps, with the best step marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flaxckpt.cli import text
from flaxckpt.reporting.facts import Facts, Step
from flaxckpt.reporting.figures.plot import Figure, Plot, figure, step_axis, trace
from flaxckpt.reporting.wording import label

_HOVER = "step %{x:,}: %{y}<extra></extra>"


def metrics(facts: Facts) -> Plot:
    """The curve of each metric."""
    figures = {name: _curve(facts, name) for name in facts.metric_names}
    return Plot("metrics", "Metrics", _text(facts), figures)


def _text(facts: Facts) -> str:
    """What it says."""
    if not facts.metric_names:
        return "The steps of this run were saved without metrics."
    if facts.metric is None:
        return "There are several metrics: --metric says which one decides what is best."
    best, which = facts.best, "smallest" if facts.mode == "min" else "largest"
    if best is None:
        return f"No step that is kept has the metric {facts.metric}."
    value = text.number(best.metrics[facts.metric])
    return f"Of the steps that are kept, {best.step:,} has the {which} {facts.metric}: {value}."


def _curve(facts: Facts, name: str) -> Figure:
    """The metric `name` of all steps that have it."""
    known = [step for step in facts.steps if name in step.metrics]
    line = _points("all", known, name, mode="lines", line={"color": "$line", "width": 1.5})
    kept = [step for step in known if step.is_kept]
    gone = [step for step in known if not step.is_kept]
    traces = [line | {"showlegend": False, "hoverinfo": "skip", "hovertemplate": None}]
    if gone:
        traces.append(_marked("deleted", gone, name, "circle-open", "$muted", 7))
    traces.append(_marked("kept", kept, name, "circle", "$blue", 9))
    if facts.best and name in facts.best.metrics:
        traces.append(_marked("best", [facts.best], name, "star", "$yellow", 18))
    return figure(traces, xaxis=step_axis(), yaxis={"title": {"text": label(name)}})


def _points(title: str, steps: Sequence[Step], name: str, **how: Any) -> dict[str, Any]:
    """The metric `name` of some steps."""
    values = [step.metrics[name] for step in steps]
    return trace(title, [s.step for s in steps], values, hovertemplate=_HOVER, **how)


def _marked(
    title: str, steps: Sequence[Step], name: str, symbol: str, color: str, size: int
) -> dict[str, Any]:
    """As markers."""
    marker = {"symbol": symbol, "color": color, "size": size}
    if symbol == "star":
        marker["line"] = {"color": "$ink", "width": 1}
    return _points(title, steps, name, mode="markers", marker=marker)
