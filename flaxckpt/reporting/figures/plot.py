"""What a plot is, and what all plots have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

# What Plotly draws: `data`, a list of traces, and `layout`. A string that begins with $ is a
# colour of the page by its name, which is not the same by day and by night.
Figure = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Plot:
    """A part of the page.

    Attributes:
      key: its id in the page.
      title: its heading.
      text: what it shows, for people; a sentence or two.
      figures: the views of it that can be selected, by name; none when there is nothing to show.
      height: how high it is at the least, in pixels; beside a higher one it is as high as that.
      wide: whether it takes the whole width of a wide page.
    """

    key: str
    title: str
    text: str
    figures: Mapping[str, Figure] = dataclasses.field(default_factory=dict)
    height: int = 320
    wide: bool = False


def figure(data: Sequence[Mapping[str, Any]], **layout: Any) -> Figure:
    """What Plotly draws."""
    return {"data": list(data), "layout": layout}


def trace(name: str, x: Sequence[Any], y: Sequence[Any], **how: Any) -> dict[str, Any]:
    """Points or bars of one kind."""
    return {"name": name, "x": list(x), "y": list(y), **how}


def step_axis(**how: Any) -> dict[str, Any]:
    """An axis of steps."""
    return {"title": {"text": "step"}, "tickformat": ",d", **how}


# How all plots look. `automargin` makes room for whatever labels there are.
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
