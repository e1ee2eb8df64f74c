"""Large constants of a processor travel once: taken out of its pickle, one broadcast each.

A part is cut where the user can name it: an attribute, a global or captured variable, a class's
attribute, or an entry of a small container in one of these. What is left is small, and unpickled
for each task, so that a processor's own fields live for one epoch, as in Spark.
"""

from __future__ import annotations

import functools
import io
import pickle
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import numpy as np
from blake3 import blake3
from pyspark import Accumulator, Broadcast, SparkContext
from pyspark.cloudpickle import CloudPickler

from statebackend.errors import ProcessorError
from statebackend.runtime.worker.shipped_processor import (
    Constant,
    IsolatedLoader,
    PartRef,
    ShippedProcessor,
    is_plain,
    open_part,
)
from statebackend.runtime.worker.unpicklable import class_attributes, explain_unpicklable

__all__ = ["PackedProcessor", "pack", "sent_by", "ship"]

_CloudPickler: Any = CloudPickler  # has no types
_BULK = 32  # a container with more entries is one part, with all that is in it
_PARTS_MAX = 32  # more and smaller parts are worth no broadcasts of their own
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})
_BYTES = (str, bytes, bytearray)
_CONTAINERS = (dict, list, tuple, set, frozenset, OrderedDict, deque)
_CODE = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    types.CodeType,
)


# Reading a defaultdict changes it; the others are code, or Spark's.
_NO_PARTS = (Broadcast, Accumulator, defaultdict, property, staticmethod, classmethod)


class _NotAlone(Exception):
    """An object that cannot be pickled apart from the processor."""


class Part:
    """A constant, pickled alone. Its own pickle, which Spark makes, loads as a ``Constant``."""

    def __init__(self, name: str, value: Any, root: Any) -> None:
        buffers: list[pickle.PickleBuffer] = []
        sink = io.BytesIO()
        pickler = _PartPickler(sink, root, buffers.append)
        pickler.dump(value)
        self._has_classes = pickler.has_classes
        self.name, self.value = name, value
        self._data = sink.getvalue()
        self._buffers = [memoryview(buffer.raw()).toreadonly() for buffer in buffers]
        self.size_bytes = len(self._data) + sum(view.nbytes for view in self._buffers)

    @functools.cached_property
    def digest(self) -> str:
        """Of its content: the same for whatever pickles to the same bytes."""
        hasher = blake3(len(self._data).to_bytes(8, "big"))
        hasher.update(self._data)
        for view in self._buffers:
            hasher.update(view.nbytes.to_bytes(8, "big"))
            hasher.update(view)
        return hasher.hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        # As bytes: with encryption, Spark's stream can write nothing else.
        buffers = [view.tobytes() for view in self._buffers]
        return open_part, (self.digest, self.name, self._data, buffers)

    def rehearsed(self, loader: IsolatedLoader) -> Any:
        """The value for a rehearsal: the user's own, unless its classes are made anew there."""
        if self._has_classes:
            return loader.load(self._data, buffers=self._buffers)
        return self.value.view() if isinstance(self.value, np.ndarray) else self.value


class _PartPickler(_CloudPickler):  # type: ignore[misc]
    def __init__(self, sink: io.BytesIO, root: Any, buffer_callback: Callable[..., Any]) -> None:
        super().__init__(sink, buffer_callback=buffer_callback)
        self._root = root
        self.has_classes = False  # that travel by value

    def reducer_override(self, obj: Any) -> Any:
        if obj is self._root or isinstance(obj, Broadcast | Accumulator):
            raise _NotAlone
        reduced = super().reducer_override(obj)
        if isinstance(reduced, tuple) and isinstance(obj, type):
            self.has_classes = True
        return reduced


class _Packer(_CloudPickler):  # type: ignore[misc]
    """Pickles an object without the parts over a limit, and notes what everything is called."""

    def __init__(self, root: Any, names: _Names, limit_bytes: int, whole: dict[int, Part]) -> None:
        self.sink = io.BytesIO()
        super().__init__(self.sink)
        self._root, self._names, self._limit_bytes, self._whole = root, names, limit_bytes, whole
        self.parts: list[Part] = []
        self.shared: list[Broadcast[Any]] = []
        self._taken: dict[int, tuple[str, int]] = {}

    @property
    def size_bytes(self) -> int:
        """Of what is left."""
        return len(self.sink.getbuffer())

    def persistent_id(self, obj: Any) -> tuple[str, int] | None:
        kind = type(obj)
        if kind in _ATOMS and not (kind in _BYTES and len(obj) > self._limit_bytes):
            return None
        taken = self._taken.get(id(obj))
        if taken is not None:
            return taken
        if isinstance(obj, Broadcast):
            return self._take(obj, "shared", self.shared, obj)
        if not self._names.knows(obj):
            return None
        part = self._whole.get(id(obj))
        if part is None and _may_be_large(obj, self._limit_bytes):
            part = self._names.part(obj, self._root)
            if part is not None and part.size_bytes <= self._limit_bytes:
                part = None
        if part is not None:
            return self._take(obj, "part", self.parts, part)
        self._names.enter(obj)
        return None

    def _take(self, obj: Any, kind: str, into: list[Any], entry: Any) -> tuple[str, int]:
        into.append(entry)
        self._taken[id(obj)] = pid = (kind, len(into) - 1)
        return pid

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if isinstance(reduced, tuple):  # a function or class that travels by value
            if isinstance(obj, types.FunctionType):
                self._names.enter_function(obj)
            elif isinstance(obj, type):
                for key, value in class_attributes(obj):
                    self._names.add(f"{obj.__name__}.{key}", value, top=True)
        return reduced


class _Names:
    """What the user calls the objects that can become parts; keeps them, and their parts."""

    def __init__(self, root: Any) -> None:
        self._names: dict[int, tuple[str, Any]] = {}
        self._parts: dict[int, Part | None] = {}
        self.top: dict[int, Any] = {}
        for key, value in attributes(root):
            self.add(f"self.{key}", value, top=True)
        self._root = root

    def add(self, name: str, value: Any, *, top: bool = False) -> None:
        kind = type(value)
        if (kind in _ATOMS and kind not in _BYTES) or isinstance(value, _CODE):
            return
        if id(value) not in self._names:
            self._names[id(value)] = (name, value)
            if top:
                self.top[id(value)] = value

    def knows(self, value: Any) -> bool:
        return id(value) in self._names

    def enter(self, value: Any) -> None:
        """Name what is in a small container or a plain object."""
        name = self._names[id(value)][0]
        if isinstance(value, dict):
            if len(value) <= _BULK:
                for key, one in value.items():
                    self.add(f"{name}[{key!r:.40}]", one)
        elif isinstance(value, list | tuple | deque):
            if len(value) <= _BULK:
                for index, one in enumerate(value):
                    self.add(f"{name}[{index}]", one)
        elif value is not self._root and is_plain(type(value)):
            for key, one in attributes(value):
                self.add(f"{name}.{key}", one)

    def enter_function(self, function: types.FunctionType) -> None:
        """Name the globals and captured variables that it reads."""
        for key in _global_names(function.__code__):
            if key in function.__globals__:
                self.add(f"global {key}", function.__globals__[key], top=True)
        cells = function.__closure__ or ()
        for key, cell in zip(function.__code__.co_freevars, cells, strict=True):
            try:
                self.add(f"captured variable {key}", cell.cell_contents, top=True)
            except ValueError:  # not assigned yet
                continue

    def part(self, value: Any, root: Any) -> Part | None:
        """It, pickled alone; None if that cannot be."""
        if id(value) not in self._parts:
            try:
                self._parts[id(value)] = Part(self._names[id(value)][0], value, root)
            except Exception:  # whatever it is, pickling it in its place says so
                self._parts[id(value)] = None
        return self._parts[id(value)]


def attributes(obj: Any) -> Iterator[tuple[str, Any]]:
    """The instance attributes of an object, by ``__dict__`` or slots."""
    yield from list(getattr(obj, "__dict__", {}).items())
    for kind in type(obj).__mro__:
        slots = vars(kind).get("__slots__", ())
        for key in (slots,) if isinstance(slots, str) else slots:
            if not key.startswith("__") and hasattr(obj, key):
                yield key, getattr(obj, key)


def _global_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _may_be_large(obj: Any, limit_bytes: int) -> bool:
    """Whether it is worth pickling alone: not by its parts, of which there are few."""
    kind = type(obj)
    if kind in _BYTES:
        return True  # over the limit, as was seen
    if kind in _CONTAINERS:
        return len(obj) > _BULK
    if isinstance(obj, np.ndarray):
        return bool(obj.dtype.hasobject or obj.nbytes > limit_bytes)
    return kind.__module__.split(".")[0] in ("pandas", "pyarrow")


class PackedProcessor:
    """A processor, pickled without its large constants, before anything was shipped."""

    def __init__(self, uid: str, data: bytes, parts: list[Part], shared: list[Any]) -> None:
        self.uid, self.data, self.parts, self.shared = uid, data, parts, tuple(shared)

    def rehearsal(self) -> Any:
        """A copy for the driver, to run ``init`` on: it may write to constants no more than later.

        Other objects than arrays, dicts, lists and sets are the user's own, uncopied. Classes and
        functions that travel by value are copies: those of the user stay as they are.
        """
        loader = IsolatedLoader()
        parts = [
            Constant(part.name, part.rehearsed(loader), part.size_bytes).for_epoch()
            for part in self.parts
        ]
        return loader.load(self.data, parts, self.shared)

    def ship(
        self,
        broadcast: Callable[[Any], Broadcast[Any]],
        known: MutableMapping[str, Broadcast[Any]] | None = None,
    ) -> ShippedProcessor:
        """Make the broadcasts.

        Args:
            broadcast: ``SparkContext.broadcast``.
            known: broadcasts of this context made before, by digest; added to.
        """
        known = {} if known is None else known
        refs = []
        for part in self.parts:
            digest = part.digest
            sent = known.get(digest)
            if sent is None:
                sent = known[digest] = broadcast(part)
            refs.append(PartRef(part.name, digest, part.size_bytes, sent))
        return ShippedProcessor(self.uid, self.data, tuple(refs), self.shared)


_sent: dict[str, MutableMapping[str, Broadcast[Any]]] = {}


def sent_by(context: SparkContext) -> MutableMapping[str, Broadcast[Any]]:
    """The broadcasts that a context made of constants and that somebody still holds, by digest."""
    application = str(context.applicationId)
    if application not in _sent:
        _sent.clear()  # a process has one context at a time
        _sent[application] = weakref.WeakValueDictionary()
    return _sent[application]


def pack(processor: Any, *, uid: str, limit_bytes: int) -> PackedProcessor:
    """Pickle a processor, its constants over ``limit_bytes`` (pickled; 0: none) apart.

    Raises:
        ProcessorError: it cannot be pickled, naming the attribute.
    """
    try:
        return _pack(processor, uid, limit_bytes or (1 << 62))
    except Exception as error:
        raise ProcessorError(
            f"The processor of operator {uid!r} cannot be shipped to executors: "
            f"{explain_unpicklable(processor, error)}.",
            todo="Open connections, locks and files in init(), not in __init__().",
        ) from error


def _pack(processor: Any, uid: str, limit_bytes: int) -> PackedProcessor:
    names = _Names(processor)
    whole: dict[int, Part] = {}
    while True:
        packer = _packed(processor, processor, names, limit_bytes, whole)
        if packer.size_bytes > limit_bytes and not whole:
            # What is large although no single thing in it is: take it whole, where it begins.
            whole = _whole_parts(processor, names, limit_bytes)
            if whole:
                continue
        if len(packer.parts) <= _PARTS_MAX:
            return PackedProcessor(uid, packer.sink.getvalue(), packer.parts, packer.shared)
        limit_bytes, whole = 2 * limit_bytes, {}


def _packed(
    root: Any, obj: Any, names: _Names, limit_bytes: int, whole: dict[int, Part]
) -> _Packer:
    packer = _Packer(root, names, limit_bytes, whole)
    packer.dump(obj)
    return packer


def _whole_parts(root: Any, names: _Names, limit_bytes: int) -> dict[int, Part]:
    """Named objects that are large without a large part in them, innermost first."""
    whole: dict[int, Part] = {}

    def size_bytes(value: Any) -> int:
        try:
            return _packed(root, value, names, limit_bytes, whole).size_bytes
        except Exception:  # it is in the pickle in a way of its own, if at all
            return 0

    large = []
    for key, value in list(names.top.items()):
        if value is not root and not isinstance(value, _NO_PARTS):
            size = size_bytes(value)
            if size > limit_bytes:
                large.append((size, key, value))
    for _, key, value in sorted(large, key=lambda one: one[0]):
        if size_bytes(value) > limit_bytes:  # also without those in it
            part = names.part(value, root)
            if part is not None:
                whole[key] = part
    return whole


def ship(
    processor: Any,
    *,
    uid: str,
    limit_bytes: int,
    broadcast: Callable[[Any], Broadcast[Any]],
    known: MutableMapping[str, Broadcast[Constant]] | None = None,
) -> ShippedProcessor:
    """As :func:`pack`, and :meth:`PackedProcessor.ship`.

    Raises:
        ProcessorError: it cannot be pickled, naming the attribute.
    """
    return pack(processor, uid=uid, limit_bytes=limit_bytes).ship(broadcast, known)
