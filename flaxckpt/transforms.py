"""Changes on the way from a checkpoint to a target."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from flaxckpt.errors import RuleError
from flaxckpt.leaves.dtypes import dtype_name, parse_dtype
from flaxckpt.leaves.lazy_array import LazyArray, layer, recast, resized, stacked
from flaxckpt.leaves.spec import ARRAY_KINDS, LeafSpec
from flaxckpt.sharding.chunks import Shape
from flaxckpt.source.leaf import Leaf, as_leaf
from flaxckpt.tree.keypaths import pattern_matches

# A transform is a function of two dicts, from key paths to leaves: the state so far, and the
# target. It returns the new state. The classes of this package are such functions, and so is any
# function of the user's. They are applied in order, and only what the target needs of the result is
# read.
#
# A pattern is the key path of a node, for all leaves of its subtree, or a regular expression that
# must match a whole key path (`re.fullmatch`). A rule that matches nothing is an error, unless it
# is `optional`.


# The leaves by key path, in their order.
LeafDict = dict[str, Leaf]
# The leaves of the target by key path, as they are; empty without a target.
TargetLeaves = Mapping[str, Any]
Transform = Callable[[LeafDict, TargetLeaves], Mapping[str, Any]]

# Of numpy's kinds of dtypes; those of ml_dtypes are V.
_NUMERIC = "biufcV"


@dataclasses.dataclass(frozen=True)
class Rename:
    r"""Moves each leaf that `pattern` matches to the key path that `replacement` makes of it.

    Attributes:
      pattern: the key path of a node, or a regular expression.
      replacement: as for `re.sub`, with the groups of `pattern`. For the key path of a node, the
        new key path of that node.
      optional: whether it may match nothing.

    Example:
      >>> flaxckpt.save(tmp_path / "old", {"classifier": {"kernel": 1}})
      >>> rule = flaxckpt.Rename("classifier/(.*)", r"head/\1")
      >>> flaxckpt.restore(tmp_path / "old", {"head": {"kernel": 0}}, transforms=[rule])
      {'head': {'kernel': 1}}
    """

    pattern: str
    replacement: str
    optional: bool = False

    def __call__(self, state: LeafDict, target: TargetLeaves) -> LeafDict:
        """The state with the new names, in the old order."""
        found = matches(self, self.pattern, state, self.optional)
        return merged(self, ((self._name(found.get(n), n), leaf) for n, leaf in state.items()))

    def _name(self, match: re.Match[str] | None, name: str) -> str:
        """What `name` becomes."""
        return name if match is None else expand(self, match, self.replacement)


@dataclasses.dataclass(frozen=True)
class Drop:
    """Takes out each leaf that `pattern` matches; it is not read.

    Attributes:
      pattern: the key path of a node, or a regular expression.
      optional: whether it may match nothing.
    """

    pattern: str
    optional: bool = False

    def __call__(self, state: LeafDict, target: TargetLeaves) -> LeafDict:
        """The state without them."""
        found = matches(self, self.pattern, state, self.optional)
        return {name: leaf for name, leaf in state.items() if name not in found}


@dataclasses.dataclass(frozen=True)
class Apply:
    """Computes leaves from leaves.

    With a `pattern`, each leaf that it matches becomes `fn(path, array)`. With `inputs` and an
    `output`, `fn(path, array, array, ...)` makes one leaf of several: each of `inputs` is a
    pattern, and those of its matches that `output` gives one path belong together. The inputs are
    taken out, unless `keep` is set. Arrays are given as numpy arrays, on the host, and whole; the
    results that are needed are all on the host until the restore ends.

    Attributes:
      pattern: the key path of a node, or a regular expression.
      fn: makes the value: an array, or anything a checkpoint can hold.
      inputs: key paths of nodes, or regular expressions.
      output: the key path of the result, as the replacement of `re.sub`.
      keep: whether the inputs stay.
      optional: whether it may match nothing.

    Example:
      >>> import numpy as np
      >>> flaxckpt.save(tmp_path / "old", {"q": np.ones(2), "k": np.zeros(2)})
      >>> join = flaxckpt.Apply(
      ...     inputs=["q", "k"], output="qk", fn=lambda path, *parts: np.stack(parts))
      >>> flaxckpt.restore(tmp_path / "old", transforms=[join])["qk"].shape
      (2, 2)
    """

    pattern: str | None = None
    fn: Callable[..., Any] | None = None
    _: dataclasses.KW_ONLY
    inputs: Sequence[str] = ()
    output: str | None = None
    keep: bool = False
    optional: bool = False

    def __post_init__(self) -> None:
        """Refuses what is neither of the two forms."""
        several = bool(self.inputs) and self.output is not None and self.pattern is None
        single = self.pattern is not None and not self.inputs and self.output is None
        if self.fn is None or not (several or single) or (single and self.keep):
            raise ValueError(
                "Apply takes pattern and fn, or inputs, output and fn (and keep), got "
                f"{self!r:.300}"
            )

    def __call__(self, state: LeafDict, target: TargetLeaves) -> LeafDict:
        """The state with the results at the end."""
        patterns = [self.pattern] if self.pattern is not None else self.inputs
        output = r"\g<0>" if self.output is None else self.output
        groups: dict[str, list[str]] = {}
        for number, pattern in enumerate(patterns):
            for name, match in matches(self, pattern, state, self.optional).items():
                groups.setdefault(expand(self, match, output), []).append(name)
                if len(groups[expand(self, match, output)]) != number + 1:
                    raise self._unequal(groups)
        if any(len(names) != len(patterns) for names in groups.values()):
            raise self._unequal(groups)
        used = {name for names in groups.values() for name in names}
        left = {n: leaf for n, leaf in state.items() if self.keep or n not in used}
        made = ((out, self._made(out, [state[n] for n in names])) for out, names in groups.items())
        return merged(self, [*left.items(), *made])

    def _made(self, path: str, inputs: Sequence[Leaf]) -> Leaf:
        """The leaf at `path`; it is computed when it turns out to be needed."""

        def compute() -> Leaf:
            assert self.fn is not None
            made = as_leaf(self.fn(path, *(leaf.read() for leaf in inputs)), path)
            kind = inputs[0].spec.kind
            if {kind, made.spec.kind} <= {"jax", "numpy"}:
                return Leaf(path, made.spec._replace(kind=kind), made.array)
            return made

        return Leaf.computed(path, compute)

    def _unequal(self, groups: Mapping[str, Sequence[str]]) -> RuleError:
        """The error of inputs that do not come in groups of the right size."""
        wrong = "; ".join(f"{out} of {', '.join(names)}" for out, names in groups.items())
        return RuleError(
            f"{self!r:.300} must find one leaf for each of its inputs, and makes {wrong}. Give "
            "inputs whose groups lead to one output each."
        )


@dataclasses.dataclass(frozen=True)
class Stack:
    r"""Makes one array of the layers of unrolled ones, as `nn.scan` has it.

    Attributes:
      pattern: a regular expression with a group called `index`: the number of the layer.
      output: the key path of the result, as the replacement of `re.sub`.
      axis: the new axis.
      optional: whether it may match nothing.

    Example:
      >>> import numpy as np
      >>> flaxckpt.save(tmp_path / "old", {"layer_0": {"w": np.ones(2)}, "layer_1": {"w": np.ones(2)}})
      >>> rule = flaxckpt.Stack(r"layer_(?P<index>\d+)/(.*)", r"layers/\2")
      >>> flaxckpt.restore(tmp_path / "old", transforms=[rule])["layers"]["w"].shape
      (2, 2)
    """  # noqa: E501

    pattern: str
    output: str
    axis: int = 0
    optional: bool = False

    def __call__(self, state: LeafDict, target: TargetLeaves) -> LeafDict:
        """The state with the stacked arrays at the end."""
        _check_index_group(self, self.pattern)
        groups: dict[str, dict[int, Leaf]] = {}
        found = matches(self, self.pattern, state, self.optional)
        for name, match in found.items():
            layers = groups.setdefault(expand(self, match, self.output), {})
            index = _number(self, match)
            if index in layers:
                raise RuleError(
                    f"{self} finds layer {index} twice, in {layers[index].name} and {name}. Let "
                    "its pattern match one of them, or give them two outputs."
                )
            layers[index] = state[name]
        left = {name: leaf for name, leaf in state.items() if name not in found}
        made = ((out, self._stacked(out, layers)) for out, layers in groups.items())
        return merged(self, [*left.items(), *made])

    def _stacked(self, name: str, layers: Mapping[int, Leaf]) -> Leaf:
        """The leaf `name`.

        Raises:
          RuleError: when a layer is missing.
        """
        ordered = [layers[index] for index in sorted(layers)]
        if sorted(layers) != list(range(len(layers))):
            raise RuleError(
                f"{self} finds the layers {sorted(layers)} for {name}: some are missing. Let its "
                "pattern match all of them, counted from 0."
            )
        return Leaf.computed(name, lambda: self._whole(name, ordered))

    def _whole(self, name: str, ordered: Sequence[Leaf]) -> Leaf:
        """The leaf `name`, of which `ordered` are the layers.

        Raises:
          RuleError: when the layers are not of one type.
        """
        specs = {str(leaf.spec): leaf.name for leaf in ordered}
        if len(specs) > 1:
            sides = "".join(f"\n  {path}  {spec}" for spec, path in specs.items())
            raise RuleError(
                f"{self} finds layers of different types for {name}:{sides}\nMake them the same "
                "first, with flaxckpt.Cast or flaxckpt.Apply(pattern, fn)."
            )
        spec, arrays = ordered[0].spec, [array_of(self, leaf) for leaf in ordered]
        axis = _checked_axis(self, self.axis, len(spec.shape) + 1)
        whole = stacked(arrays, axis)
        return Leaf(name, _with_shape(spec, whole), whole)


@dataclasses.dataclass(frozen=True)
class Unstack:
    r"""Makes one array for each layer of a stacked one: the inverse of `Stack`.

    Attributes:
      pattern: the key path of a node, or a regular expression.
      output: the key paths of the results, as the replacement of `re.sub`; `{index}` in it becomes
        the number of the layer.
      axis: the axis of the layers.
      optional: whether it may match nothing.

    Example:
      >>> flaxckpt.Unstack("layers/(.*)", r"layer_{index}/\1").axis
      0
    """

    pattern: str
    output: str
    axis: int = 0
    optional: bool = False

    def __call__(self, state: LeafDict, target: TargetLeaves) -> LeafDict:
        """The state with the layers at the end."""
        if "{index}" not in self.output:
            raise RuleError(
                f"{self} has no {{index}} in its output, where the layer's number goes. Write it "
                "there."
            )
        found = matches(self, self.pattern, state, self.optional)
        left = {name: leaf for name, leaf in state.items() if name not in found}
        made = [
            (self._name(match, index), part)
            for name, match in found.items()
            for index, part in enumerate(self._layers(state[name]))
        ]
        return merged(self, [*left.items(), *made])

    def _name(self, match: re.Match[str], index: int) -> str:
        """The key path of one layer."""
        # Not one template: after a group's number, a digit would be taken for a part of it.
        parts = (_expanded(self, match, part) for part in self.output.split("{index}"))
        return _with_rest(str(index).join(parts), match)

    def _layers(self, leaf: Leaf) -> Iterable[Leaf]:
        """The layers of one leaf."""
        array = array_of(self, leaf)
        axis = _checked_axis(self, self.axis, len(leaf.spec.shape))
        for index in range(array.shape[axis]):
            part = layer(array, axis, index)
            yield Leaf(leaf.name, _with_shape(leaf.spec, part), part)


@dataclasses.dataclass(frozen=True)
class Resize:
    """Gives arrays the shape that they have in the target: an embedding of a larger vocabulary.

    What both have in common, from index 0 on, stays where it is.

    Attributes:
      pattern: the key path of a node, or a regular expression.
      pad: the value of new elements; without it an axis must not grow.
      truncate: whether an axis may lose its last elements.
      optional: whether it may match nothing.

    Example:
      >>> import numpy as np
      >>> flaxckpt.save(tmp_path / "old", {"embedding": np.ones((2, 2))})
      >>> rule = flaxckpt.Resize("embedding", pad=0)
      >>> target = {"embedding": np.zeros((3, 2))}
      >>> flaxckpt.restore(tmp_path / "old", target, transforms=[rule])["embedding"].sum(axis=1)
      array([2., 2., 0.])
    """

    pattern: str
    pad: float | None = None
    truncate: bool = False
    optional: bool = False

    def __call__(self, state: LeafDict, target: TargetLeaves) -> LeafDict:
        """The state with the arrays as large as those of the target."""
        found = matches(self, self.pattern, state, self.optional)
        return {
            name: self._resized(leaf, np.shape(target[name]))
            if name in found and name in target
            else leaf
            for name, leaf in state.items()
        }

    def _resized(self, leaf: Leaf, shape: Shape) -> Leaf:
        """`leaf` with `shape`.

        Raises:
          RuleError: when that is not allowed.
        """
        if leaf.is_initial:
            return leaf
        array = array_of(self, leaf)
        if array.shape == shape:
            return leaf
        pairs = list(zip(array.shape, shape, strict=False))
        if len(array.shape) != len(shape):
            why = "has another number of axes"
        elif self.pad is None and any(new > old for old, new in pairs):
            why = "would have to grow, and no pad= is given"
        elif not self.truncate and any(new < old for old, new in pairs):
            why = "would have to be cut, and truncate=True is not given"
        else:
            pad = 0.0 if self.pad is None else self.pad
            if self.pad is not None and not _is_held(pad, parse_dtype(array.dtype)):
                raise RuleError(
                    f"{self!r:.300}: {leaf.name} is {leaf.spec}, which holds no {pad}. Give a pad "
                    "that it can hold."
                )
            spec = leaf.spec._replace(shape=shape, weak_type=False)
            return Leaf(leaf.name, spec, resized(array, shape, pad), origin=leaf.origin)
        raise RuleError(
            f"{self!r:.300}: {leaf.name} {why}.\n  checkpoint: {array.shape}\n  target:     {shape}"
        )


@dataclasses.dataclass(frozen=True)
class Fallback:
    """Gives the leaves of the target that `pattern` matches a value where the state has none.

    Attributes:
      pattern: the key path of a node of the target, or a regular expression.
      value: one value for all of them; or `"target"`, for the value that the target has.
      optional: whether it may match nothing.
    """

    pattern: str
    value: Any | Literal["target"]
    optional: bool = False

    def __call__(self, state: LeafDict, target: TargetLeaves) -> LeafDict:
        """The state with them at the end."""
        missing = [n for n in matches(self, self.pattern, target, self.optional) if n not in state]
        return state | {name: self._leaf(name, target[name]) for name in missing}

    def _leaf(self, name: str, in_target: Any) -> Leaf:
        """The leaf `name`."""
        if isinstance(self.value, str) and self.value == "target":
            return Leaf.computed(name, lambda: as_leaf(in_target, name), is_initial=True)
        value = self.value
        shape, dtype = getattr(in_target, "shape", ()), getattr(in_target, "dtype", None)
        if isinstance(value, bool | int | float | complex) and isinstance(dtype, np.dtype):
            try:
                value = np.full(shape, value, dtype)
            except (OverflowError, TypeError, ValueError) as error:
                raise RuleError(
                    f"{self!r:.300} does not fit {name}, which is {dtype}{list(shape)}: {error}. "
                    "Give a value that it can hold."
                ) from None
        return as_leaf(value, name)


@dataclasses.dataclass(frozen=True)
class Cast:
    """Converts the arrays that `pattern` matches to `dtype`, whatever is lost by that.

    Attributes:
      pattern: the key path of a node, or a regular expression.
      dtype: a dtype or its name.
      optional: whether it may match nothing.
    """

    pattern: str
    dtype: Any
    optional: bool = False

    def __call__(self, state: LeafDict, target: TargetLeaves) -> LeafDict:
        """The state with the arrays converted as they are read."""
        found, dtype = matches(self, self.pattern, state, self.optional), self._dtype()
        return {
            name: self._cast(leaf, dtype) if name in found and not leaf.is_initial else leaf
            for name, leaf in state.items()
        }

    def _dtype(self) -> str:
        """The name of the dtype.

        Raises:
          RuleError: when it is none that a checkpoint can hold.
        """
        try:
            if (name := dtype_name(np.dtype(self.dtype))) is not None:
                return name
        except TypeError:
            pass
        raise RuleError(
            f"{self} names no dtype that a checkpoint can hold. Give one of numpy or ml_dtypes, "
            "such as 'bfloat16'."
        )

    def _cast(self, leaf: Leaf, dtype: str) -> Leaf:
        """One leaf in the new dtype."""

        def made() -> Leaf:
            array = array_of(self, leaf)
            if parse_dtype(array.dtype).kind not in _NUMERIC:
                raise RuleError(
                    f"{self} cannot be used for {leaf.name}, which is {leaf.spec}. Let its pattern "
                    "match arrays of numbers only."
                )
            kind = leaf.spec.kind if leaf.spec.kind in ARRAY_KINDS else "numpy_scalar"
            return Leaf(leaf.name, LeafSpec(kind, dtype, array.shape), recast(array, dtype))

        return Leaf.computed(leaf.name, made, origin=leaf.origin)


# Applying transforms, and what they have in common.


def transformed(state: LeafDict, target: TargetLeaves, transforms: Iterable[Transform]) -> LeafDict:
    """`state` after `transforms`, in order.

    Raises:
      RuleError: when one matches nothing, makes two leaves of one path, or returns no dict.
    """
    for transform in transforms:
        result = transform(dict(state), dict(target))
        if not isinstance(result, Mapping):
            raise RuleError(
                f"the transform {transform!r:.300} returned a {type(result).__name__}. It must "
                "return a dict from key paths to leaves or values."
            )
        if odd := [name for name in result if not isinstance(name, str)]:
            raise RuleError(
                f"the transform {transform!r:.300} returned {odd[0]!r} as a key path. It must "
                "return a dict from key paths, which are strings, to leaves or values."
            )
        state = {name: as_leaf(value, name) for name, value in result.items()}
    return state


def matches(
    rule: Any, pattern: str, names: Collection[str], optional: bool
) -> dict[str, re.Match[str]]:
    """The leaves that `pattern` selects, with the match; see `pattern_matches`.

    Raises:
      RuleError: when it is not a valid regular expression, or selects nothing.
    """
    advice = "Fix the pattern, or pass optional=True."
    return pattern_matches(pattern, names, f"{rule!r:.300}", optional=optional, advice=advice)


def expand(rule: Any, match: re.Match[str], template: str) -> str:
    """`template` with the groups of `match`, and what follows a match of the path of a node.

    Raises:
      RuleError: when it names a group that there is not.
    """
    return _with_rest(_expanded(rule, match, template), match)


def _with_rest(name: str, match: re.Match[str]) -> str:
    """`name`, and below it the part of the key path that follows the path of a node."""
    rest = match.string[match.end() :].strip("/")
    if not rest:
        return name
    return f"{name}/{rest}" if name else rest


def _expanded(rule: Any, match: re.Match[str], template: str) -> str:
    """`template` with the groups of `match`."""
    try:
        return match.expand(template)
    except (re.error, IndexError) as error:
        raise RuleError(
            f"{rule!r:.300}: {template!r} does not fit its pattern: {error}. Name a group that the "
            "pattern has."
        ) from None


def merged(rule: Any, pairs: Iterable[tuple[str, Leaf]]) -> LeafDict:
    """A state of `pairs`.

    Raises:
      RuleError: when two have one name.
    """
    state: LeafDict = {}
    for name, leaf in pairs:
        if name in state:
            raise RuleError(
                f"{rule!r:.300} makes two leaves of the key path {name}: {state[name].name} and "
                f"{leaf.name}. Drop one of them first."
            )
        state[name] = leaf
    return state


def array_of(rule: Any, leaf: Leaf) -> LazyArray:
    """The array of a leaf.

    Raises:
      RuleError: when it has none, or is a PRNG key.
    """
    if leaf.array is None or leaf.spec.kind == "prng_key":
        raise RuleError(
            f"{rule!r:.300} cannot be used for {leaf.name}, which is {leaf.spec}. Let its pattern "
            "match arrays only."
        )
    return leaf.array


def _with_shape(spec: LeafSpec, array: LazyArray) -> LeafSpec:
    """The spec of `array`, of the kind of `spec` where that is one of arrays."""
    kind = spec.kind if spec.kind in ("jax", "numpy") else "numpy"
    return LeafSpec(kind, array.dtype, array.shape)


def _checked_axis(rule: Any, axis: int, axes: int) -> int:
    """`axis` counted from the start.

    Raises:
      RuleError: when there is none of that number.
    """
    if not -axes <= axis < axes:
        raise RuleError(
            f"{rule!r:.300} has no axis {axis} among {axes}. Give another axis=, or let its "
            "pattern match other leaves."
        )
    return axis % axes


def _number(rule: Any, match: re.Match[str]) -> int:
    """The number of a layer.

    Raises:
      RuleError: when it is none.
    """
    if not (match["index"] or "").isdecimal():
        raise RuleError(
            f"{rule!r:.300}: {match['index']!r} in {match[0]} is not the number of a layer. Let "
            "the group match digits, as in (?P<index>[0-9]+)."
        )
    return int(match["index"])


def _check_index_group(rule: Any, pattern: str) -> None:
    """Refuses a pattern without a group called `index`."""
    if "(?P<index>" not in pattern:
        raise RuleError(
            f"{rule!r:.300} has no group (?P<index>...) for the layer's number. Write one into "
            "its pattern, such as (?P<index>[0-9]+)."
        )


def _is_held(pad: float, dtype: np.dtype) -> bool:
    """Whether arrays of `dtype` can have the element `pad`."""
    if math.isnan(pad):
        return bool(jax.dtypes.issubdtype(dtype, np.inexact))
    try:
        return bool(np.full((), pad, dtype) == pad)
    except (OverflowError, TypeError, ValueError):
        return False
