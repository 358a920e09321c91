"""The colours of the page, by day and by night."""

from __future__ import annotations

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
