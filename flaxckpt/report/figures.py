"""The figures of a report, as data for Plotly. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from flaxckpt import text
from flaxckpt.comparing import SubtreeChanges
from flaxckpt.inspecting import fitting_depth, prefix
from flaxckpt.metadata.step_metadata import MAX_PAST
from flaxckpt.report.facts import Facts, ReportedSave, ReportedStep

# A figure of Plotly: `data`, a list of traces, and `layout`. A string that begins with $ is the
# name of a colour, which is different by day and by night.
Figure = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Plot:
    """A section of the page.

    Attributes:
      key: its id in the page.
      title: its heading.
      text: one or two sentences about it.
      figures: the views that can be selected, by name; empty if there is nothing to show.
      height: its least height in pixels.
      wide: whether it takes the whole width of a wide page.
    """

    key: str
    title: str
    text: str
    figures: Mapping[str, Figure] = dataclasses.field(default_factory=dict)
    height: int = 320
    wide: bool = False


def figure(data: Sequence[Mapping[str, Any]], **layout: Any) -> Figure:
    """A figure of traces."""
    return {"data": list(data), "layout": layout}


def trace(name: str, x: Sequence[Any], y: Sequence[Any], **how: Any) -> dict[str, Any]:
    """Points or bars of one kind."""
    return {"name": name, "x": list(x), "y": list(y), **how}


def step_axis(**how: Any) -> dict[str, Any]:
    """An axis of steps."""
    return {"title": {"text": "step"}, "tickformat": ",d", **how}


# The style of all plots. `automargin` makes space for labels of any length.
_AXIS = {
    "automargin": True,
    "gridcolor": "$grid",
    "linecolor": "$grid",
    "zeroline": False,
    "tickcolor": "$grid",
    "title": {"font": {"color": "$soft"}, "standoff": 8},
    "tickfont": {"color": "$soft"},
}
TEMPLATE: Figure = {
    "layout": {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, -apple-system, Segoe UI, sans-serif", "size": 13}
        | {"color": "$ink"},
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8, "pad": 4},
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "xanchor": "left"},
        "hoverlabel": {"bgcolor": "$surface", "bordercolor": "$grid", "font": {"color": "$ink"}},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "$muted", "activecolor": "$ink"},
    }
}


# The colours of the page, by day and by night.


LIGHT = {
    "page": "#f6f6f4",
    "surface": "#ffffff",
    "ink": "#111110",
    "soft": "#52514e",
    "muted": "#7d7b76",
    "grid": "#e3e2dc",
    "line": "#a9b4c2",
    "blue": "#2a78d6",
    "orange": "#d9601f",
    "aqua": "#159a6a",
    "yellow": "#e09600",
    "magenta": "#c2548a",
    "green": "#2f7d1f",
    "violet": "#5b49b8",
    "red": "#d63b3a",
    # From little to much change.
    "heat0": "#e4effc",
    "heat1": "#a9cdf5",
    "heat2": "#5b9be6",
    "heat3": "#245fae",
    "heat4": "#0d2f63",
}
DARK = {
    "page": "#101010",
    "surface": "#1b1b1a",
    "ink": "#f5f5f3",
    "soft": "#c3c2b9",
    "muted": "#918f88",
    "grid": "#32322f",
    "line": "#6b7684",
    "blue": "#4a93ea",
    "orange": "#e07a3f",
    "aqua": "#2bb583",
    "yellow": "#e8ab2e",
    "magenta": "#d8709f",
    "green": "#4f9f3d",
    "violet": "#9588ea",
    "red": "#ea6a69",
    "heat0": "#14253d",
    "heat1": "#1d4478",
    "heat2": "#2f6fbd",
    "heat3": "#6ba9ee",
    "heat4": "#d3e6fb",
}


# How much each part of the state changed from step to step.


ROOT = "(the whole state)"


_KEY, _TITLE = "changes", "Change by subtree"
_ROW, _CHANGES_AXES = 22, 110


def changes_plot(found: SubtreeChanges) -> Plot:
    """A heatmap of subtrees by pairs of steps."""
    if not found.names:
        return without_changes("The steps have no arrays of floating-point numbers.")
    said = (
        "The L2 norm of the difference between each kept step and the next one, relative to the "
        "norm before. Blank cells did not change, or cannot be compared."
    )
    if found.uncompared:
        said += f" Arrays that are missing in a step, or have several shapes: {found.uncompared}."
    height = _ROW * len(found.names) + _CHANGES_AXES
    return Plot(_KEY, _TITLE, said, {_KEY: _heatmap(found)}, height)


def without_changes(why: str) -> Plot:
    """The section without a figure, and the reason."""
    return Plot(_KEY, _TITLE, why)


def _heatmap(found: SubtreeChanges) -> Figure:
    """The figure; its colours are logarithms."""
    logs = [[_log(value) for value in row] for row in found.values]
    known = [value for row in logs for value in row if value is not None]
    names = [text.label(name or ROOT) for name in found.names]
    heat = {
        "type": "heatmap",
        "x": [f"{new:,}" for _, new in found.pairs],
        "y": list(range(len(names))),  # short names need not differ
        "z": logs,
        "text": [
            [text.percent(value) if _log(value) is not None else "" for value in row]
            for row in found.values
        ],
        "texttemplate": "%{text}" if len(found.pairs) <= 10 else "",
        "customdata": [
            [
                [name, f"{old:,} → {new:,}: {_changes_said(value)}"]
                for (old, new), value in zip(found.pairs, row, strict=True)
            ]
            for name, row in zip(names, found.values, strict=True)
        ],
        "hovertemplate": "%{customdata[0]}<br>%{customdata[1]}<extra></extra>",
        "colorscale": [[i / 4, f"$heat{i}"] for i in range(5)],
        "colorbar": _colorbar(known),
        "xgap": 2,
        "ygap": 2,
    }
    rows = {
        "autorange": "reversed",
        "tickvals": heat["y"],
        "ticktext": [text.label(text.short_title(name or ROOT)) for name in found.names],
        "showgrid": False,
    }
    columns = {
        "title": {"text": "step"},
        "type": "category",
        "showgrid": False,
        "nticks": 6,
        "tickangle": 0,
    }
    return figure([heat], xaxis=columns, yaxis=rows)


def _log(value: float) -> float | None:
    """The logarithm of a change; `None` for 0, NaN and infinity."""
    return math.log10(value) if value and math.isfinite(value) else None


def _changes_said(value: float) -> str:
    """A change in words."""
    if math.isnan(value):
        return "cannot be compared"
    if math.isinf(value):
        return "all zeros before"
    return text.percent(value) if value else "unchanged"


def _colorbar(known: list[float]) -> dict[str, object]:
    """Ticks at powers of ten."""
    low, high = math.floor(min(known, default=0)), math.ceil(max(known, default=0))
    every = max(1, math.ceil((high - low) / 5))
    ticks = list(range(low, high + 1, every))
    return {
        "tickvals": ticks,
        "ticktext": [text.percent(10.0**tick) for tick in ticks],
        "thickness": 10,
        "ypad": 4,
        "outlinewidth": 0,
        "orientation": "h",
        "y": 1,
        "yanchor": "bottom",
        "len": 1,
        "tickangle": 0,
        "x": 0,
        "xanchor": "left",
        "tickfont": {"color": "$soft", "size": 11},
    }


# The cost of saves, and the time that the loop trained between them.


# Ticks of a logarithmic axis, in seconds.
_TICKS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 60.0, 600.0, 3600.0, 36000.0, 864000.0)
_Measure = Callable[[ReportedSave], float | None]
_MEASURES: dict[str, tuple[str, _Measure]] = {
    "trained before it": ("$line", lambda save: save.trained),
    "until committed": ("$aqua", lambda save: save.seconds),
    "loop blocked": ("$red", lambda save: save.blocked),
}


def costs(facts: Facts) -> Plot:
    """How long each save took, and which share of the time it blocked the loop."""
    figures = {}
    if facts.saves:
        figures["times (logarithmic)"] = _seconds(facts.saves)
    if facts.overhead is not None:
        figures["share of the loop's time"] = _shares(facts.saves)
    return Plot("costs", "Cost of saves", _costs_text(facts), figures)


def _costs_text(facts: Facts) -> str:
    if not facts.saves:
        return "The cost of the saves of this run is unknown."
    if facts.overhead is None:
        return "How long each save took until its commit, and blocked the loop."
    blocked, trained = facts.overhead
    share = text.percent(blocked / ((blocked + trained) or 1.0))
    return (
        f"Saves blocked the loop for {text.duration(blocked)} of "
        f"{text.duration(blocked + trained)}: {share}."
    )


def _seconds(saves: Sequence[ReportedSave]) -> Figure:
    """The times as groups of bars."""
    traces = [
        trace(
            title,
            [f"{save.step:,}" for save in saves],
            [measure(save) or None for save in saves],  # 0 has no logarithm
            type="bar",
            marker={"color": color},
            customdata=[text.duration(measure(save) or 0.0) for save in saves],
            hovertemplate="step %{x}: %{customdata}<extra>%{fullData.name}</extra>",
        )
        for title, (color, measure) in _MEASURES.items()
    ]
    axis: dict[str, object] = {
        "type": "log",
        "tickvals": _TICKS,
        "ticktext": [text.duration(tick) for tick in _TICKS],
    }
    axis["range"] = _decades([measure(s) for s in saves for _, measure in _MEASURES.values()])
    return figure(traces, barmode="group", xaxis=_steps(), yaxis=axis)


def _decades(values: Sequence[float | None]) -> list[int]:
    """The exponents of the powers of ten that enclose the positive `values`.

    Example:
      >>> _decades([0.02, 3.0, 0.0, None])
      [-2, 1]
    """
    known = [math.log10(value) for value in values if value is not None and value > 0] or [0.0]
    # The smallest value needs a bar that is visible.
    return [math.floor(min(known) - 0.1), math.ceil(max(known))]


def _shares(saves: Sequence[ReportedSave]) -> Figure:
    """The share of the time from save to save in which the loop was blocked."""
    known = [(save, share) for save in saves if (share := _share(save)) is not None]
    bars = trace(
        "loop blocked",
        [f"{save.step:,}" for save, _ in known],
        [share for _, share in known],
        type="bar",
        marker={"color": "$red"},
        hovertemplate="step %{x}: %{y:.3%}<extra></extra>",
    )
    axis = {"tickformat": "~%", "rangemode": "tozero", "title": {"text": "blocked"}}
    return figure([bars], xaxis=_steps(), yaxis=axis)


def _steps() -> dict[str, object]:
    """Steps as categories, so that all bars have one width."""
    return {"title": {"text": "step"}, "type": "category", "nticks": 6, "tickangle": 0}


def _share(save: ReportedSave) -> float | None:
    """The share of the time since the previous save in which this one blocked the loop."""
    if save.blocked is None or save.trained is None:
        return None
    return save.blocked / ((save.blocked + save.trained) or 1.0)


# The metrics of the steps, with the best step marked.


_HOVER = "step %{x:,}: %{y}<extra></extra>"


def metrics(facts: Facts) -> Plot:
    """The curve of each metric."""
    figures = {name: _curve(facts, name) for name in facts.metric_names}
    return Plot("metrics", "Metrics", _metrics_text(facts), figures)


def _metrics_text(facts: Facts) -> str:
    if not facts.metric_names:
        return "The steps of this run were saved without metrics."
    if facts.metric is None:
        return f"No step is marked as best: {facts.unranked}"
    best, which = facts.best, "smallest" if facts.mode == "min" else "largest"
    if best is None:
        return f"No kept step has the metric {facts.metric}."
    value = text.number(best.metrics[facts.metric])
    return f"Of the kept steps, {best.step:,} has the {which} {facts.metric}: {value}."


def _curve(facts: Facts, name: str) -> Figure:
    """The curve of the metric `name`."""
    known = [step for step in facts.steps if name in step.metrics]
    line = _metrics_points("all", known, name, mode="lines", line={"color": "$line", "width": 1.5})
    kept = [step for step in known if step.is_kept]
    gone = [step for step in known if not step.is_kept]
    traces = [line | {"showlegend": False, "hoverinfo": "skip", "hovertemplate": None}]
    if gone:
        traces.append(_marked("deleted", gone, name, "circle-open", "$muted", 7))
    traces.append(_marked("kept", kept, name, "circle", "$blue", 9))
    if facts.best and name in facts.best.metrics:
        traces.append(_marked("best", [facts.best], name, "star", "$yellow", 18))
    return figure(traces, xaxis=step_axis(), yaxis={"title": {"text": text.label(name)}})


def _metrics_points(
    title: str, steps: Sequence[ReportedStep], name: str, **how: Any
) -> dict[str, Any]:
    values = [step.metrics[name] for step in steps]
    return trace(title, [s.step for s in steps], values, hovertemplate=_HOVER, **how)


def _marked(
    title: str, steps: Sequence[ReportedStep], name: str, symbol: str, color: str, size: int
) -> dict[str, Any]:
    marker = {"symbol": symbol, "color": color, "size": size}
    if symbol == "star":
        marker["line"] = {"color": "$ink", "width": 1}
    return _metrics_points(title, steps, name, mode="markers", marker=marker)


# The bytes of a step, by subtree.


_SIZES = "Size by subtree"
_HEIGHT = 420
# The largest number of subtrees at the deepest level.
_MOST = 1500
_LEVELS = 5
_COLORS = ("$blue", "$aqua", "$violet", "$orange", "$green", "$magenta", "$yellow", "$red")


def sizes(step: int, leaves: Mapping[str, int]) -> Plot:
    """A treemap of a step; `leaves` has the size in bytes of each leaf."""
    parts = subtrees(leaves, _MOST)
    if not parts:
        return without_sizes(f"Step {step:,} has no arrays.")
    said = (
        f"The arrays of step {step:,}: {text.size(parts[0].nbytes)} in "
        f"{text.plural(parts[0].leaves, 'leaf')}. Click a subtree to open it."
    )
    return Plot("sizes", _SIZES, said, {"sizes": _treemap(step, parts)}, _HEIGHT)


def without_sizes(why: str) -> Plot:
    """The section without a figure, and the reason."""
    return Plot("sizes", _SIZES, why)


def _treemap(step: int, parts: Sequence[Subtree]) -> Figure:
    """The subtrees as a treemap, coloured by the top-level subtree."""
    above = dict.fromkeys(part.name.partition("/")[0] for part in parts if part.name)
    colors = {name: _COLORS[i % len(_COLORS)] for i, name in enumerate(above)}
    whole = parts[0].nbytes
    map_ = {
        "type": "treemap",
        "ids": [f"/{part.name}" for part in parts],
        "labels": [text.label(part.label) if part.name else f"step {step:,}" for part in parts],
        "parents": ["" if part.parent is None else f"/{part.parent}" for part in parts],
        "values": [part.nbytes for part in parts],
        "customdata": [_sizes_said(part, whole) for part in parts],
        "branchvalues": "total",
        "maxdepth": _LEVELS,
        "texttemplate": "%{label}<br>%{customdata[0]}",
        "hovertemplate": "%{customdata[1]}<br>%{customdata[0]}, %{customdata[2]}<extra></extra>",
        "marker": {
            "colors": [colors.get(part.name.partition("/")[0], "$surface") for part in parts],
            "line": {"color": "$surface", "width": 1},
            "pad": {"t": 20, "l": 3, "r": 3, "b": 3},
            "depthfade": False,
        },
        "textfont": {"color": ["$surface" if part.name else "$ink" for part in parts]},
        "tiling": {"pad": 2},
        "pathbar": {"visible": True, "thickness": 22, "textfont": {"color": "$ink"}},
    }
    return figure([map_], uniformtext={"minsize": 10, "mode": "hide"})


def _sizes_said(part: Subtree, whole: int) -> list[str]:
    """Size, name, and share of the whole."""
    leaves = text.plural(part.leaves, "leaf")
    return [
        text.size(part.nbytes),
        text.label(part.name or part.label),
        f"{text.share(part.nbytes, whole)} of the step, {leaves}",
    ]


# The timeline of kept and deleted steps.


_NO_HISTORY = (
    "The newest step records no earlier saves, because an older flaxckpt wrote it. Deleted steps "
    "and the cost of their saves are unknown."
)
_LANE, _TIMELINE_AXES = 44, 84


class _Lane(NamedTuple):
    """Points of one kind: their steps, times and texts, and their style."""

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
        figures["by time"] = _figure(lanes, lambda p: p[1] and text.axis_time(p[1]), when)
    height = _LANE * len(lanes) + _TIMELINE_AXES
    return Plot("timeline", "Steps", _timeline_text(facts), figures, height, wide=True)


def _timeline_text(facts: Facts) -> str:
    gone = len(facts.steps) - len(facts.kept)
    said = f"{text.plural(len(facts.kept), 'step')} kept"
    if not facts.has_history:
        return f"{said}. {_NO_HISTORY}"
    more = f" The run records the last {MAX_PAST} saves." if len(facts.saves) > MAX_PAST else ""
    return f"{said}, {gone} deleted.{more}"


def _lanes(facts: Facts) -> list[_Lane]:
    """All kinds of points, from top to bottom."""
    best = facts.best
    damaged = [step for step in facts.kept if step.is_damaged]
    return [
        _Lane("kept", _timeline_points(facts.readable), "circle", "$blue"),
        _Lane("best", _timeline_points([best] if best else []), "star", "$yellow"),
        _Lane(
            "pinned", _timeline_points([s for s in facts.kept if s.is_pinned]), "diamond", "$violet"
        ),
        _Lane("damaged", _timeline_points(damaged), "x", "$red"),
        _Lane(
            "deleted",
            _timeline_points([s for s in facts.steps if not s.is_kept]),
            "x-thin",
            "$muted",
        ),
    ]


def _timeline_points(steps: Sequence[ReportedStep]) -> list[tuple[int, float | None, str]]:
    return [(step.step, step.time, _timeline_said(step)) for step in steps]


def _timeline_said(step: ReportedStep) -> str:
    known = [text.moment(step.time), "" if step.nbytes is None else text.size(step.nbytes)]
    known += [f"{text.label(name)}: {text.number(value)}" for name, value in step.metrics.items()]
    return "<br>".join(filter(None, known))


def _figure(lanes: Sequence[_Lane], place: Callable[[Any], Any], axis: dict[str, Any]) -> Figure:
    """The lanes along an axis, at the `place` of each point."""
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


@dataclasses.dataclass(frozen=True)
class Subtree:
    """A subtree of a state.

    Attributes:
      name: its key path; empty for the whole state.
      nbytes: the size of its arrays, in bytes.
      leaves: the number of its leaves.
    """

    name: str
    nbytes: int
    leaves: int

    @property
    def parent(self) -> str | None:
        """The key path of the subtree that it is in; `None` for the whole state."""
        return self.name.rpartition("/")[0] if self.name else None

    @property
    def label(self) -> str:
        """Its last key."""
        return self.name.rpartition("/")[2] or ROOT


def subtrees(leaves: Mapping[str, int], most: int) -> list[Subtree]:
    """All subtrees that have bytes, down to a depth that has at most `most` of them.

    Args:
      leaves: the size in bytes of each leaf, by key path.
      most: the largest number at the deepest level.

    Example:
      >>> [(s.name, s.nbytes) for s in subtrees({"params/w": 8, "params/b": 2, "step": 4}, 10)]
      [('', 14), ('params', 10), ('params/w', 8), ('params/b', 2), ('step', 4)]
    """
    depth = fitting_depth(leaves, most)
    sizes: dict[str, list[int]] = {}
    for name, nbytes in leaves.items():
        above = dict.fromkeys(prefix(name, n) for n in range(depth + 1))
        for subtree in above if nbytes else ():
            found = sizes.setdefault(subtree, [0, 0])
            found[0] += nbytes
            found[1] += 1
    return [Subtree(name, nbytes, count) for name, (nbytes, count) in sizes.items()]
