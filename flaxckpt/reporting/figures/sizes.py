"""The bytes of a step, by subtree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flaxckpt.cli import text
from flaxckpt.reporting.figures.plot import Figure, Plot, figure
from flaxckpt.reporting.subtrees import Subtree, subtrees
from flaxckpt.reporting.wording import label

_HEIGHT = 420
# Of more, those at the deepest level are one.
_MOST = 1500
_LEVELS = 5
_COLORS = ("$blue", "$aqua", "$violet", "$orange", "$green", "$magenta", "$yellow", "$red")


def sizes(step: int, leaves: Mapping[str, int]) -> Plot:
    """The treemap of a step, of which `leaves` has the size in bytes of each leaf."""
    parts = subtrees(leaves, _MOST)
    title = "What takes the room"
    if not parts:
        return Plot("sizes", title, f"Step {step:,} has no arrays.")
    said = (
        f"The arrays of step {step:,}: {text.size(parts[0].nbytes)} in "
        f"{text.plural(parts[0].leaves, 'leaf')} that have some. Click on a part to go into it."
    )
    return Plot("sizes", title, said, {"sizes": _treemap(step, parts)}, _HEIGHT)


def _treemap(step: int, parts: Sequence[Subtree]) -> Figure:
    """The subtrees as a treemap; a subtree has the colour of what is topmost above it."""
    above = dict.fromkeys(part.name.partition("/")[0] for part in parts if part.name)
    colors = {name: _COLORS[i % len(_COLORS)] for i, name in enumerate(above)}
    whole = parts[0].nbytes
    map_ = {
        "type": "treemap",
        "ids": [f"/{part.name}" for part in parts],
        "labels": [label(part.label) if part.name else f"step {step:,}" for part in parts],
        "parents": ["" if part.parent is None else f"/{part.parent}" for part in parts],
        "values": [part.nbytes for part in parts],
        "customdata": [_said(part, whole) for part in parts],
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


def _said(part: Subtree, whole: int) -> list[str]:
    """Its size, its name, and what it is of the whole."""
    leaves = text.plural(part.leaves, "leaf")
    return [
        text.size(part.nbytes),
        label(part.name or part.label),
        f"{text.share(part.nbytes, whole)} of the step, {leaves}",
    ]
