"""What a test leaves open in its own process."""

from __future__ import annotations

from recovery.local.store_pool import StorePool

__all__ = ["close_stores"]


def close_stores() -> None:
    """Close the stores that this process keeps open, before their folder goes.

    Their thread would go on, and come upon what a later test plants in the product.
    """
    if StorePool._instance is not None:
        StorePool._instance[1].close()
