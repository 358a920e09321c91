"""Calls that cannot be meant: refused before anything is done, with the spelling that is meant.

Unknown keywords, arguments of the wrong type, and the names that Orbax, flax and CLU have for ours.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import numbers
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from flaxckpt.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")


def checked(**types: type) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a public function check its arguments before anything else.

    Args:
      **types: the types of arguments that take an object of one class of ours.

    Raises:
      ArgumentError: by the function, if a keyword is unknown, or an argument is of another type.

    Example:
      >>> @checked()
      ... def save(path, tree, *, overwrite=False): ...
      >>> save("x", {}, force=True)
      Traceback (most recent call last):
      flaxckpt.errors.ArgumentError: save() has no argument 'force'. Use overwrite=.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        where = function.__qualname__.removesuffix(".__init__")
        parameters = inspect.signature(function).parameters.values()
        is_open = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        names = [p.name for p in named]
        # What comes after `*args` is never positional.
        positional = [p.name for p in named if p.kind is not p.KEYWORD_ONLY]
        checks = {name: _check_of(name, names, types.get(name)) for name in names}
        optional = {p.name for p in named if p.default is None}

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name, value in (*zip(positional, args, strict=False), *kwargs.items()):
                if name not in checks:
                    if not is_open:
                        raise ArgumentError(_unknown(where, name, names))
                elif (check := checks[name]) is not None and not (
                    value is None and name in optional
                ):
                    check(f"{where}({name}=...)", value)
            return function(*args, **kwargs)

        return call

    return decorate


def _unknown(where: str, name: str, names: list[str]) -> str:
    """Says that there is no argument `name`, and which one is meant."""
    problem = f"{where}() has no argument {name!r}."
    for ours, spelling in _FOREIGN_ARGUMENTS.get(name, {}).items():
        if ours in names or not ours:
            return f"{problem} Use {spelling or ours + '='}."
    public = [n for n in names if n != "self"]
    near = difflib.get_close_matches(name, public, 1)
    hint = f"Did you mean {near[0]}=?" if near else f"It takes {', '.join(public)}."
    if "items" in names:
        hint += f" An object beside the state goes into items={{{name!r}: ...}}."
    return f"{problem} {hint}"


# What others call an argument of ours, by an argument that the function must have; "" for none.
_IN_SAVE = "ckpt.save(step, state, {}=True), which saves whatever the schedule says"
_KEEP_RANKS = 'keep=Keep(metric="loss", mode="min")'
_FOREIGN_ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "force": {"overwrite": "", "metrics": _IN_SAVE.format("overwrite")},
    "overwrite": {"metrics": _IN_SAVE.format("overwrite")},
    "blocking": {"wait": "", "metrics": _IN_SAVE.format("wait")},
    "wait": {"metrics": _IN_SAVE.format("wait")},
    "metric": {"metrics": "", "keep": _KEEP_RANKS},
    "mode": {"keep": _KEEP_RANKS},
    "best_fn": {"keep": _KEEP_RANKS},
    "best_mode": {"keep": _KEEP_RANKS},
    "max_to_keep": {"keep": "keep=Keep(last=...)"},
    "keep_period": {"keep": "keep=Keep(every=...)"},
    "keep_every_n_steps": {"keep": "keep=Keep(every=...)"},
    "save_interval_steps": {"save_every": "save_every=Every(steps=...)"},
    "enable_async_checkpointing": {"async_": ""},
    "custom_metadata": {"metadata": ""},
    "args": {
        "state": "the state itself: save(step, state), and items= for objects beside it",
        "target": "the target itself: restore(target), and items= for objects beside it",
        "tree": "the tree itself: save(path, tree), and items= for objects beside it",
    },
    "items": {"target": "flaxckpt.restore_items(path, {name: target})"},
    "item": {"state": "", "tree": "", "target": ""},
    "target": {"state": "", "tree": ""},
    "pytree": {"state": "", "tree": "", "target": ""},
    "abstract_state": {"target": ""},
    "state": {"tree": ""},
    "tree": {"state": ""},
    "ckpt_dir": {"path": "", "directory": ""},
    "workdir": {"directory": ""},
    "partial_restore": {"only": ""},
    "strict": {"missing": "missing= and unexpected="},
}


# Arguments of the wrong type.

Check = Callable[[str, Any], None]


def _check_of(name: str, names: list[str], wanted: type | None) -> Check | None:
    """What checks the argument `name` of a function that takes `names`; `None` for any value."""
    if wanted is not None:
        return functools.partial(check_type, wanted)
    if name == "target":
        return _check_run_target if "step" in names else _check_target
    return _CHECKS.get(name)


def check_type(wanted: type, where: str, value: Any) -> None:
    """Refuses a `value` of another class than `wanted`, a public one of ours.

    Raises:
      ArgumentError: in that case, with the right spelling.
    """
    if not isinstance(value, wanted):
        name = wanted.__name__
        article = "an" if name[0] in "AEIO" else "a"
        raise ArgumentError(
            f"{where} takes {article} {name}, got {shown(value)}. {_spelled(name, value)}"
        )


def _spelled(name: str, value: Any) -> str:
    """How an object of the class `name` is spelled that `value` was meant for."""
    if name == "Every" and callable(value):
        return "Pass Every(steps=...), or decide in the loop and call ckpt.save(step, state)."
    if name == "Every":
        return f"Pass Every(steps={value if isinstance(value, int) else 1000})."
    if name == "Keep" and callable(value):
        return "Pass Keep(last=..., best=..., every=...), or delete steps by ckpt.delete(step)."
    if name == "Keep":
        return f"Pass Keep(last={value if isinstance(value, int) else 3})."
    if type(value).__module__.startswith("orbax."):
        return (
            "Of its fields, max_to_keep is keep=Keep(last=...), and save_interval_steps is "
            "save_every=Every(steps=...)."
        )
    if isinstance(value, Mapping):
        given = ", ".join(f"{key}={inner!r}" for key, inner in value.items())
        return f"Pass {name}({given})."
    return f"Pass {name}(...)."


def check_count(where: str, value: Any) -> None:
    """Refuses a `value` that is not an integer.

    Raises:
      ArgumentError: in that case.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        operator.index(value)
    except TypeError:
        raise ArgumentError(
            f"{where} must be an integer, got {shown(value)}. Pass an int."
        ) from None


def check_positive(where: str, value: Any, *, is_count: bool) -> None:
    """Refuses a `value` that is not a positive number, or with `is_count` a positive integer.

    Raises:
      ArgumentError: if it is of another type.
      ValueError: if it is not positive.
    """
    if is_count:
        check_count(where, value)
    elif isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentError(f"{where} must be a number, got {shown(value)}. Pass a float.")
    if not value > 0:
        raise ValueError(f"{where} must be positive, got {value!r}")


def shown(value: Any) -> str:
    """A value in an error: short, and never the numbers of an array."""
    if isinstance(value, str | int | float | None):
        return repr(value)[:80]
    kind = type(value)
    name = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    return f"a {name}"


def _check_state(where: str, value: Any) -> None:
    """Refuses what Orbax wraps a state in."""
    kinds = type(value).__mro__
    if any(k.__name__ == "CheckpointArgs" and k.__module__.startswith("orbax.") for k in kinds):
        name = type(value).__name__
        how = "the state itself: for StandardSave(state), pass state"
        if name.startswith("Composite"):
            how = "the state itself, and the other objects by name in items={...}"
        raise ArgumentError(f"{where} got Orbax's {name}. Pass {how}.")


def _check_target(where: str, value: Any) -> None:
    _check_state(where, value)
    if type(value).__name__ == "CheckpointInfo" and _is_ours(value):
        raise ArgumentError(f"{where} takes a tree, got a CheckpointInfo. Pass its attribute tree.")


def _check_run_target(where: str, value: Any) -> None:
    _check_target(where, value)
    if isinstance(value, int) and not isinstance(value, bool):
        raise ArgumentError(
            f"{where} takes what the state looks like, got {value}. For a step, use "
            f"restore(step={value})."
        )


def _check_path(where: str, value: Any) -> None:
    if not isinstance(value, str | os.PathLike) and not _is_ours(value):
        raise ArgumentError(
            f"{where} takes a path, got {shown(value)}. Pass the path first, and then the tree."
        )


def _check_transforms(where: str, value: Any) -> None:
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        name = type(value).__name__
        meant = f"[{name}(...)]" if _is_ours(value) else "[Rename(...), ...]"
        raise ArgumentError(
            f"{where} takes a sequence of transforms, got {shown(value)}. Pass transforms={meant}."
        )


def _is_ours(value: Any) -> bool:
    return type(value).__module__.startswith("flaxckpt.")


def _mapping(example: str) -> Check:
    """Refuses what is not a mapping."""

    def check(where: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            raise ArgumentError(f"{where} takes a mapping, got {shown(value)}. Pass {example}.")

    return check


_CHECKS: Mapping[str, Check] = {
    "state": _check_state,
    "tree": _check_state,
    "path": _check_path,
    "directory": _check_path,
    "transforms": _check_transforms,
    "metrics": _mapping('metrics={"loss": 0.5}'),
    "metadata": _mapping('metadata={"git": "abc123"}'),
    "items": _mapping('items={"data": train_iterator}'),
}


# What Orbax, flax and CLU call attributes and functions of ours.


def no_attribute(owner: Any, name: str) -> AttributeError:
    """The error for an attribute that a `CheckpointManager` does not have."""
    problem = f"{type(owner).__name__!r} object has no attribute {name!r}"
    if spelling := _FOREIGN_ATTRIBUTES.get(name):
        problem = f"{problem}. Use {spelling}."
    return AttributeError(problem, name=name, obj=owner)


def no_public_name(module: str, name: str) -> AttributeError:
    """The error for a name that flaxckpt does not have."""
    problem = f"module {module!r} has no attribute {name!r}"
    if spelling := _FOREIGN_NAMES.get(name):
        problem = f"{problem}. Use {spelling}."
    return AttributeError(problem, name=name)


_FOREIGN_ATTRIBUTES = {
    "all_steps": "steps()",
    "wait_until_finished": "wait()",
    "check_for_errors": "wait(); the next call of the manager raises the error of a save as well",
    "is_saving_in_progress": "wait()",
    "reached_preemption": "the attribute preempted",
    "item_metadata": "inspect(step)",
    "reload": "steps(), which always looks at the disk",
    "latest": "latest_step()",
    "restore_or_initialize": "restore_or_init(init_fn)",
    "save_checkpoint": "save(step, state)",
    "load_state": "restore(target)",
    "should_keep": "keep=Keep(...)",
}
_RUN = "CheckpointManager(directory)"
_FUNCTIONS = "flaxckpt.save(path, tree) and flaxckpt.restore(path)"
_FOREIGN_NAMES = {
    "save_checkpoint": f"flaxckpt.save(path, tree), or {_RUN}.save(step, state)",
    "save_checkpoint_multiprocess": f"{_RUN}.save(step, state)",
    "restore_checkpoint": f"flaxckpt.restore(path, target), or {_RUN}.restore(target)",
    "latest_checkpoint": f"{_RUN}.latest_step()",
    "CheckpointManagerOptions": "the arguments of CheckpointManager: keep=, save_every=, ...",
    "Checkpointer": _FUNCTIONS,
    "StandardCheckpointer": _FUNCTIONS,
    "PyTreeCheckpointer": _FUNCTIONS,
    "AsyncCheckpointer": _RUN,
    "Checkpoint": _RUN,
    "MultihostCheckpoint": _RUN,
    "load": "flaxckpt.restore(path)",
    "args": "the objects themselves: save(step, state, items={...})",
}
