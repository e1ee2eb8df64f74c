"""Frames that are made in several threads at once have one token and one anchor."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from statebackend.settings import Settings
from statebackend.spark.frames import frame_builder
from statebackend.spark.frames.frame_builder import FrameBuilder


def test_frames_of_several_threads_have_one_token_and_one_anchor(monkeypatch: Any) -> None:
    def broadcast(value: Any) -> Any:
        time.sleep(0.01)  # the others ask meanwhile
        return SimpleNamespace(value=value)

    def anchor(spark: Any, parallelism: int) -> Any:
        time.sleep(0.01)
        return object()

    conf = SimpleNamespace(get=lambda key, default=None: default)
    context = SimpleNamespace(broadcast=broadcast, getConf=lambda: conf)
    monkeypatch.setattr(frame_builder, "Anchor", anchor)
    monkeypatch.setattr(FrameBuilder, "_check_locality", lambda self: None)
    spark: Any = SimpleNamespace(sparkContext=context)
    builder = FrameBuilder(spark, None, Settings.resolve({}, lambda key: None))
    with ThreadPoolExecutor(8) as pool:
        tokens = list(pool.map(lambda _: builder.credentials().value.token, range(8)))
        anchors = list(pool.map(lambda _: id(builder._anchor(2)), range(8)))
    assert len(set(tokens)) == len(set(anchors)) == 1
