"""The facts of a report."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterable, Mapping, Sequence

from flaxckpt import text
from flaxckpt.errors import InvalidMetricError
from flaxckpt.metadata.step_metadata import Mode, PastSave
from flaxckpt.options import Options
from flaxckpt.run import listing
from flaxckpt.run.retention import StepInfo, best_first
from flaxckpt.run.run import Run, history
from flaxckpt.text import duration, moment

# What the page tells of a run, as plain data.


@dataclasses.dataclass(frozen=True)
class Save:
    """A save that the run remembers.

    Attributes:
      step: the step.
      time: when it was committed, in seconds since 1970.
      seconds: from the call until then.
      blocked: for how many of them the loop waited; `None` where nobody noted it.
      trained: for how many seconds the loop had trained since the save before; likewise.
      metrics: its metrics.
    """

    step: int
    time: float
    seconds: float
    blocked: float | None = None
    trained: float | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Step:
    """A step that is in the run, or was.

    Attributes:
      step: the step.
      time: when it was committed, in seconds since 1970; `None` when that is not known.
      metrics: its metrics.
      nbytes: the size of its files, in bytes; `None` when it is gone.
      is_kept: whether it is there.
      is_pinned: whether the user pinned it.
      is_damaged: whether it is there, but what it says of itself cannot be read.
    """

    step: int
    time: float | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    nbytes: int | None = None
    is_kept: bool = True
    is_pinned: bool = False
    is_damaged: bool = False


@dataclasses.dataclass(frozen=True)
class Facts:
    """All of a run.

    Attributes:
      directory: where it is.
      steps: the steps that are there or were, in order.
      saves: the saves that it remembers, in order.
      metric: the metric that decides what is best; `None` when none does.
      mode: whether its best value is the smallest or the largest.
      has_history: whether it remembers more than the newest one.
    """

    directory: str
    steps: Sequence[Step]
    saves: Sequence[Save] = ()
    metric: str | None = None
    mode: Mode = "min"
    has_history: bool = False

    @property
    def kept(self) -> list[Step]:
        """The steps that are there."""
        return [step for step in self.steps if step.is_kept]

    @property
    def readable(self) -> list[Step]:
        """Those of them that can be opened."""
        return [step for step in self.kept if not step.is_damaged]

    @property
    def metric_names(self) -> list[str]:
        """The metrics that any step has, the one that decides first."""
        names = {name for step in self.steps for name in step.metrics}
        return sorted(names, key=lambda name: (name != self.metric, name))

    @property
    def best(self) -> Step | None:
        """The best step that is there."""
        if self.metric is None:
            return None
        steps = {step.step: step for step in self.kept}
        infos = [StepInfo(s.step, metric=s.metrics.get(self.metric)) for s in steps.values()]
        ranked = best_first(infos, self.mode)
        return steps[ranked[0].step] if ranked else None

    @property
    def nbytes(self) -> int:
        """The size of the files of all steps, in bytes."""
        return sum(step.nbytes or 0 for step in self.kept)

    @property
    def span(self) -> tuple[float, float] | None:
        """When the first and the last step were committed, of which that is known."""
        times = [step.time for step in self.steps if step.time is not None]
        return (min(times), max(times)) if times else None

    @property
    def overhead(self) -> tuple[float, float] | None:
        """For how many seconds saves blocked the loop, and for how many it trained between them."""
        known = [
            (save.blocked, save.trained)
            for save in self.saves
            if save.blocked is not None and save.trained is not None
        ]
        if not known:
            return None
        return math.fsum(k[0] for k in known), math.fsum(k[1] for k in known)


# What a run remembers of its saves, as facts; what makes no sense is left out. Pure.


def saves_of(past: Iterable[PastSave]) -> list[Save]:
    """The saves, each with how long the loop had trained before it.

    Example:
      >>> past = [PastSave(1, 10.0, 2.0, 0.5, 1, 8, {}), PastSave(2, 20.0, 3.0, 0.5, 1, 8, {})]
      >>> [save.trained for save in saves_of(past)]  # from 8.5 to 17
      [None, 8.5]
    """
    found: list[Save] = []
    since: float | None = None
    for save in past:
        if not all(map(math.isfinite, (save.time, save.seconds, save.blocked_seconds))):
            continue
        began = save.time - save.seconds
        trained = None if since is None or began < since else began - since
        # Nobody noted for how long the last save of a process blocked it. So the time until the
        # next one, which is of another process, is not taken for training.
        blocked = save.blocked_seconds or None
        since = None if blocked is None else began + blocked
        metrics = finite(save.metrics)
        found.append(Save(save.step, save.time, save.seconds, blocked, trained, metrics))
    return found


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those of the metrics that are finite numbers."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


# The words of the page: the numbers at its top, and the steps as a table. Pure.


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


# What there is to know of a run without reading an array, as facts.


def gather(
    run: Run,
    *,
    metric: str | None = None,
    mode: Mode = "min",
    options: Options = Options(),
) -> Facts:
    """The facts of `run`.

    Args:
      run: it has a step.
      metric: which metric decides what is best; by default the only one there is.
      mode: whether its best value is the smallest or the largest.
      options: how object stores are reached.

    Raises:
      CheckpointNotFoundError: when it has no step.
      InvalidMetricError: when no step has that metric.
    """
    run.existing(run.latest())
    saves = saves_of(history(run, options))
    kept = [_kept(step) for step in listing.steps_of(run)]
    found = merged(kept, saves)
    has_history = len(saves) > 1 or len(kept) == 1
    return Facts(str(run.directory), found, saves, _deciding(found, metric), mode, has_history)


def merged(kept: Sequence[Step], saves: Sequence[Save]) -> list[Step]:
    """The steps that are there, and those that once were saved, in order."""
    gone = {s.step: Step(s.step, s.time, s.metrics, is_kept=False) for s in saves}
    there = {step.step: step for step in kept}
    return [step for _, step in sorted((gone | there).items())]


def _kept(step: listing.Step) -> Step:
    """A step that is there."""
    return Step(
        step.step,
        None if step.damaged else step.described.committed_ns / 1e9,
        finite(step.described.metrics),
        step.nbytes,
        is_pinned=step.pinned,
        is_damaged=step.damaged,
    )


def _deciding(found: Sequence[Step], metric: str | None) -> str | None:
    """The metric that decides what is best.

    Raises:
      InvalidMetricError: when no step has `metric`.
    """
    names = sorted({name for step in found for name in step.metrics})
    if metric is None:
        return names[0] if len(names) == 1 else None
    if metric not in names:
        have = f"{', '.join(names)}. Give one of these" if names else "none. Give none"
        raise InvalidMetricError(f"no step has the metric {metric!r}. They have {have}.")
    return metric
