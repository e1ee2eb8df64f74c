"""`statebackend history`: what it prints, and the shape of its JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from recovery.inspect.history import CheckpointFigures, History
from snapshot.storage.stores_by_uri import open_store
from snapshot.storage.uris import job_folder
from tests.cli.folder import JOB, OPERATOR, Folder, new_id
from tests.cli.test_cli import data, run


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return (tmp_path / "state").as_uri()


@pytest.fixture
def folder(uri: str) -> Folder:
    made = Folder(open_store(job_folder(uri, JOB), new_id=new_id), job=JOB)
    return made.epochs(3).claim("host:2").epochs(2, base="base")


def test_history_has_a_shape(uri: str, folder: Folder) -> None:
    (job,) = data("history", uri, "--job", JOB)["jobs"]
    assert job.keys() == set(History.__struct_fields__)
    assert [one["epoch"] for one in job["checkpoints"]] == [4, 3, 2, 1, 0]
    assert job["checkpoints"][0].keys() == set(CheckpointFigures.__struct_fields__)
    (page,) = data("history", uri, "--limit", "2", "--before", "4")["jobs"]
    assert [one["epoch"] for one in page["checkpoints"]] == [3, 2]
    assert page["next_before"] == 2
    text = run("history", uri, "--limit", "2")
    for word in (JOB, "complete", "--before 3", "generation 2", "total ms", "commit ms"):
        assert word in text


def test_an_epoch_is_shown_by_operator_and_subtask(uri: str, folder: Folder) -> None:
    (one,) = data("history", uri, "--job", JOB, "--epoch", "3")["jobs"]
    (operator,) = one["operators"]
    assert (operator["uid"], len(operator["by_subtask"])) == (OPERATOR, 2)
    text = run("history", uri, "--epoch", "3")
    for word in (OPERATOR, "epoch 3", "subtask", "2 bases", "persist ms", "end to end ms"):
        assert word in text


def test_what_was_cleaned_is_still_shown(uri: str, folder: Folder) -> None:
    run("gc", uri, "--yes", "--min-age-s", "0")
    assert data("gc", uri, "--min-age-s", "0")["jobs"][0]["kept"]["history"]["objects"] == 1
    (job,) = data("history", uri)["jobs"]
    assert [one["epoch"] for one in job["checkpoints"]] == [4, 3, 2, 1, 0]
    assert "was cleaned" in run("history", uri, "--epoch", "0")
    assert data("verify", uri)["ok"] is True


def test_an_epoch_that_nothing_is_known_of_is_an_error(uri: str, folder: Folder) -> None:
    answer = data("history", uri, "--job", JOB, "--epoch", "9", status=2)
    assert answer["error"]["code"] == "SB7001"
