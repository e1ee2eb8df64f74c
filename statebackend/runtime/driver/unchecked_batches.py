"""Refuses a batch after one that `StateBackend.checked` did not check."""

from __future__ import annotations

from statebackend.errors import UnsupportedQueryError

__all__ = ["BatchChecks"]


class BatchChecks:
    """Remembers the last batch that `StateBackend.checked` found finished.

    With asynchronous commits each batch must be checked. Else Spark could commit a batch that was
    read in part while the record of the batch before is on its way, and a crash would then leave
    Spark two batches ahead of the log. The start knows that some function was wrapped. Only the
    batches show whether the query was given that function. A function that is never called is found
    out in the second batch of a run, and the next start goes back by one batch at most. One that is
    skipped now and then may be found out too late.

    Attributes:
        required: whether a batch may only follow one that was checked.
    """

    def __init__(self) -> None:
        self.required = False
        self._passed: int | None = None

    def passed(self, epoch: int) -> None:
        """Note that an epoch was checked, and was finished."""
        self._passed = epoch

    def require(self, running: int | None, following: int) -> None:
        """Refuse to begin an epoch after one that nobody checked.

        Raises:
            UnsupportedQueryError: naming that batch.
        """
        is_next = running is not None and following > running
        if self.required and is_next and self._passed != running:
            raise UnsupportedQueryError(
                f"Batch {running} was not checked: the function that backend.checked() wrapped is "
                f"not the one that the query was given, or was not called for it. With "
                f"asynchronous commits each batch must be checked.",
                todo="Give foreachBatch what backend.checked() returns, then start the query "
                "again: it goes back by this one batch, where that is due.",
            )
