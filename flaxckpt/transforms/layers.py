"""Scanned layers from unrolled ones, and back."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flaxckpt.errors import RuleError
from flaxckpt.leaves.lazy import LazyArray
from flaxckpt.leaves.record import LeafSpec
from flaxckpt.restoring.derived import layer, stacked
from flaxckpt.restoring.leaf import Content, Leaf
from flaxckpt.transforms.rule import State, Target, array_of, expand, matches, merged


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

    def __call__(self, state: State, target: Target) -> State:
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
        return Leaf(name, lambda: self._content(name, ordered))

    def _content(self, name: str, ordered: Sequence[Leaf]) -> Content:
        """What the leaf `name` is.

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
        return Content(_with_shape(spec, whole), whole)


@dataclasses.dataclass(frozen=True)
class Unstack:
    r"""Makes one array for each layer of a stacked one: the inverse of `Stack`.

    Attributes:
      pattern: a regular expression.
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

    def __call__(self, state: State, target: Target) -> State:
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
        return str(index).join(expand(self, match, part) for part in self.output.split("{index}"))

    def _layers(self, leaf: Leaf) -> Iterable[Leaf]:
        """The layers of one leaf."""
        array = array_of(self, leaf)
        axis = _checked_axis(self, self.axis, len(leaf.spec.shape))
        for index in range(array.shape[axis]):
            part = layer(array, axis, index)
            yield Leaf(leaf.name, Content(_with_shape(leaf.spec, part), part))


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
            f"{rule!r:.300}: {match['index']!r} in {match[0]} is no layer's number. Let the group "
            "match digits, as in (?P<index>[0-9]+)."
        )
    return int(match["index"])


def _check_index_group(rule: Any, pattern: str) -> None:
    """Refuses a pattern without a group called `index`."""
    if "(?P<index>" not in pattern:
        raise RuleError(
            f"{rule!r:.300} has no group (?P<index>...) for the layer's number. Write one into "
            "its pattern, such as (?P<index>[0-9]+)."
        )
