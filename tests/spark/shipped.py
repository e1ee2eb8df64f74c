"""A processor that is shipped without Spark: what went apart, and what a worker makes of it."""

from __future__ import annotations

import io
import pickle
import types
from typing import Any

import pytest
from pyspark.serializers import ChunkedStream

from statebackend.runtime.worker import shipped_processor as shipped_module
from statebackend.runtime.worker.shipped_constants import ship
from statebackend.runtime.worker.shipped_processor import ConstantCache, ShippedProcessor

__all__ = ["cache"]

LIMIT = 10_000


class Processor:
    """Any class will do: nothing is called."""


class Sink(io.BytesIO):
    """Keeps what was written when it is closed."""

    def close(self) -> None:
        self.data = self.getvalue()
        super().close()


def read_chunks(framed: bytes) -> bytes:
    data, at = bytearray(), 0
    while (size_bytes := int.from_bytes(framed[at : at + 4], "big", signed=True)) >= 0:
        data += framed[at + 4 : at + 4 + size_bytes]
        at += 4 + size_bytes
    return bytes(data)


class FakeBroadcast:
    """As Spark's: the value is pickled at once, and unpickled when it is first asked for."""

    made: int = 0

    def __init__(self, value: Any) -> None:
        sink = Sink()
        stream = ChunkedStream(sink, 8192)
        pickle.dump(value, stream, protocol=5)  # as with spark.io.encryption.enabled
        stream.close()
        self.data = read_chunks(sink.data)
        self.loads = 0

    @property
    def value(self) -> Any:
        if not hasattr(self, "_value"):
            self._value = pickle.loads(self.data)
            self.loads += 1
        return self._value


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> ConstantCache:
    """A worker process that has loaded nothing yet."""
    cache = ConstantCache()
    monkeypatch.setattr(shipped_module, "CONSTANTS", cache)
    return cache


def processor(**attributes: Any) -> Processor:
    made = Processor()
    vars(made).update(attributes)
    return made


def shipped(made: Any, limit_bytes: int = LIMIT, known: Any = None) -> ShippedProcessor:
    fake: Any = FakeBroadcast
    return ship(made, uid="op", limit_bytes=limit_bytes, broadcast=fake, known=known)


def names(one: ShippedProcessor) -> list[str]:
    return sorted(part.name for part in one.parts)


def table(entries: int = 5_000) -> dict[int, str]:
    return {index: f"value {index}" for index in range(entries)}


def _by_value(**found: Any) -> type:
    """A class as of ``__main__``, whose method reads a global and a captured variable."""
    module = types.ModuleType("__main__")
    vars(module).update(found)
    code = """
def make(captured):
    class P:
        CLASS_TABLE = CLASS
        def read(self):
            return len(GLOBAL), len(captured), len(self.CLASS_TABLE)
    return P
kind = make(CAPTURED)
"""
    exec(code, vars(module))
    return vars(module)["kind"]  # type: ignore[no-any-return]
