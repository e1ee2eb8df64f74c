"""A running query is shown by its driver's page, and what came before by the next driver's."""

from __future__ import annotations

import re
import socket
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest

from statebackend.errors import SettingError
from tests.spark.local.world import until

if TYPE_CHECKING:
    from tests.spark.local.world import World

TOKEN = "a secret of 16 or more"


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
    return number


def page(port: int, path: str, token: str = TOKEN) -> str:
    head = {"Authorization": f"Bearer {token}"}
    asked = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=head)
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return str(answer.read().decode())


def text(port: int, path: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", page(port, path)).split())


def test_a_query_is_shown_while_it_runs_and_its_history_after_a_restart(
    world: World, port: int
) -> None:
    settings = {"ui_port": port, "ui_token": TOKEN}
    world.input.add_batches(1)
    backend = world.backend(settings=settings)
    query = backend.start(world.writer(world.ledger(backend)).trigger(processingTime="0 seconds"))
    until(lambda: "Checkpoint 0 was complete" in text(port, "/jobs/default/"), "it is shown")
    assert "Is it safe to stop? Yes." in text(port, "/jobs/default/")
    one = text(port, "/jobs/default/checkpoints/0")
    assert "Checkpoint 0 complete" in one
    assert "1 to 2 of 2" in one
    truth = world.input.ids()["k1"]
    found = f"&#34;total&#34;: {sum(truth)}"  # once Spark has committed the batch
    until(lambda: found in text(port, "/jobs/default/state?of=ledger%0Aacc&key=k1"), "it is found")
    assert TOKEN not in page(port, "/jobs/default/settings")
    assert "ui_token (not shown) argument" in text(port, "/jobs/default/settings")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        page(port, "/", "another")
    query.stop()
    assert "Stopped after checkpoint 0." in text(port, "/jobs/default/")

    world.input.add_batches(1)
    again = world.backend(settings=settings)
    world.run(again, world.ledger(again))
    overview = text(port, "/jobs/default/")
    assert "Stopped after checkpoint 1." in overview
    assert "ledger: 2 subtasks at checkpoint 1" in overview
    assert "checkpoints/0" in page(port, "/jobs/default/checkpoints")
    assert len(re.findall(r"generation [12]", text(port, "/jobs/default/restores"))) >= 2


def test_a_page_that_would_be_open_to_a_network_is_refused_before_the_job_is_claimed(
    world: World, port: int
) -> None:
    backend = world.backend(settings={"ui_port": port, "ui_host": "0.0.0.0"})
    world.input.add_batches(1)
    with pytest.raises(SettingError, match=r"ui\.token"):
        world.run(backend, world.ledger(backend))
    assert backend.lineages() == {}
