"""What faults do to the bodies of a request and of its response on their way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NoReturn

from recovery.drill.proxy.controls import Controls, CutError
from recovery.drill.proxy.fault_plan import Fault, Kind
from recovery.drill.proxy.http import PIECE_BYTES
from recovery.drill.proxy.upstream import Upstream

__all__ = ["BodyFaults", "Place", "act_at"]

Place = Callable[[bytes, float], int]
"""From a body's first piece and a fraction of the body to a position in bytes."""


class BodyFaults:
    """Of one request.

    Args:
        strike: is told of a fault when it strikes.
    """

    def __init__(
        self, controls: Controls, upstream: Upstream, strike: Callable[[Fault], None]
    ) -> None:
        self._controls, self._upstream, self._strike = controls, upstream, strike

    def of_request(
        self, body: Iterator[bytes], fault: Fault | None, place: Place
    ) -> Iterator[bytes]:
        """The request's body, with what the fault does to it."""
        pieces = self._paced(body, fault)
        if fault is None:
            return pieces

        def at(first: bytes) -> int:
            return place(first, fault.fraction)

        if fault.kind is Kind.DROP_IN_REQUEST:
            return act_at(pieces, at, lambda _: self._tear(fault))
        if fault.kind is Kind.CORRUPT_REQUEST:
            return act_at(pieces, at, lambda piece: self._flip(piece, fault))
        if fault.kind is Kind.STALL and fault.where == "request":
            return act_at(pieces, at, lambda piece: self._stall(piece, fault))
        return pieces

    def of_response(
        self, body: Iterator[bytes], fault: Fault | None, place: Place
    ) -> Iterator[bytes]:
        """The response's body, with what the fault does to it."""
        pieces = self._paced(body, fault)
        if fault is None:
            return pieces

        def at(first: bytes) -> int:
            return place(first, fault.fraction)

        if fault.kind is Kind.TRUNCATE and fault.fixed_length:
            return self._shortened(pieces, at, fault)
        if fault.kind is Kind.TRUNCATE:
            return act_at(pieces, at, lambda _: self._break_off(fault))
        if fault.kind is Kind.CORRUPT_RESPONSE:
            return act_at(pieces, at, lambda piece: self._flip(piece, fault))
        if fault.kind is Kind.STALL and fault.where == "response":
            return act_at(pieces, at, lambda piece: self._stall(piece, fault))
        return pieces

    def _paced(self, pieces: Iterator[bytes], fault: Fault | None) -> Iterator[bytes]:
        for piece in pieces:
            slow = fault is not None and fault.kind is Kind.SLOW
            rate = fault.bytes_per_s if fault is not None and slow else self._controls.bytes_per_s
            if fault is not None and slow:
                self._strike(fault)
            step = max(1, rate // 10) if rate else PIECE_BYTES
            for start in range(0, len(piece), step):
                part = piece[start : start + step]
                self._controls.pause(len(part) / rate if rate else 0)
                yield part

    def _shortened(
        self, pieces: Iterator[bytes], place: Callable[[bytes], int], fault: Fault
    ) -> Iterator[bytes]:
        left = -1
        for piece in pieces:
            if left < 0:
                left = place(piece)
                self._strike(fault)
            part = piece[:left]
            left -= len(part)
            if part:
                yield part

    def _flip(self, piece: bytes, fault: Fault) -> bytes:
        self._strike(fault)
        return bytes([piece[0] ^ 0x01]) + piece[1:]

    def _stall(self, piece: bytes, fault: Fault) -> bytes:
        self._strike(fault)
        self._controls.pause(fault.seconds)
        return piece

    def _tear(self, fault: Fault) -> NoReturn:
        self._strike(fault)
        self._upstream.reset()
        raise CutError

    def _break_off(self, fault: Fault) -> NoReturn:
        self._strike(fault)
        raise CutError(orderly=True)


def act_at(
    pieces: Iterator[bytes], place: Callable[[bytes], int], action: Callable[[bytes], bytes]
) -> Iterator[bytes]:
    """The pieces, with something done on the way.

    Args:
        pieces: of a body.
        place: from the first piece to the position, in bytes, at which to act.
        action: gets what follows in the piece of that position, and gives what to pass on instead;
            called once, when all before it was passed on, or never if the body is shorter.
    """
    position, passed, acted = -1, 0, False
    for piece in pieces:
        if position < 0:
            position = place(piece)
        if not acted and passed + len(piece) > position:
            cut = position - passed
            if cut:
                yield piece[:cut]
            piece = action(piece[cut:])
            acted = True
        passed += len(piece)
        if piece:
            yield piece
