"""The ratios to Orbax as bars, with the targets marked."""

from __future__ import annotations

from pathlib import Path

from benchmarks.table import Row, Table

LABELS = ("1/128", "1/64", "1/32", "1/16", "1/8", "1/4", "1/2", "1", "2")
TICKS = [2.0**n for n in range(-7, 2)]


def draw(tables: list[Table], path: Path) -> None:
    """Writes a bar chart of all rows that are times, on a logarithmic axis."""
    from matplotlib.figure import Figure

    bars = [(f"{t.title}: {row.what[:-4]}", row) for t in tables for row in timed(t)]
    figure = Figure(figsize=(9, 1.2 + 0.22 * len(bars)), layout="constrained")
    axes = figure.subplots()
    colors = ["tab:red" if r.target and not r.target.met(r) else "tab:blue" for _, r in bars]
    axes.barh([label for label, _ in bars], [row.ratio for _, row in bars], color=colors)
    for n, (_, row) in enumerate(bars):
        if row.target and row.target.of == "ratio":
            axes.plot([row.target.limit] * 2, [n - 0.45, n + 0.45], color="black", linewidth=2)
    axes.axvline(1, color="gray", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xlim(TICKS[0], max([2, *(row.ratio for _, row in bars)]))
    axes.set_xticks(TICKS, labels=LABELS)
    axes.set_xlabel("time of flaxckpt / time of Orbax (black: target; red: missed)")
    axes.invert_yaxis()
    axes.margins(y=0.01)
    figure.savefig(path)


def timed(table: Table) -> list[Row]:
    """The rows of times beside Orbax."""
    return [r for r in table.rows if table.sides[1] == "Orbax" and r.what.endswith(", ms")]
