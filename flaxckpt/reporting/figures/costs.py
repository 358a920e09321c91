"""What saves cost, beside the time that the loop trained between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from flaxckpt.reporting.facts import Facts, Save
from flaxckpt.reporting.figures.plot import Figure, Plot, figure, trace
from flaxckpt.reporting.wording import duration, percent

# In seconds; a logarithmic axis of times is read best in their units.
_TICKS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 60.0, 600.0, 3600.0, 36000.0, 864000.0)
_Measure = Callable[[Save], float | None]
_MEASURES: dict[str, tuple[str, _Measure]] = {
    "trained before it": ("$line", lambda save: save.trained),
    "until committed": ("$aqua", lambda save: save.seconds),
    "loop blocked": ("$red", lambda save: save.blocked),
}


def costs(facts: Facts) -> Plot:
    """How long each save took, on a logarithmic axis, and what part of the time it blocked."""
    figures = {}
    if facts.saves:
        figures["times (logarithmic)"] = _seconds(facts.saves)
    if facts.overhead is not None:
        figures["share of the loop's time"] = _shares(facts.saves)
    return Plot("costs", "What saves cost", _text(facts), figures)


def _text(facts: Facts) -> str:
    """What it says."""
    if not facts.saves:
        return "Nothing is known of what the saves of this run cost."
    if facts.overhead is None:
        return "How long each save took until it was committed, and blocked the loop."
    blocked, trained = facts.overhead
    share = percent(blocked / ((blocked + trained) or 1.0))
    return (
        f"Saves blocked the loop for {duration(blocked)} of {duration(blocked + trained)}: {share}."
    )


def _seconds(saves: Sequence[Save]) -> Figure:
    """The times as groups of bars."""
    traces = [
        trace(
            title,
            [f"{save.step:,}" for save in saves],
            [measure(save) or None for save in saves],  # a logarithm of nothing there is not
            type="bar",
            marker={"color": color},
            customdata=[duration(measure(save) or 0.0) for save in saves],
            hovertemplate="step %{x}: %{customdata}<extra>%{fullData.name}</extra>",
        )
        for title, (color, measure) in _MEASURES.items()
    ]
    axis: dict[str, object] = {
        "type": "log",
        "tickvals": _TICKS,
        "ticktext": [duration(tick) for tick in _TICKS],
    }
    axis["range"] = _decades([measure(s) for s in saves for _, measure in _MEASURES.values()])
    return figure(traces, barmode="group", xaxis=_steps(), yaxis=axis)


def _decades(values: Sequence[float | None]) -> list[int]:
    """The whole decades, as powers of ten, that `values` lie in; those without a logarithm do not.

    Example:
      >>> _decades([0.02, 3.0, 0.0, None])
      [-2, 1]
    """
    known = [math.log10(value) for value in values if value is not None and value > 0] or [0.0]
    # The smallest shall be a bar, be it short.
    return [math.floor(min(known) - 0.1), math.ceil(max(known))]


def _shares(saves: Sequence[Save]) -> Figure:
    """What part of the time from save to save the loop was blocked."""
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
    """Steps as names: a bar is as wide for a save out of turn as for others."""
    return {"title": {"text": "step"}, "type": "category", "nticks": 6, "tickangle": 0}


def _share(save: Save) -> float | None:
    """The part of the time since the save before that this one blocked."""
    if save.blocked is None or save.trained is None:
        return None
    return save.blocked / ((save.blocked + save.trained) or 1.0)
