"""Straight lines through what was measured: no coefficient is negative, and errors are relative."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import nnls

Point = Mapping[str, float]
# Of what each piece is a sum, each term with a coefficient; 1 is a constant.
FORMS: dict[str, tuple[str, ...]] = {
    "gather_secs": ("1", "processes"),
    "open_secs": ("1", "processes"),
    "merge_secs": ("1", "leaves", "processes", "entries"),
    "sizes_secs": ("1", "files"),
    "metadata_secs": ("1", "leaves", "files"),
    "fsync_secs": ("1", "processes"),
    "leader_bytes": ("1", "leaves", "processes", "entries"),
    "leader_requests": ("1", "processes"),
    "message_bytes": ("other_files",),
    "node_bytes": ("1", "processes", "entries"),
    "metadata_bytes": ("1", "leaves", "files"),
    "opening_secs": ("1", "leaves", "files"),
    "index_secs": ("1", "entries"),
    "index_bytes": ("1", "entries"),
    "restore_requests": ("1",),
    "commit_secs": ("transactions", "rewritten"),
    "commit_files": ("1", "transactions"),
    "commit_requests": ("1", "transactions"),
    "plan_secs": ("devices",),
    "sharding_bytes": ("1", "devices"),
}
Fit = dict[str, float]


def terms(names: Sequence[str], point: Point) -> list[float]:
    """The values that the coefficients belong to."""
    return [1.0 if name == "1" else point[name] for name in names]


def fit(piece: str, points: Sequence[Point]) -> Fit:
    """The coefficients of `piece` with the smallest sum of squares of relative errors."""
    names = FORMS[piece]
    used = [point for point in points if point.get(piece, 0) > 0]
    if not used:
        return dict.fromkeys(names, 0.0)
    rows = np.array([terms(names, point) for point in used])
    values = np.array([point[piece] for point in used])
    scale = np.abs(rows / values[:, None]).max(axis=0)
    scale[scale == 0] = 1
    found, _ = nnls(rows / values[:, None] / scale, np.ones(len(used)))
    return dict(zip(names, map(float, found / scale), strict=True))


def fit_all(points: Sequence[Point]) -> dict[str, Fit]:
    """The coefficients of every piece that the points have."""
    pieces = [piece for piece in FORMS if any(piece in point for point in points)]
    return {piece: fit(piece, points) for piece in pieces}


def value(fitted: Fit, point: Point) -> float:
    """What a piece is by its coefficients."""
    return float(np.dot(list(fitted.values()), terms(list(fitted), point)))


def errors(piece: str, known: Sequence[Point], others: Sequence[Point]) -> list[float]:
    """How far a fit of `known` is off at each of `others`: 0.1 is 10 percent too much."""
    fitted = fit(piece, known)
    return [value(fitted, point) / point[piece] - 1 for point in others if point.get(piece)]
