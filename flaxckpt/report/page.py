"""The page of a report."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import orjson

import flaxckpt
from flaxckpt.report import facts as report_facts
from flaxckpt.report.facts import Facts
from flaxckpt.report.figures import TEMPLATE, Plot

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
    # From little to much: away from the page.
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


def variables(colors: dict[str, str]) -> str:
    """The colours as variables of CSS."""
    return "".join(f"--{name}:{color};" for name, color in colors.items())


# The page: one file that needs nothing else, not even a network. Pure.


# The browser itself refuses whatever would leave the page.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)


def page(facts: Facts, plots: Sequence[Plot], plotly: str) -> str:
    """The page as HTML.

    Args:
      facts: for the numbers at the top and the table.
      plots: in their order.
      plotly: the source of Plotly's library.
    """
    title = html.escape(facts.directory)
    sections = "".join(_section(plot, facts) for plot in plots)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<style>{_style()}</style></head>\n<body><header><p>Checkpoints of</p><h1>{title}</h1>\n"
        f"{report_facts.tiles(facts)}</header>\n<main>{sections}</main>\n"
        f"<footer>flaxckpt {flaxckpt.__version__}</footer>\n"
        f"{_scripts(plots, plotly)}</body></html>\n"
    )


def _style() -> str:
    """The style sheet."""
    dark = f"@media (prefers-color-scheme: dark) {{:root {{{variables(DARK)}}}}}"
    return f":root {{{variables(LIGHT)}}}\n{dark}\n{_file('page.css')}"


def _section(plot: Plot, facts: Facts) -> str:
    """A plot with its heading; the timeline has a table too."""
    key, said = html.escape(plot.key), html.escape(plot.text)
    label = f'role="img" aria-label="{html.escape(plot.title)}: {said}"'
    size = f'style="min-height: {plot.height}px"'
    drawn = f'<div class="plot" id="plot-{key}" {size} {label}></div>' if plot.figures else ""
    more = ""
    if plot.key == "timeline":
        more = (
            f"<details><summary>All steps as a table</summary>{report_facts.table(facts)}</details>"
        )
    return (
        f'<section{" class=wide" if plot.wide else ""}><div class="head">'
        f"<h2>{html.escape(plot.title)}</h2>{_choice(plot)}</div>\n<p>{said}</p>{drawn}{more}</section>\n"
    )


def _choice(plot: Plot) -> str:
    """What selects one of several views."""
    if len(plot.figures) < 2:
        return ""
    options = "".join(f"<option>{html.escape(name)}</option>" for name in plot.figures)
    label = f"{html.escape(plot.title)}: which view"
    return f'<select data-plot="{html.escape(plot.key)}" aria-label="{label}">{options}</select>'


def _scripts(plots: Sequence[Plot], plotly: str) -> str:
    """The library, what it draws, and what makes it."""
    views = {plot.key: list(plot.figures.items()) for plot in plots if plot.figures}
    data = orjson.dumps({"template": TEMPLATE, "plots": views}).decode()
    # No name in a checkpoint ends the element that it is in.
    data = data.replace("<", "\\u003c")
    library = plotly.replace("</script", "<\\/script")
    return (
        "<noscript><p>The plots need JavaScript; the table does not.</p></noscript>\n"
        f'<script type="application/json" id="data">{data}</script>\n'
        f"<script>{library}</script>\n<script>{_file('page.js')}</script>\n"
    )


def _file(name: str) -> str:
    """A file beside this one."""
    return Path(__file__).with_name(name).read_text("utf-8")
