"""Worlds whose durable copies go to a real S3 server, through a proxy that counts and breaks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from recovery.drill.proxy.fault_proxy import FaultProxy
from tests.spark.local.conftest import *  # noqa: F403
from tests.spark.local.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator

    from statebackend import StateBackend
    from tests.support.s3 import S3


class StoreWorld(World):
    """A world on S3. ``proxy`` stands between it and the server."""

    proxy: FaultProxy
    uri: str

    def backend(self, **given: Any) -> StateBackend:
        settings = {
            "s3_endpoint": self.proxy.url,
            "s3_region": "us-east-1",
            "s3_deadline_s": 5.0,
            **given.pop("settings", {}),
        }
        return super().backend(**{"uri": self.uri, "settings": settings, **given})


@pytest.fixture
def proxy(ministack: S3) -> Iterator[FaultProxy]:
    with FaultProxy(ministack.plain_url.removeprefix("http://"), seed=3) as running:
        yield running


@pytest.fixture
def on_s3(make_world: Any, proxy: FaultProxy, ministack: S3, request: Any) -> StoreWorld:
    world = make_world()
    world.__class__ = StoreWorld
    world.proxy, world.uri = proxy, ministack.fresh_uri()
    return world
