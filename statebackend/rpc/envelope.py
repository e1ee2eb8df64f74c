"""What the processes of a job put into bytes for each other, and how it is read again.

Messages are plain structs in MessagePack, never pickled. An error travels as a typed answer, so
that who asked raises what the other side raised.
"""

from __future__ import annotations

import traceback
from typing import Any, Final, Generic, TypeVar

import msgspec

from statebackend.errors import ProtocolError, StateBackendError, error_for_code

__all__ = ["Call", "Decoder", "ErrorReply", "encode"]

T = TypeVar("T")
_TEXT_CHARACTERS: Final = 16 << 10
_ENCODER: Final = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:
    """A message as it goes over the wire."""
    return _ENCODER.encode(message)


class Decoder(Generic[T]):
    """Reads messages of one kind, whoever sent them.

    To be made where a module begins: msgspec looks at a type when it first decodes one, and threads
    that did so at the same time were seen to end in a segmentation fault.

    Args:
        limit_bytes: no honest message is larger; None: its sender is trusted with that.
    """

    def __init__(self, kind: Any, *, limit_bytes: int | None = None) -> None:
        self.kind, self.limit_bytes = kind, limit_bytes
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)

    def __call__(self, data: Any) -> T:
        """What `encode` made.

        Args:
            data: bytes, or a buffer of Arrow's; None: there are none.

        Raises:
            ProtocolError: it is nothing of the kind, or over the limit.
        """
        view = memoryview(data if data is not None else b"")
        if self.limit_bytes is not None and view.nbytes > self.limit_bytes:
            raise ProtocolError(f"A message of {view.nbytes} bytes is over the limit.")
        return self._decode(view)

    def _decode(self, view: memoryview) -> T:
        try:
            return self._decoder.decode(view)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            kind = getattr(self.kind, "__name__", "message")
            raise ProtocolError(
                f"A malformed {kind} was refused ({error}).",
                todo="Install the same statebackend release on driver and executors.",
            ) from error


class ErrorReply(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """An error on its way to the other side.

    Attributes:
        code: its class; empty for one that is none of ours.
        trace: of Python, for people; empty where it does not matter.
    """

    code: str
    what: str
    todo: str
    trace: str = ""

    @classmethod
    def of(cls, error: BaseException, *, traced: BaseException | None = None) -> ErrorReply:
        """An error as it is sent; the texts may be a user's, and need not be well-formed.

        Args:
            traced: whose traceback goes along.
        """
        code, what, todo = "", "".join(traceback.format_exception_only(error)).strip(), ""
        if isinstance(error, StateBackendError):
            code, what, todo = error.code, error.what, error.todo
        trace = "" if traced is None else "".join(traceback.format_exception(traced))
        return cls(code, *map(_sendable, (what, todo, trace)))

    def error(self) -> StateBackendError:
        """The error as it is raised here."""
        return error_for_code(self.code, self.what, self.todo)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A request of whoever drives the operators, beside begins and acks; ``body`` is up to them."""

    protocol: int
    job: str
    session: str
    kind: str
    body: bytes


def _sendable(text: str) -> str:
    """The beginning and the end of a long text, in what UTF-8 takes."""
    text = text.encode(errors="backslashreplace").decode()
    half = _TEXT_CHARACTERS // 2
    return text if len(text) <= 2 * half else f"{text[:half]}\n...\n{text[-half:]}"
