"""A ``foreachBatch`` function that may not return before the epoch of its batch is complete."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame

from statebackend.spark.java_errors import ShortJavaError

if TYPE_CHECKING:
    from statebackend.runtime.driver.session import RunSession

__all__ = ["CheckedBatches"]


class CheckedBatches:
    """Runs the user's function, then asks the query's session whether the batch was used whole.

    Attributes:
        session: of the query that was started with it last; None: none has been yet.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self.session: RunSession | None = None

    def __call__(self, frame: DataFrame, batch_id: int, *rest: Any) -> Any:
        """What the user's function returns.

        Raises:
            StateBackendError: the function read a part of the frame only.
        """
        try:
            result = self._function(frame, batch_id, *rest)
        except Py4JJavaError as error:
            raise ShortJavaError(error).with_traceback(error.__traceback__) from None
        if self.session is not None:
            self.session.check_finished(batch_id)
        return result
