"""A processor in a worker: made anew for each epoch, around constants that are loaded once.

What is unpickled here was pickled by our own driver, and came by Spark's own transport (its
command and its broadcasts), as every closure does. Nothing from storage comes this way.
"""

from __future__ import annotations

import inspect
import io
import itertools
import pickle
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, NamedTuple, NoReturn

import numpy as np
from pyspark import Broadcast
from pyspark.cloudpickle import cloudpickle

from statebackend.errors import ProcessorError
from statebackend.runtime.worker.unpicklable import unloadable

__all__ = [
    "CONSTANTS",
    "Constant",
    "ConstantCache",
    "IsolatedLoader",
    "PartRef",
    "ShippedProcessor",
    "is_plain",
    "load_with",
    "open_part",
]

_KEPT_BYTES = 512 << 20  # of constants that the newest task did not use
_LOOKED_AT = 10_000  # entries of a constant whose own sizes are compared, about 0.5 ms
_GROWING = frozenset({dict, list, set, bytearray, deque})
_TRACKER_ID = "class_tracker_id"  # of a class that travels by value, in cloudpickle
_KEPT_USES = 256  # tasks; a constant that none of so many used is let go
_HOW_TO_KEEP = (
    "assign a copy of it in init(), keep what changes in a field of its own, or set "
    "spark.statebackend.constantBytes to 0"
)


def _refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
    raise TypeError(
        f"{self.name} is a large constant, which epochs share in a worker, and cannot be written "
        f"to: {_HOW_TO_KEEP}"
    )


def _plain(kind: type) -> Callable[[Any], tuple[Any, ...]]:
    return lambda self: (kind, (kind(self),))  # a copy or a pickle of it may be written to


class FrozenDict(dict[Any, Any]):
    """A dict that tells who writes to it."""

    __slots__ = ("name",)
    name: str
    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse
    __reduce__ = _plain(dict)


class FrozenList(list[Any]):
    """A list that tells who writes to it."""

    __slots__ = ("name",)
    name: str
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = clear = extend = insert = pop = remove = reverse = sort = _refuse
    __reduce__ = _plain(list)


class FrozenSet(set[Any]):
    """A set that tells who writes to it (and still is a ``set``)."""

    __slots__ = ("name",)
    name: str
    __iand__ = __ior__ = __isub__ = __ixor__ = _refuse
    add = clear = discard = pop = remove = update = _refuse
    difference_update = intersection_update = symmetric_difference_update = _refuse
    __reduce__ = _plain(set)


_FROZEN: dict[type, type] = {dict: FrozenDict, list: FrozenList, set: FrozenSet}


class Constant:
    """A part of a processor as a worker holds it.

    Args:
        name: where the processor has it, such as ``self.table``.
        value: the object; a plain dict, list or set is replaced by one that refuses writes, an
            array is made read-only.
        size_bytes: pickled.
    """

    __slots__ = ("_deep", "_extent", "name", "size_bytes", "value")

    def __init__(self, name: str, value: Any, size_bytes: int) -> None:
        frozen = _FROZEN.get(type(value))
        if frozen is not None:
            value = frozen(value)
            value.name = name
        elif isinstance(value, np.ndarray):
            value.setflags(write=False)
        self.name, self.value, self.size_bytes = name, value, size_bytes
        self._deep = next(_growing(value), None) is not None
        self._extent = _extent(value, self._deep)

    def for_epoch(self) -> Any:
        """The object for a new processor: itself, or a cheap copy where one costs little."""
        value = self.value
        if type(value) is bytearray:
            return bytearray(value)
        if _is_pandas(value):
            return value.copy(deep=False)  # its columns cannot be written, but new ones be added
        return value

    @property
    def changed(self) -> bool:
        """Whether entries were added or removed since it was loaded."""
        return _extent(self.value, self._deep) != self._extent


def _growing(value: Any) -> Iterator[Sized]:
    """The containers among its first entries."""
    entries: Iterable[Any] = ()
    if isinstance(value, dict):
        entries = value.values()
    elif isinstance(value, list | tuple | deque):
        entries = value
    return (one for one in itertools.islice(entries, _LOOKED_AT) if type(one) in _GROWING)


def _extent(value: Any, deep: bool) -> tuple[int, int]:
    """The number of its entries, and of theirs."""
    if not isinstance(value, Sized) or isinstance(value, np.ndarray):
        return 0, 0
    return len(value), sum(map(len, _growing(value))) if deep else 0


def _is_pandas(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "pandas" and hasattr(value, "copy")


class ConstantCache:
    """Constants of a worker process by digest.

    Those of the newest task are always held. Others stay up to ``kept_bytes`` (pickled), for the
    queries that take turns on a worker, and no longer than for ``kept_uses`` tasks.
    """

    def __init__(self, kept_bytes: int = _KEPT_BYTES, kept_uses: int = _KEPT_USES) -> None:
        self._kept_bytes, self._kept_uses = kept_bytes, kept_uses
        self._lock = threading.Lock()
        self._uses = 0
        self._held: OrderedDict[str, tuple[Constant, int]] = OrderedDict()  # newest use last

    def __len__(self) -> int:
        return len(self._held)

    def find(self, digest: str) -> Constant | None:
        """The constant with this digest, unless it was not loaded yet or changed since."""
        with self._lock:
            held = self._held.get(digest)
            if held is not None and held[0].changed:
                del self._held[digest]
                return None
            return held[0] if held else None

    def use(self, constants: dict[str, Constant]) -> None:
        """Hold what a task uses; let go of what was not used for long, and of too much."""
        with self._lock:
            self._uses += 1
            for digest, constant in constants.items():
                self._held[digest] = (constant, self._uses)
                self._held.move_to_end(digest)
            others = [digest for digest in self._held if digest not in constants]
            size_bytes = sum(self._held[digest][0].size_bytes for digest in others)
            for digest in others:  # the least recently used first
                constant, used = self._held[digest]
                if size_bytes <= self._kept_bytes and self._uses - used < self._kept_uses:
                    break
                size_bytes -= constant.size_bytes
                del self._held[digest]

    def drop(self, digest: str) -> None:
        """Let a constant go, for example since it was changed."""
        with self._lock:
            self._held.pop(digest, None)


CONSTANTS = ConstantCache()


def open_part(digest: str, name: str, data: bytes, buffers: list[bytes]) -> Constant:
    """What a broadcast becomes when a worker reads it; called by pickle (see ``constants.Part``).

    Arrays are views of ``buffers``, which are read-only. If the worker has an object of this
    content already (by another broadcast), it is that one.
    """
    known = CONSTANTS.find(digest)
    if known is not None:
        return known
    size_bytes = len(data) + sum(len(buffer) for buffer in buffers)
    return Constant(name, pickle.loads(data, buffers=buffers), size_bytes)


class PartRef(NamedTuple):
    """A constant part of a processor: its name, digest (blake3), pickled size, broadcast."""

    name: str
    digest: str
    size_bytes: int
    broadcast: Broadcast[Constant]

    def constant(self) -> Constant:
        """From the worker's cache, else from the broadcast.

        Raises:
            ProcessorError: it does not unpickle here, or was changed and cannot be loaded again.
        """
        found = CONSTANTS.find(self.digest)
        if found is not None:
            return found
        try:
            found = self.broadcast.value
        except Exception as error:
            raise ProcessorError(
                f"The processor's constant {self.name} cannot be loaded in the worker "
                f"({type(error).__name__}: {error}).",
                todo="Install on the executors what its classes need.",
            ) from error
        return self._loaded_again() if found.changed else found

    def _loaded_again(self) -> Constant:
        vars(self.broadcast).pop("_value", None)  # a broadcast keeps what it has loaded
        try:
            return self.broadcast.value
        except AttributeError as error:  # with encryption, it has no file to load it from
            raise ProcessorError(
                f"The processor's constant {self.name} was changed by an earlier attempt.",
                todo=_HOW_TO_KEEP[0].upper() + _HOW_TO_KEEP[1:] + ".",
            ) from error


class ShippedProcessor:
    """A processor on its way to the workers: small, whatever constants it has.

    Args:
        uid: the operator, for errors.
        data: the processor, pickled without its parts.
        parts: its large constants.
        shared: the user's own broadcasts, which Spark must see to ship them.
    """

    def __init__(
        self,
        uid: str,
        data: bytes,
        parts: tuple[PartRef, ...],
        shared: tuple[Broadcast[Any], ...] = (),
    ) -> None:
        self.uid, self.data, self.parts, self.shared = uid, data, parts, shared
        self._in_use: dict[str, Constant] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_in_use": {}}

    def fresh(self) -> Any:
        """A new processor around the shared constants, which are loaded if they are not yet.

        Raises:
            ProcessorError: it, or a part, does not unpickle here.
        """
        constants = [part.constant() for part in self.parts]
        self._in_use = {p.digest: c for p, c in zip(self.parts, constants, strict=True)}
        CONSTANTS.use(self._in_use)
        try:
            return load_with(self.data, [c.for_epoch() for c in constants], self.shared)
        except Exception as error:
            raise unloadable(self.uid, error) from error

    def check_unchanged(self) -> None:
        """At the end of an epoch: nothing was added to a constant, nor taken away.

        Raises:
            ProcessorError: naming the constant; it is loaded anew for the next attempt.
        """
        for digest, constant in self._in_use.items():
            if constant.changed:
                CONSTANTS.drop(digest)
                raise ProcessorError(
                    f"The processor of operator {self.uid!r} changed {constant.name}, a large "
                    "constant that epochs share in a worker.",
                    todo=_HOW_TO_KEEP[0].upper() + _HOW_TO_KEEP[1:] + ".",
                )


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        data: bytes,
        parts: Sequence[Any] = (),
        shared: Sequence[Broadcast[Any]] = (),
        buffers: Sequence[Any] = (),
    ) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._parts, self._shared = parts, shared

    def persistent_load(self, pid: Any) -> Any:
        kind, index = pid
        return self._parts[index] if kind == "part" else self._shared[index]


def load_with(data: bytes, parts: Sequence[Any], shared: Sequence[Broadcast[Any]]) -> Any:
    """A processor from its pickle and the objects that were taken out of it."""
    return _Unpickler(data, parts, shared).load()


class _IsolatedUnpickler(_Unpickler):
    def __init__(self, classes: dict[str, Any], *given: Any) -> None:
        super().__init__(*given)
        self._classes = classes

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if module == cloudpickle.__name__ and name.startswith("_make_"):
            names = list(inspect.signature(found).parameters)
            if _TRACKER_ID in names:
                return self._making(found, names.index(_TRACKER_ID))
        return found

    def _making(self, make: Callable[..., Any], place: int) -> Callable[..., Any]:
        """As ``make``, keeping to the classes that were made here."""

        def made(*args: Any) -> Any:
            tracker_id = args[place]
            if tracker_id not in self._classes:
                untracked = (*args[:place], None, *args[place + 1 :])
                self._classes[tracker_id] = make(*untracked)
            return self._classes[tracker_id]

        return made


class IsolatedLoader:
    """Unpickles in the process that pickled, and leaves the caller's classes as they are.

    A class of ``__main__`` or of a function travels with its code. If cloudpickle finds the class
    that it came from, it writes the copied code into that class, and the caller's own methods go on
    with copied globals. This loader makes such a class anew, once for all that it loads.
    """

    def __init__(self) -> None:
        self._classes: dict[str, Any] = {}

    def load(
        self,
        data: bytes,
        parts: Sequence[Any] = (),
        shared: Sequence[Broadcast[Any]] = (),
        buffers: Sequence[Any] = (),
    ) -> Any:
        """As :func:`load_with`; ``buffers``: what was pickled out of band."""
        return _IsolatedUnpickler(self._classes, data, parts, shared, buffers).load()


_OWN_WAYS = ("__reduce_ex__", "__reduce__", "__getstate__")


def is_plain(kind: type) -> bool:
    """Whether pickle takes an object of this class by its attributes, without a method of it."""
    if kind is types.SimpleNamespace:
        return True
    return all(getattr(kind, way, None) is getattr(object, way, None) for way in _OWN_WAYS)
