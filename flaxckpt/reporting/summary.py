"""The words of the page: the numbers at its top, and the steps as a table. Pure."""

from __future__ import annotations

import html
from collections.abc import Sequence

from flaxckpt.cli import text
from flaxckpt.reporting.facts import Facts, Save, Step
from flaxckpt.reporting.wording import duration, moment


def tiles(facts: Facts) -> str:
    """The numbers at the top."""
    newest, gone = facts.kept[-1], len(facts.steps) - len(facts.kept)
    kept = (str(len(facts.kept)), f"{gone:,} deleted" if facts.has_history else "")
    shown = [
        _tile("steps kept", *kept),
        _tile("newest", f"{newest.step:,}", _utc(newest.time)),
        _tile("best", *_best(facts)),
        _tile("on disk", text.size(facts.nbytes)),
        _tile("time span", *_span(facts)),
    ]
    return f'<dl class="tiles">{"".join(shown)}</dl>'


def _tile(title: str, value: str, more: str = "") -> str:
    """One number."""
    words = (html.escape(word) for word in (title, value, more))
    return "<div><dt>{}</dt><dd><b>{}</b><small>{}</small></dd></div>".format(*words)


def _utc(seconds: float | None) -> str:
    """A time with its zone."""
    return f"{moment(seconds)} UTC" if seconds is not None else ""


def _best(facts: Facts) -> tuple[str, str]:
    """The best step and its metric, or why there is none."""
    best = facts.best
    if best is not None and facts.metric is not None:
        return f"{best.step:,}", f"{facts.metric} {text.number(best.metrics[facts.metric])}"
    return "-", "which metric? (--metric)" if facts.metric_names else "no metrics"


def _span(facts: Facts) -> tuple[str, str]:
    """From the first step to the last."""
    if facts.span is None:
        return "-", ""
    return duration(facts.span[1] - facts.span[0]), f"since {_utc(facts.span[0])}"


def table(facts: Facts) -> str:
    """All steps as a table."""
    saves = {save.step: save for save in facts.saves}
    best = facts.best
    titles = ["step", "state", "committed (UTC)", *facts.metric_names, "files", "save", "blocked"]
    rows = [
        _row(facts, step, saves.get(step.step), is_best=best is not None and step.step == best.step)
        for step in reversed(facts.steps)
    ]
    head = "".join(f'<th scope="col">{html.escape(title)}</th>' for title in titles)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="all steps"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _row(facts: Facts, step: Step, save: Save | None, *, is_best: bool) -> str:
    """A step as a row."""
    cells: Sequence[str] = [
        _state(step, is_best=is_best),
        moment(step.time),
        *(text.number(step.metrics.get(name)) for name in facts.metric_names),
        "" if step.nbytes is None else text.size(step.nbytes),
        "" if save is None else duration(save.seconds),
        "" if save is None or save.blocked is None else duration(save.blocked),
    ]
    rest = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
    kind = "" if step.is_kept else ' class="gone"'
    return f'<tr{kind}><th scope="row">{step.step:,}</th>{rest}</tr>'


def _state(step: Step, *, is_best: bool) -> str:
    """What a step is."""
    if not step.is_kept:
        return "deleted"
    more = {"best": is_best, "pinned": step.is_pinned, "damaged": step.is_damaged}
    return ", ".join(["kept", *(word for word, is_so in more.items() if is_so)])
