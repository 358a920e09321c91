"""How long some functions take while something else runs."""

from __future__ import annotations

import contextlib
import pkgutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

Seconds = dict[str, float]


@contextlib.contextmanager
def timed(names: Mapping[str, str]) -> Iterator[Seconds]:
    """The seconds that each of the functions `names` takes during the block, by stage."""
    found: Seconds = defaultdict(float)

    def wrap(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                found[stage] += time.perf_counter() - start

        return call

    with contextlib.ExitStack() as stack:
        for stage, name in names.items():
            timing = wrap(stage, pkgutil.resolve_name(name))
            stack.enter_context(mock.patch(name, timing))
        yield found
