"""How much each part of the state changed from step to step."""

from __future__ import annotations

import math

from flaxckpt.reporting.changes import Changes
from flaxckpt.reporting.figures.plot import Figure, Plot, figure
from flaxckpt.reporting.subtrees import ROOT
from flaxckpt.reporting.wording import label, percent, short

_KEY, _TITLE = "changes", "How much changed"
_ROW, _AXES = 22, 110


def changes_plot(found: Changes) -> Plot:
    """The heatmap: subtrees by pairs of steps."""
    if not found.names:
        return without_changes("The steps have no arrays of floating-point numbers.")
    said = (
        "From each step that is kept to the next: the L2 norm of the difference, as a part of the "
        "norm before. What is blank did not change, or cannot be compared."
    )
    if found.uncompared:
        said += f" Arrays that are not in all of these steps with one shape: {found.uncompared}."
    height = _ROW * len(found.names) + _AXES
    return Plot(_KEY, _TITLE, said, {_KEY: _heatmap(found)}, height)


def without_changes(why: str) -> Plot:
    """What is there instead."""
    return Plot(_KEY, _TITLE, why)


def _heatmap(found: Changes) -> Figure:
    """The picture; colours are of logarithms."""
    logs = [[_log(value) for value in row] for row in found.values]
    known = [value for row in logs for value in row if value is not None]
    names = [label(name or ROOT) for name in found.names]
    heat = {
        "type": "heatmap",
        "x": [f"{new:,}" for _, new in found.pairs],
        "y": list(range(len(names))),  # short names need not differ
        "z": logs,
        "text": [
            [percent(value) if _log(value) is not None else "" for value in row]
            for row in found.values
        ],
        "texttemplate": "%{text}" if len(found.pairs) <= 10 else "",
        "customdata": [
            [
                [name, f"{old:,} → {new:,}: {_said(value)}"]
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
        "ticktext": [label(short(name or ROOT)) for name in found.names],
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
    """The logarithm of a change that has one."""
    return math.log10(value) if value and math.isfinite(value) else None


def _said(value: float) -> str:
    """A change in words."""
    if math.isnan(value):
        return "cannot be compared"
    if math.isinf(value):
        return "it was all zeros before"
    return percent(value) if value else "unchanged"


def _colorbar(known: list[float]) -> dict[str, object]:
    """Ticks at powers of ten."""
    low, high = math.floor(min(known, default=0)), math.ceil(max(known, default=0))
    every = max(1, math.ceil((high - low) / 5))
    ticks = list(range(low, high + 1, every))
    return {
        "tickvals": ticks,
        "ticktext": [percent(10.0**tick) for tick in ticks],
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
