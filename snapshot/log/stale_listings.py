"""What a listing of the commit log may lack: it may be older than what a read shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from statebackend.errors import ObjectNotFoundError, StoreCapabilityError

__all__ = ["check_listed", "has_grown"]


def check_listed(newest: int, claim: int) -> None:
    """Refuse a listing that ends before a claim that was written: a claim is never deleted.

    Args:
        newest: the last record that it shows; -1: none.

    Raises:
        StoreCapabilityError: the store's listings lag behind what was written.
    """
    if newest < claim:
        raise StoreCapabilityError(
            f"A listing of the commit log ends with record {newest}, and record {claim} had been "
            f"written before it: what else was committed is not known.",
            todo="Start again. If it comes back, the store's listings lag behind its writes, and "
            "it cannot keep a log: see Stores in docs/reference/compatibility.md.",
        )


def has_grown(
    newest: int, read: Callable[[int], object], sequences: Callable[[], Sequence[int]]
) -> bool:
    """Whether a record was appended after a listing was made.

    To be asked before the log is said to lack a record or to be damaged: a listing may lag, a
    read does not.

    Args:
        newest: the last record that the listing shows; -1: none. read: one record. sequences:
            lists the log anew.

    Raises:
        StoreCapabilityError: the record is there, and the new listing does not show it.
    """
    try:
        read(newest + 1)
    except ObjectNotFoundError:
        return False
    check_listed(max(sequences(), default=-1), newest + 1)
    return True
