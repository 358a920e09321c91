"""The timeline: which steps are there, which are gone, and what they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flaxckpt.cli import text
from flaxckpt.metadata.past import MAX_PAST
from flaxckpt.reporting.facts import Facts, Step
from flaxckpt.reporting.figures.plot import Figure, Plot, figure, step_axis, trace
from flaxckpt.reporting.wording import axis_time, label, moment

_NO_HISTORY = (
    "Its newest step remembers no saves before it (an older flaxckpt wrote it): steps that are "
    "gone, and what their saves cost, are not known."
)
_LANE, _AXES = 44, 84


class _Lane(NamedTuple):
    """Points of one kind: where they lie, what is said of each, and how they look."""

    name: str
    points: Sequence[tuple[int, float | None, str]]
    symbol: str
    color: str


def timeline(facts: Facts) -> Plot:
    """The timeline by step, and by time."""
    lanes = [lane for lane in _lanes(facts) if lane.points]
    figures = {"by step": _figure(lanes, lambda p: p[0], step_axis())}
    if any(point[1] is not None for lane in lanes for point in lane.points):
        when = {"title": {"text": "time (UTC)"}, "type": "date"}
        figures["by time"] = _figure(lanes, lambda p: p[1] and axis_time(p[1]), when)
    height = _LANE * len(lanes) + _AXES
    return Plot("timeline", "Steps", _text(facts), figures, height, wide=True)


def _text(facts: Facts) -> str:
    """What it says."""
    gone = len(facts.steps) - len(facts.kept)
    said = f"{text.plural(len(facts.kept), 'step')} kept"
    if not facts.has_history:
        return f"{said}. {_NO_HISTORY}"
    more = f" The last {MAX_PAST} saves are remembered." if len(facts.saves) > MAX_PAST else ""
    return f"{said}, {gone} deleted.{more}"


def _lanes(facts: Facts) -> list[_Lane]:
    """All kinds of points, the topmost first."""
    best = facts.best
    damaged = [step for step in facts.kept if step.is_damaged]
    return [
        _Lane("kept", _points(facts.readable), "circle", "$blue"),
        _Lane("best", _points([best] if best else []), "star", "$yellow"),
        _Lane("pinned", _points([s for s in facts.kept if s.is_pinned]), "diamond", "$violet"),
        _Lane("damaged", _points(damaged), "x", "$red"),
        _Lane("deleted", _points([s for s in facts.steps if not s.is_kept]), "x-thin", "$muted"),
    ]


def _points(steps: Sequence[Step]) -> list[tuple[int, float | None, str]]:
    """The points of some steps."""
    return [(step.step, step.time, _said(step)) for step in steps]


def _said(step: Step) -> str:
    """What is known of a step."""
    known = [moment(step.time), "" if step.nbytes is None else text.size(step.nbytes)]
    known += [f"{label(name)}: {text.number(value)}" for name, value in step.metrics.items()]
    return "<br>".join(filter(None, known))


def _figure(lanes: Sequence[_Lane], place: Callable[[Any], Any], axis: dict[str, Any]) -> Figure:
    """The lanes along an axis, on which a point has its `place`."""
    rows = {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": [lane.name for lane in reversed(lanes)],
        "range": [-0.6, len(lanes) - 0.4],
        "fixedrange": True,
    }
    traces = [_trace(lane, place) for lane in lanes]
    return figure(traces, xaxis=axis, yaxis=rows, showlegend=False, hovermode="closest")


def _trace(lane: _Lane, place: Callable[[Any], Any]) -> dict[str, Any]:
    """One lane."""
    size = 13 if lane.symbol in ("star", "diamond") else 10
    line = {"color": lane.color, "width": 2} if lane.symbol == "x-thin" else {"width": 0}
    return trace(
        lane.name,
        [place(point) for point in lane.points],
        [lane.name] * len(lane.points),
        mode="markers",
        marker={"symbol": lane.symbol, "color": lane.color, "size": size, "line": line},
        cliponaxis=False,
        customdata=[[point[0], point[2]] for point in lane.points],
        hovertemplate="step %{customdata[0]:,}<br>%{customdata[1]}<extra>%{fullData.name}</extra>",
    )
