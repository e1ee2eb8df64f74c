"""Which faults there are, and which request gets which: pure, so that a seed replays a drill."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from recovery.drill.proxy.s3_requests import READS, WRITES, Verb
from statebackend.errors import SettingError

__all__ = [
    "Calm",
    "Chance",
    "Facts",
    "Fault",
    "FaultPlan",
    "FirstOf",
    "Kind",
    "Rule",
    "Script",
    "Weather",
    "draw",
    "stormy",
]

Where = Literal["before", "request", "response"]


class Kind(enum.StrEnum):
    """What is done to a request. `Fault`'s constructors say how."""

    STATUS = "status"
    DROP_BEFORE = "drop_before"
    DROP_IN_REQUEST = "drop_in_request"
    LOSE_ANSWER = "lose_answer"
    DUPLICATE = "duplicate"
    TRUNCATE = "truncate"
    CORRUPT_REQUEST = "corrupt_request"
    CORRUPT_RESPONSE = "corrupt_response"
    STALL = "stall"
    SLOW = "slow"
    HOLD = "hold"
    DOWN = "down"  # not by a plan: the proxy's switch


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault with its figures; make it with the constructors below.

    Attributes:
        kind: what is done.
        status, error: the answer of a `STATUS`, in HTTP's and in S3's terms.
        body: of that answer, instead of S3's XML for the error.
        fraction: where in the body it happens, from 0 (its first byte) to below 1.
        answer: which of a `DUPLICATE`'s two answers the client gets, 1 or 2.
        fixed_length: whether a truncated response announces its new length.
        where: a stall is before the request is forwarded, or in the middle of a body.
        seconds: of a stall.
        bytes_per_s: of a slow request, in each direction.
    """

    kind: Kind
    status: int = 0
    error: str = ""
    body: bytes | None = None
    fraction: float = 0.5
    answer: int = 1
    fixed_length: bool = False
    where: Where = "before"
    seconds: float = 0.0
    bytes_per_s: int = 0

    def __post_init__(self) -> None:
        """Refuse what no request can have. Raises `SettingError`."""
        wrong = ""
        if not 0 <= self.fraction < 1:
            wrong = f"the fraction {self.fraction} is not from 0 to below 1"
        elif self.answer not in (1, 2):
            wrong = f"there is no answer {self.answer}, only 1 and 2"
        elif self.kind is Kind.STATUS and not self._answers():
            wrong = f"the status {self.status} is not an error's"
        elif self.seconds < 0 or (self.kind is Kind.SLOW and self.bytes_per_s < 1):
            wrong = "its time or its rate is not positive"
        if wrong:
            raise SettingError(f"The fault {self.kind.value!r} is refused: {wrong}.")

    def _answers(self) -> bool:
        return (400 if self.body is None else 200) <= self.status <= 599

    @staticmethod
    def refuse(status: int = 503, error: str = "SlowDown") -> Fault:
        """The server says no, and is never asked."""
        return Fault(kind=Kind.STATUS, status=status, error=error)

    @staticmethod
    def say(body: bytes, status: int = 200) -> Fault:
        """The client gets this XML, and the server is never asked."""
        return Fault(kind=Kind.STATUS, status=status, body=body)

    @staticmethod
    def expired_token() -> Fault:
        """The credentials have run out: 400 with `ExpiredToken`, as S3 says it."""
        return Fault.refuse(400, "ExpiredToken")

    @staticmethod
    def drop_before() -> Fault:
        """The connection is reset and the server hears nothing of the request."""
        return Fault(kind=Kind.DROP_BEFORE)

    @staticmethod
    def drop_in_request(fraction: float = 0.5) -> Fault:
        """The connection is reset on both sides after a part of the request's body."""
        return Fault(kind=Kind.DROP_IN_REQUEST, fraction=fraction)

    @staticmethod
    def lose_answer() -> Fault:
        """The server does it, and the connection is reset before any of its answer."""
        return Fault(kind=Kind.LOSE_ANSWER)

    @staticmethod
    def duplicate(answer: int = 1) -> Fault:
        """The server gets the request twice; the client gets the first or the second answer."""
        return Fault(kind=Kind.DUPLICATE, answer=answer)

    @staticmethod
    def truncate(fraction: float = 0.5, *, fixed_length: bool = False) -> Fault:
        """The response's body ends early: with the connection, or as if it had been that short."""
        return Fault(kind=Kind.TRUNCATE, fraction=fraction, fixed_length=fixed_length)

    @staticmethod
    def corrupt_request(fraction: float = 0.5) -> Fault:
        """One bit of the request's body is flipped."""
        return Fault(kind=Kind.CORRUPT_REQUEST, fraction=fraction)

    @staticmethod
    def corrupt_response(fraction: float = 0.5) -> Fault:
        """One bit of the response's body is flipped."""
        return Fault(kind=Kind.CORRUPT_RESPONSE, fraction=fraction)

    @staticmethod
    def stall(seconds: float, where: Where = "before", fraction: float = 0.5) -> Fault:
        """Nothing moves for a while: before forwarding, or in the middle of a body."""
        return Fault(kind=Kind.STALL, seconds=seconds, where=where, fraction=fraction)

    @staticmethod
    def slow(bytes_per_s: int) -> Fault:
        """Bodies pass at this rate, each way."""
        return Fault(kind=Kind.SLOW, bytes_per_s=bytes_per_s)

    @staticmethod
    def hold() -> Fault:
        """The request is taken in whole and forwarded only when the proxy is told to release it.

        By then the client will have given up: a write that lands late.
        """
        return Fault(kind=Kind.HOLD)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a plan may go by.

    Attributes:
        number: of the request at this proxy, from 1.
        verb: what it asks for.
        key: of S3, without the bucket.
        group: the key's, see `recovery.drill.proxy.s3_requests.group_of`.
        nth: its number among those of the same verb and group, from 1.
        headers: of HTTP, by lower-case name. They hold signatures: for the plan's eyes only.
    """

    number: int
    verb: Verb
    key: str
    group: str
    nth: int
    headers: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)


class FaultPlan(Protocol):
    """Decides what happens to a request. Pure: the same seed and facts, the same fault."""

    def decide(self, facts: Facts, *, seed: int) -> Fault | None:
        """The fault for this request; None to pass it on unharmed."""


def draw(seed: int, number: int, verb: Verb, purpose: str = "") -> float:
    """A number from 0 to below 1, the same on every machine and in every release of Python.

    Args:
        seed, number, verb: of the drill, and of the request.
        purpose: gives further independent draws for one request.
    """
    text = f"{seed}/{number}/{verb.value}/{purpose}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()[1:]) / 2.0**56


class Calm:
    """No faults."""

    def decide(self, facts: Facts, *, seed: int) -> Fault | None:
        """None, always."""
        return None


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One line of a script; what is None matches everything.

    Attributes:
        fault: what to do; None lets the request pass and asks no later rule.
        verbs: which requests.
        group: of which keys.
        nth: which of them, counted per verb and group from 1: `{3}`, `range(1, 4)`.
        key: a condition on the key.
    """

    fault: Fault | None
    verbs: Container[Verb] | None = None
    group: str | None = None
    nth: Container[int] | None = None
    key: Callable[[str], bool] | None = None

    def matches(self, facts: Facts) -> bool:
        """Whether this rule is about this request."""
        return (
            (self.verbs is None or facts.verb in self.verbs)
            and (self.group is None or facts.group == self.group)
            and (self.nth is None or facts.nth in self.nth)
            and (self.key is None or self.key(facts.key))
        )


class Script:
    """Rules in order; the first that matches decides, none is no fault."""

    def __init__(self, *rules: Rule) -> None:
        self._rules = rules

    def decide(self, facts: Facts, *, seed: int) -> Fault | None:
        """The fault of the first rule that matches."""
        return next((rule.fault for rule in self._rules if rule.matches(facts)), None)


@dataclass(frozen=True, kw_only=True)
class Chance:
    """A fault that hits a share of the requests of some verbs (None: of all).

    Attributes:
        anywhere: where in the body it strikes is drawn; else the fault says it.
    """

    fault: Fault
    share: float
    verbs: frozenset[Verb] | None = None
    anywhere: bool = True


class Weather:
    """Faults by chance. One draw decides which, a second one where in the body it strikes."""

    def __init__(self, *chances: Chance) -> None:
        for verb in Verb:
            total = sum(c.share for c in chances if c.verbs is None or verb in c.verbs)
            if not 0 <= total <= 1.000001:
                raise SettingError(f"The chances for {verb.value!r} add up to {total}, not 0 to 1.")
        self._chances = chances

    def decide(self, facts: Facts, *, seed: int) -> Fault | None:
        """Each chance in its share of all seeds and numbers."""
        left = draw(seed, facts.number, facts.verb)
        for chance in self._chances:
            if chance.verbs is not None and facts.verb not in chance.verbs:
                continue
            if left < chance.share:
                if not chance.anywhere:
                    return chance.fault
                fraction = draw(seed, facts.number, facts.verb, "fraction")
                return replace(chance.fault, fraction=fraction)
            left -= chance.share
        return None


class FirstOf:
    """Plans in order; the first fault is taken. A script before weather, for instance."""

    def __init__(self, *plans: FaultPlan) -> None:
        self._plans = plans

    def decide(self, facts: Facts, *, seed: int) -> Fault | None:
        """The first fault that any of the plans names."""
        for plan in self._plans:
            fault = plan.decide(facts, seed=seed)
            if fault is not None:
                return fault
        return None


def stormy(share: float) -> Weather:
    """A share of all requests in trouble, spread evenly over what networks and S3 really do.

    Every request: 503, a reset before it is forwarded, a lost answer. Writes besides: a reset in
    the middle, and duplicate delivery with either answer. Reads besides: bodies that end early,
    every second one before its first byte.
    """
    sixth, quarter, eighth = share / 6, share / 4, share / 8
    chances = [
        Chance(fault=fault, share=part, verbs=verbs)
        for verbs, part in ((WRITES, sixth), (READS, quarter))
        for fault in (Fault.refuse(), Fault.drop_before(), Fault.lose_answer())
    ]
    chances += [
        Chance(fault=Fault.drop_in_request(), share=sixth, verbs=WRITES),
        Chance(fault=Fault.duplicate(1), share=sixth, verbs=WRITES),
        Chance(fault=Fault.duplicate(2), share=sixth, verbs=WRITES),
        Chance(fault=Fault.truncate(), share=eighth, verbs=READS),
        Chance(fault=Fault.truncate(0.0), share=eighth, verbs=READS, anywhere=False),
    ]
    others = frozenset(Verb) - WRITES - READS
    chances += [
        Chance(fault=fault, share=share / 3, verbs=others)
        for fault in (Fault.refuse(), Fault.drop_before(), Fault.lose_answer())
    ]
    return Weather(*chances)
