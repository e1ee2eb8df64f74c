"""The command line over real folders: what it prints, the shapes of its JSON, its exit status."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from recovery.inspect.describe import describe
from recovery.local.private_folders import home_of
from snapshot.formats.record import record_name
from snapshot.storage import LocalStore
from snapshot.storage.stores_by_uri import open_store
from snapshot.storage.uris import job_folder
from statebackend import system
from statebackend.cli import doctor, job_tables
from statebackend.cli.job_commands import app
from statebackend.errors import LocalDirError
from statebackend.operators.declared_states import StateDeclaration
from statebackend.schema.ddl import parse_ddl
from tests.cli.folder import JOB, OPERATOR, Folder, new_id

ROOT = Path(__file__).parents[2]


def run(*args: str, status: int = 0) -> str:
    done = CliRunner().invoke(app, list(args))
    assert done.exit_code == status, done.output
    return done.stdout


def data(*args: str, status: int = 0) -> dict[str, Any]:
    document = json.loads(run(*args, "--json", status=status))
    assert document.pop("format") == 1
    return dict(document)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return (tmp_path / "state").as_uri()


def folder_of(uri: str, job: str = JOB) -> Folder:
    return Folder(open_store(job_folder(uri, job), new_id=new_id), job=job)


@pytest.fixture
def folder(uri: str) -> Folder:
    """A job with something to clean."""
    made = folder_of(uri).epochs(3, own=True)
    return made.claim("host:2").epochs(2, base="files", own=True)


def names(folder: Folder) -> set[str]:
    return {info.name for info in folder.store.list("")}


# --- list ----------------------------------------------------------------------------------------


def test_list_names_every_job(uri: str, folder: Folder) -> None:
    folder_of(uri, "a/b")
    answer = data("list", uri)
    assert answer["uri"] == uri
    assert [job["job"] for job in answer["jobs"]] == ["a/b", JOB]
    new, old = answer["jobs"]
    assert (new["epoch"], old["epoch"]) == (None, 4)
    assert old.keys() == {
        "job",
        "uri",
        "epoch",
        "generation",
        "writer",
        "objects",
        "size_bytes",
        "modified_ms",
        "problem",
    }
    assert (old["generation"], old["writer"]) == (2, "host:2")
    assert old["size_bytes"] == sum(info.size_bytes for info in folder.store.list(""))
    text = run("list", uri)
    assert "a/b" in text
    assert JOB in text


def test_list_of_an_empty_place_is_empty(uri: str) -> None:
    assert data("list", uri) == {"uri": uri, "jobs": []}
    assert "no job" in run("list", uri)


def test_a_job_s_own_folder_is_not_taken_for_the_folder_of_all(uri: str, folder: Folder) -> None:
    done = CliRunner().invoke(app, ["list", folder.store.uri])
    assert done.exit_code == 2
    assert "--job" in done.stderr


# --- describe ------------------------------------------------------------------------------------


def test_describe_has_a_shape(uri: str, folder: Folder) -> None:
    answer = data("describe", uri, "--job", JOB)
    (job,) = answer["jobs"]
    assert job.keys() == {
        "job",
        "uri",
        "job_id",
        "query_id",
        "sequence",
        "generation",
        "writer",
        "stamp_ms",
        "records",
        "oldest_needed",
        "cleaned_below",
        "operators",
        "claims",
        "objects",
        "size_bytes",
        "problems",
    }
    (operator,) = job["operators"]
    assert operator["uid"] == OPERATOR
    assert operator["key_groups"] == [[0, 3], [4, 7]]
    assert operator["bases"][0].keys() == {
        "subtask",
        "epoch",
        "kind",
        "size_bytes",
        "deltas",
        "delta_bytes",
    }
    assert job["claims"][1]["writer"] == "host:2"
    text = run("describe", uri)
    for word in (JOB, OPERATOR, "total", "host:2", "parallelism 2 of at most 8"):
        assert word in text


def declared(name: str, kind: str, value: str, key: str = "") -> str:
    of_key = parse_ddl(key).json() if key else ""
    return StateDeclaration(
        name=name, kind=kind, value_schema=parse_ddl(value).json(), key_schema=of_key
    ).to_json()


def test_describe_tells_schemas_in_ddl(folder: Folder) -> None:
    shown = Console(record=True, width=200, file=io.StringIO())
    states = {
        "count": declared("count", "value", "n bigint"),
        "pages": declared("pages", "map", "at timestamp", "page string"),
        "damaged": "{",
    }
    described = describe(folder.store, JOB)
    operator = replace(
        described.operators[0],
        states={name: number for number, name in enumerate(states)},
        schemas={"": parse_ddl("user string").json(), **states},
    )
    job_tables.description(shown, replace(described, operators=[operator]))
    text = shown.export_text()
    assert "key user string\n" in text
    assert "state count (id 0) value: n bigint\n" in text
    assert "state pages (id 1) map: page string -> at timestamp\n" in text
    assert "state damaged (id 2) {\n" in text


# --- verify --------------------------------------------------------------------------------------


def test_verify_of_a_sound_job_ends_with_0(uri: str, folder: Folder) -> None:
    answer = data("verify", uri)
    assert answer["ok"] is True
    (job,) = answer["jobs"]
    assert job["findings"] == []
    assert job["restorable"] == {OPERATOR: [3, 4]}
    assert "ok" in run("verify", uri)


def test_verify_names_what_is_wrong_and_ends_with_1(uri: str, folder: Folder) -> None:
    victim = folder.log.manifests()[-1].slices[0].object
    assert victim is not None
    folder.store.delete([victim])
    folder_of(uri, "another").epochs(2)
    answer = data("verify", uri, status=1)
    assert answer["ok"] is False
    (finding,) = [f for job in answer["jobs"] for f in job["findings"]]
    assert finding == {
        "code": "SB2001",
        "object": victim,
        "problem": finding["problem"],
        "means": f"Operator {OPERATOR!r} cannot be restored to epoch 4.",
        "operator": OPERATOR,
        "subtask": 0,
        "epoch": 4,
    }
    text = run("verify", uri, status=1)
    assert victim in text
    assert "cannot be restored to epoch 4" in text
    run("verify", uri, "--job", "another")


@pytest.mark.parametrize("verb", ["describe", "verify", "gc"])
def test_a_job_that_does_not_read_does_not_hide_the_others(
    verb: str, uri: str, folder: Folder
) -> None:
    other = folder_of(uri, "another")
    other.store.put(record_name(0), [b"not a record"])
    answer = data(verb, uri, status=2)
    assert [job["job"] for job in answer["jobs"]] == [JOB]
    (error,) = answer["errors"]
    assert error.keys() == {"job", "code", "what", "todo"}
    assert error["job"] == "another"
    assert data(verb, uri, "--job", JOB)["errors"] == []


# --- gc ------------------------------------------------------------------------------------------


def test_gc_deletes_nothing_unless_told(uri: str, folder: Folder) -> None:
    before = names(folder)
    answer = data("gc", uri, "--min-age-s", "0")
    assert answer["dry_run"] is True
    (job,) = answer["jobs"]
    assert job.keys() == {
        "job",
        "uri",
        "dry_run",
        "removed",
        "kept",
        "young",
        "waiting",
        "drivers",
        "unknown",
        "foreign",
        "files_unknown",
        "oldest_needed",
        "cleaned_below",
        "requests",
    }
    assert job["removed"]["data"].keys() == {"objects", "size_bytes"}
    assert "--yes" in run("gc", uri, "--min-age-s", "0")
    assert names(folder) == before


def test_gc_with_yes_keeps_all_that_a_restore_needs(uri: str, folder: Folder) -> None:
    before = names(folder)
    assert "deleted" in run("gc", uri, "--job", JOB, "--yes", "--min-age-s", "0")
    assert len(names(folder)) < len(before)
    folder.check()
    run("verify", uri)
    assert data("gc", uri, "--min-age-s", "0")["jobs"][0]["removed"] == {}
    folder.epochs(2, base="files").check()


def test_gc_leaves_what_is_young(uri: str, folder: Folder) -> None:
    (job,) = data("gc", uri, "--yes")["jobs"]
    assert job["removed"] == {}
    assert job["young"]["records"]["objects"] > 0


def test_gc_refuses_a_log_that_does_not_read(uri: str, folder: Folder) -> None:
    tip = record_name(folder.log.manifests()[-1].sequence)
    folder.store.put(tip, [folder.store.get(tip)[:-1]])
    before = names(folder)
    answer = data("gc", uri, "--job", JOB, "--yes", "--min-age-s", "0", status=2)
    assert answer["error"]["code"] == "SB3001"
    assert names(folder) == before


# --- doctor --------------------------------------------------------------------------------------


def statuses(answer: dict[str, Any]) -> dict[str, str]:
    assert all(check.keys() == {"name", "status", "detail", "todo"} for check in answer["checks"])
    return {check["name"]: check["status"] for check in answer["checks"]}


def test_doctor_tries_host_and_store(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    found = statuses(data("doctor", "--uri", uri, "--local-dir", str(tmp_path / "not" / "yet")))
    for name in ("python", "pandas", "rocksdict", "rocksdb", "PYSPARK_PYTHON", "local dir"):
        assert found[name] == "ok"
    for name in ("store", "store's abilities", "clock"):
        assert found[name] == "ok"
    store = LocalStore(tmp_path / "state", new_id=new_id)
    assert store.list("") == []  # nothing is left behind
    assert not (tmp_path / "not").exists()


def test_doctor_ends_with_1_if_something_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "/not/there/python")
    answer = data("doctor", "--local-dir", "/proc/nowhere", status=1)
    assert answer["ok"] is False
    found = statuses(answer)
    assert found["PYSPARK_PYTHON"] == found["local dir"] == "fail"
    assert all(check["todo"] for check in answer["checks"] if check["status"] != "ok")
    assert "FAIL" in run("doctor", "--local-dir", "/proc/nowhere", status=1)


def test_doctor_says_which_python_workers_run_where_nothing_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    folder = os.path.dirname(sys.executable)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin")
    assert doctor._workers_python().status == "ok", "an environment that is activated"
    (tmp_path / "python3").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path}:{folder}")
    other = doctor._workers_python()
    assert other.status == "warn"
    assert str(tmp_path / "python3") in other.detail
    assert f"PYSPARK_PYTHON={sys.executable}" in other.todo


def test_doctor_says_whose_the_local_dir_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor._owner(tmp_path).status == "ok"
    own = tmp_path / system.user_folder_name()
    own.mkdir()
    uid = os.geteuid()
    monkeypatch.setattr(system, "user_folder_name", lambda: own.name)
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    # The copies would go below, to what is another user's.
    assert doctor._owner(tmp_path) == doctor._owner(own)
    assert doctor._owner(own).status == "fail"
    own.rmdir()
    assert doctor._owner(tmp_path).status == "ok"
    assert doctor._owner(tmp_path).detail == f"copies go to {own}"
    tmp_path.chmod(0o777)
    assert doctor._owner(tmp_path).status == "warn"
    for below in (own / "missing", tmp_path / "missing"):
        assert doctor._owner(below).detail.startswith(
            f"other users can rename what lies in {tmp_path}"
        )
    tmp_path.chmod(0o1777)
    assert doctor._owner(tmp_path).status == doctor._owner(tmp_path / "missing").status == "ok"


def test_doctor_follows_the_links_that_a_job_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    link, own = tmp_path / "link", tmp_path / system.user_folder_name()
    for one in (link, own):
        one.symlink_to(disk)
    gone, file = tmp_path / "gone", tmp_path / "file"
    gone.symlink_to(tmp_path / "not there")
    file.touch()

    def agree() -> dict[str, str]:
        found = {one.name: doctor._owner(one).status for one in (link, own, gone, file)}
        for name, status in found.items():
            try:
                home_of(str(tmp_path / name))
            except LocalDirError:
                assert status == "fail", name
            else:
                assert status == "ok", name
        return found

    assert agree() == {"link": "ok", own.name: "fail", "gone": "fail", "file": "fail"}
    if os.geteuid() == 0:
        os.chown(link, 65534, 65534, follow_symlinks=False)
        assert agree()["link"] == "fail"


def test_a_package_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"pandas": "3.0.1", "pyspark": "4.3.0", "rocksdict": "0.3.9"}

    def version(name: str) -> str:
        if name not in installed:
            raise doctor.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(doctor.metadata, "version", version)
    found = {check.name: check for check in doctor._packages()}
    assert (found["pandas"].status, found["pyspark"].status) == ("fail", "ok")
    assert found["pandas"].todo == "pip install 'pandas>=2.2,<3'"
    assert found["rocksdict"].status == "fail"
    assert found["blake3"].detail == "not installed"


def test_reduce_locality_is_found_in_spark_s_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert doctor._locality().status == "warn"
    (tmp_path / "spark-defaults.conf").write_text("spark.shuffle.reduceLocality.enabled  false\n")
    assert doctor._locality().status == "ok"


# --- errors, and how it is started ---------------------------------------------------------------


@pytest.mark.parametrize("verb", ["describe", "verify", "gc"])
def test_a_job_that_is_not_there_is_one_sentence_and_status_2(verb: str, uri: str) -> None:
    for args in ([verb, uri], [verb, uri, "--job", "nobody"]):
        done = CliRunner().invoke(app, args)
        assert done.exit_code == 2
        assert done.stdout == ""
        assert done.stderr.startswith("[SB")
        assert done.stderr.count("\n") == 1
        answer = data(*args, status=2)
        assert answer["error"].keys() == {"code", "what", "todo"}


def test_s3_flags_mean_nothing_elsewhere(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert data("list", uri, "--s3-region", "eu", status=2)["error"]["code"] == "SB1001"
    monkeypatch.setenv("STATEBACKEND_S3_REGION", "eu")
    data("list", uri)


def started(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_runs_as_a_module_and_says_its_version() -> None:
    done = started("-m", "statebackend.cli", "--version")
    assert (done.returncode, done.stdout) == (0, "statebackend 0.1.0\n")


def test_without_its_extra_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError('gone', name='typer')\n")
    done = started("-m", "statebackend.cli", "list", "/x", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "pip install '.[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_it_starts_neither_spark_nor_a_database() -> None:
    program = (
        "import sys, statebackend.cli.job_commands; "
        "print([m for m in ('pyspark', 'rocksdict', 'boto3') if m in sys.modules])"
    )
    assert started("-c", program).stdout == "[]\n"
