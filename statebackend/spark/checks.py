"""Whether a query's own foreachBatch function asks if its batches are finished."""

from __future__ import annotations

from statebackend.errors import UnsupportedQueryError

__all__ = ["BatchChecks"]


class BatchChecks:
    """Which batch was asked about last, by `StateBackend.checked`.

    With asynchronous commits each batch must be: else Spark could commit one that was read in part
    while the record of the batch before is on its way, and would be two batches ahead of the log.
    Some function was wrapped, which the start knows. Only the batches show whether it is the one
    that the query has. The first batch of a run follows from what is durable, so to refuse the
    second is early enough: the next start goes back by one batch at most.

    Attributes:
        required: whether nothing goes on without.
    """

    def __init__(self) -> None:
        self.required = False
        self._passed: int | None = None

    def passed(self, epoch: int) -> None:
        """A function asked about an epoch, and it was finished."""
        self._passed = epoch

    def require(self, running: int | None, following: int) -> None:
        """Refuse to begin an epoch after one that nobody asked about.

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
