"""A tracer for functions that run a few times an epoch: what each took, and what it took itself.

Wall time, and the calling thread's processor time, which other people's load moves less. Functions
that run per row are not for this: see the ladder in `bench.profile_task`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

__all__ = ["Point", "Tracer"]


@dataclass
class Point:
    """One traced name in one run, in nanoseconds; ``own``: without traced functions inside."""

    calls: int = 0
    wall: int = 0
    own_wall: int = 0
    cpu: int = 0
    own_cpu: int = 0


@dataclass
class _Frame:
    wall: int
    cpu: int
    inner_wall: int = 0
    inner_cpu: int = 0


@dataclass
class Tracer:
    """Collects points by name while :meth:`patched` is active."""

    points: dict[str, Point] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    _stack: list[_Frame] = field(default_factory=list)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Trace a block."""
        frame = _Frame(time.perf_counter_ns(), time.thread_time_ns())
        self._stack.append(frame)
        try:
            yield
        finally:
            wall = time.perf_counter_ns() - frame.wall
            cpu = time.thread_time_ns() - frame.cpu
            self._stack.pop()
            point = self.points.setdefault(name, Point())
            point.calls += 1
            point.wall += wall
            point.cpu += cpu
            point.own_wall += wall - frame.inner_wall
            point.own_cpu += cpu - frame.inner_cpu
            if self._stack:
                self._stack[-1].inner_wall += wall
                self._stack[-1].inner_cpu += cpu

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, traced."""

        @functools.wraps(function)
        def traced(*arguments: Any, **named: Any) -> Any:
            with self.span(name):
                return function(*arguments, **named)

        return traced

    @contextlib.contextmanager
    def patched(self, targets: Sequence[str]) -> Iterator[Tracer]:
        """Trace functions by dotted path (``module:name`` or ``module:Class.method``).

        A function must be named where it is *used*: ``from x import f`` makes a name of its own.
        One that is not there (the product moves on) is noted in ``missing`` and left out.
        """
        with contextlib.ExitStack() as stack:
            for target in targets:
                try:
                    owner, name, plain = _find(target)
                except (ImportError, AttributeError):
                    self.missing.append(target)
                    continue
                kept = vars(owner).get(name) if isinstance(owner, type) else None
                traced: Any = self.wrap(target.partition(":")[2], plain)
                if isinstance(kept, classmethod):
                    traced = staticmethod(traced)  # `plain` is bound to its class already
                stack.enter_context(mock.patch.object(owner, name, traced))
            yield self


def _find(target: str) -> tuple[Any, str, Callable[..., Any]]:
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return owner, name, getattr(owner, name)
