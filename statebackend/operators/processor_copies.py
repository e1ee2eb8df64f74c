"""Copies of a processor in the process that made it: fields of its own, and the caller's code."""

from __future__ import annotations

import io
import pickle
from types import FunctionType, ModuleType
from typing import Any, Final, TypeVar

from pyspark.cloudpickle import CloudPickler
from pyspark.serializers import CloudPickleSerializer

from statebackend.errors import ProcessorError

__all__ = ["copied"]

_CloudPickler: Any = CloudPickler
_SHARED: Final = (type, FunctionType, ModuleType, TypeVar)


class _Pickler(_CloudPickler):  # type: ignore[misc]
    """Pickles an object for this process alone: classes, functions and modules are left out."""

    def __init__(self, sink: io.BytesIO) -> None:
        super().__init__(sink)
        self.left_out: list[Any] = []

    def persistent_id(self, obj: Any) -> int | None:
        """The place of what is left out; None for what is copied."""
        if not isinstance(obj, _SHARED):
            return None
        self.left_out.append(obj)
        return len(self.left_out) - 1


class _Unpickler(pickle.Unpickler):
    """Unpickles what was pickled here a moment ago, around the same classes and functions."""

    def __init__(self, data: bytes, left_out: list[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._left_out = left_out

    def persistent_load(self, place: int) -> Any:
        """What was left out there."""
        return self._left_out[place]


def copied(processor: Any, uid: str) -> Any:
    """A processor with fields as an executor would get them; its classes and functions are shared.

    Unpickled as it is shipped, it would change the caller's classes (see
    :class:`statebackend.runtime.worker.shipped_processor.IsolatedLoader`). A test's counters and
    spies are to see its calls, too.

    Raises:
        ProcessorError: it cannot be pickled.
    """
    try:
        pickler: Any = CloudPickleSerializer()  # type: ignore[no-untyped-call]
        pickler.dumps(processor)  # whole, as it is shipped: with its classes and functions
        sink = io.BytesIO()
        alone = _Pickler(sink)
        alone.dump(processor)
        return _Unpickler(sink.getvalue(), alone.left_out).load()
    except Exception as error:
        raise ProcessorError(
            f"The processor of operator {uid!r} cannot be shipped to executors "
            f"({type(error).__name__}: {error}).",
            todo="Open connections, locks and files in init(), not in __init__().",
        ) from error
