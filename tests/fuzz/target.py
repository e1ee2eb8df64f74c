"""What is fuzzed: something that makes inputs, and something that takes them and judges."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from statebackend.errors import StateBackendError

__all__ = ["REFUSED", "SAME", "TAKEN", "Target", "refused_or"]

REFUSED, SAME, TAKEN = "refused", "same", "taken"


@dataclass(frozen=True)
class Target:
    """One kind of input.

    Attributes:
        make: an input, from a seeded source.
        take: gives it to the code: `REFUSED` with a typed error of ours, `SAME` if it means what
            the undamaged one means, `TAKEN` where nothing can tell. It raises for anything else:
            an assertion where damage went unnoticed, or what the code should not have raised.
    """

    name: str
    make: Callable[[random.Random], Any]
    take: Callable[[Any], str]


def refused_or(call: Callable[[], str]) -> str:
    """The call's outcome, or that it was refused as it should be."""
    try:
        return call()
    except StateBackendError:
        return REFUSED
