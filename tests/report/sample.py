"""Runs for the tests of the report: one that is made up, and one that is really saved."""

import time

import numpy as np

import flaxckpt
from flaxckpt.metadata.step_metadata import PastSave
from flaxckpt.report.facts import Facts, ReportedStep, saves_of

DAY = 1_760_000_000.0


def past(*steps, seconds=2.0, blocked=0.5):
    """A save every minute."""
    return [
        PastSave(step, DAY + 60 * i, seconds, blocked, 3, 1000, {"loss": 1 / (i + 1)})
        for i, step in enumerate(steps)
    ]


def facts(**changed):
    """A run of five saves: two steps are gone, one is pinned, one is damaged."""
    saves = saves_of(past(0, 10, 20, 30, 40))
    gone = {0, 20}
    steps = [
        ReportedStep(
            s.step, s.time, s.metrics, None if s.step in gone else 1500, s.step not in gone
        )
        for s in saves
    ]
    steps[1] = ReportedStep(10, DAY + 60, {"loss": 0.5}, 1500, is_pinned=True)
    steps.append(ReportedStep(50, is_damaged=True))
    known = {
        "directory": "runs/made-up",
        "steps": steps,
        "saves": saves,
        "metric": "loss",
        "mode": "min",
    }
    return Facts(**known | changed)


def state(rng, old=None, rate=0.1):
    """A state like that of a small transformer with adam, and the one after it."""
    if old is None:
        layer = {"attention": {"qkv": (96, 288), "out": (96, 96)}, "mlp": {"up": (96, 384)}}
        layer["mlp"]["down"] = (384, 96)
        shapes = (
            {"embed": (512, 96)} | {f"layer_{i}": layer for i in range(3)} | {"head": (96, 512)}
        )
        params = _made(shapes, lambda shape: rng.uniform(0.1, 2) * rng.normal(size=shape))
        zeros = _made(shapes, np.zeros)
        return {"step": 0, "params": params, "opt_state": {"mu": zeros, "nu": zeros}}
    moved = _changed(old["params"], lambda v: v + rate * rng.normal(size=v.shape))
    mu = _changed(old["opt_state"]["mu"], lambda v: 0.9 * v + 0.1 * rng.normal(size=v.shape))
    nu = _changed(old["opt_state"]["nu"], lambda v: 0.9 * v + 0.1)
    return {"step": old["step"] + 1, "params": moved, "opt_state": {"mu": mu, "nu": nu}}


def _made(shapes, make):
    """Arrays of these shapes."""
    if isinstance(shapes, dict):
        return {name: _made(inner, make) for name, inner in shapes.items()}
    return np.asarray(make(shapes), np.float32)


def _changed(tree, change):
    """Other arrays in the place of these."""
    if isinstance(tree, dict):
        return {name: _changed(inner, change) for name, inner in tree.items()}
    return change(tree).astype(np.float32)


def save_run(directory, *, upto=1800):
    """A run with metrics that was restarted once; some of its steps were deleted, one is pinned."""
    rng = np.random.default_rng(0)
    tree = state(rng)
    keep = flaxckpt.Keep(last=3, best=2, metric="loss", mode="min", every=500)
    options = flaxckpt.Options(fsync=False)
    for first, last in ((0, upto // 2), (upto // 2 + 100, upto)):
        with flaxckpt.CheckpointManager(directory, keep=keep, options=options) as ckpt:
            for step in range(first, last + 1, 100):
                time.sleep(0.02)
                tree = state(rng, tree, rate=0.1 * 0.8 ** (step / 100))
                ckpt(step, tree, metrics=_metrics(rng, step))
                if step == 300:
                    ckpt.pin(300)


def _metrics(rng, step):
    """A loss that falls and then rises, and an accuracy."""
    loss = 0.3 + 2.0 * 0.75 ** (step / 100) + (step / 4000) ** 2 + 0.02 * rng.random()
    return {"loss": loss, "accuracy": 1 - loss / 3}
