"""The linters' rules are alive: each banned thing is written down once, and must be reported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Container
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("statebackend", "snapshot", "recovery")
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _modules(folder: str, without: Container[str] = ()) -> list[str]:
    """All that there are, so that a new one is held from its first line."""
    found = sorted((ROOT / folder).glob("*.py"))
    return [str(path.relative_to(ROOT)) for path in found if path.stem not in without]


PROTOCOL = (
    "snapshot/x.py",
    "recovery/decide/restore_plan.py",
    "statebackend/key_hashing.py",
    "recovery/decide/start_batch.py",
    "statebackend/keygroups.py",
    "statebackend/schema/x.py",
    "statebackend/state/x.py",
    "statebackend/operators/x.py",
    "statebackend/spark/x.py",
    "statebackend/continuous/x.py",
    # What the simulation runs: it hands a System to each.
    *_modules("recovery/local", without={"local_copies"}),
    *_modules("recovery/restore"),
    *_modules("recovery/savepoints"),
    *_modules("snapshot/log"),
    *_modules("snapshot/protocol"),
    *_modules("snapshot/barriers"),
    *_modules("statebackend/runtime/driver", without={"attempt_timeouts", "services"}),
    "statebackend/runtime/worker/background_upload.py",
    *_modules("statebackend/spark/start", without={"checkpoint_location"}),
    *_modules("statebackend/continuous/driver"),
    *_modules("statebackend/continuous/worker"),
)
EDGES = (
    "statebackend/rpc/driver_server.py",
    "statebackend/continuous/exchange/x.py",
    "statebackend/rocks/x.py",
    "statebackend/system.py",
    "statebackend/threads.py",
    "snapshot/storage/x.py",
    "recovery/local/local_copies.py",
    "examples/flights/__main__.py",
    "tests/snapshot/test_x.py",
    "bench/x.py",
)
NOT_IN_PROTOCOL = {
    "time.time": "import time\n\nNOW = time.time()\n",
    "time.time_ns": "import time as t\n\nNOW = t.time_ns()\n",
    "time.monotonic": "from time import monotonic\n\nNOW = monotonic()\n",
    "time.monotonic_ns": "import time\n\nNOW = time.monotonic_ns()\n",
    "time.perf_counter": "import time\n\nNOW = time.perf_counter()\n",
    "time.sleep": "from time import sleep\n\nsleep(1)\n",
    "datetime.datetime.now": "from datetime import datetime\n\nNOW = datetime.now()\n",
    "datetime.datetime.utcnow": "import datetime\n\nNOW = datetime.datetime.utcnow()\n",
    "threading": "import threading\n\nLOCK = threading.Lock()\n",
    "concurrent.futures": "from concurrent.futures import wait\n\nWAIT = wait\n",
    "time": "import time\n\nTIME = time\n",
    "uuid": "import uuid\n\nUUID = uuid\n",
    "statebackend.system.monotonic_s": (
        "from statebackend import system\n\nNOW = system.monotonic_s()\n"
    ),
    "statebackend.system.new_id": ("from statebackend.system import new_id\n\nNAME = new_id()\n"),
    "random": "import random\n\nDRAWN = random.random()\n",
    "secrets": "from secrets import token_hex\n\nDRAWN = token_hex()\n",
    "numpy.random": "import numpy as np\n\nDRAWN = np.random.default_rng()\n",
    "uuid.uuid1": "import uuid\n\nNAME = uuid.uuid1()\n",
    "uuid.uuid4": "from uuid import uuid4\n\nNAME = uuid4()\n",
    "os.urandom": "import os\n\nDRAWN = os.urandom(8)\n",
    "os.environ": 'import os\n\nHOME = os.environ["HOME"]\n',
    "os.getenv": 'from os import getenv\n\nHOME = getenv("HOME")\n',
    "pickle.load": 'import pickle\n\nwith open("x", "rb") as file:\n    X = pickle.load(file)\n',
    "pickle.loads": 'from pickle import loads\n\nX = loads(b"")\n',
    "cloudpickle": 'import cloudpickle\n\nX = cloudpickle.loads(b"")\n',
    "pyspark.cloudpickle": 'from pyspark import cloudpickle\n\nX = cloudpickle.loads(b"")\n',
    "rocksdict": "from rocksdict import Rdict\n\nKIND = Rdict\n",
}


def _reported(source: str, path: str) -> dict[str, list[str]]:
    """What ruff says of this source at this path under the repository's settings: code -> texts."""
    command = "-m ruff check --no-cache --output-format=json --stdin-filename"
    done = subprocess.run(
        [sys.executable, *command.split(), path, "-"],
        cwd=ROOT,
        input=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    found: dict[str, list[str]] = {}
    for item in json.loads(done.stdout):
        found.setdefault(item["code"], []).append(item["message"])
    return found


@pytest.mark.parametrize("banned", NOT_IN_PROTOCOL)
def test_protocol_code_may_not_use(banned: str) -> None:
    messages = _reported(NOT_IN_PROTOCOL[banned], "snapshot/x.py").get("TID251", [])
    assert any(f"`{banned}` is banned" in text for text in messages), messages


@pytest.mark.parametrize("path", PROTOCOL)
def test_the_ban_holds_in(path: str) -> None:
    assert "TID251" in _reported(NOT_IN_PROTOCOL["time.time"], path)


@pytest.mark.parametrize("path", EDGES)
def test_an_edge_may_use_the_real_clock(path: str) -> None:
    assert "TID251" not in _reported(NOT_IN_PROTOCOL["time.time"], path)


@pytest.mark.parametrize("path", ["statebackend/rocks/x.py", "snapshot/storage/x.py", "bench/x.py"])
def test_an_edge_may_not_unpickle(path: str) -> None:
    assert "S301" in _reported(NOT_IN_PROTOCOL["pickle.load"], path)
    assert "S301" in _reported(NOT_IN_PROTOCOL["pickle.loads"], path)
    assert "TID253" in _reported(NOT_IN_PROTOCOL["cloudpickle"], path)
    assert "TID253" in _reported(NOT_IN_PROTOCOL["pyspark.cloudpickle"], path)


def test_what_crosses_to_the_workers_may_be_unpickled() -> None:
    codes = set()
    for banned in ("pickle.loads", "cloudpickle", "pyspark.cloudpickle"):
        codes |= set(
            _reported(NOT_IN_PROTOCOL[banned], "statebackend/runtime/worker/shipped_processor.py")
        )
    assert not codes & {"TID251", "TID253", "S301"}


def test_every_message_says_what_to_do_instead() -> None:
    banned = CONFIG["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    assert all(":" in entry["msg"] or "only" in entry["msg"] for entry in banned.values())


# --- import-linter: what only the whole import graph can tell


def _imports(root: Path) -> str:
    """What import-linter prints for the tree under `root`."""
    program = "from importlinter.cli import lint_imports_command as run; run()"
    done = subprocess.run(
        [sys.executable, "-c", program, "--no-cache"],
        cwd=root,
        env={"PATH": "", "COLUMNS": "200", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def verdict(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The verdict on a small house of the same floors in which each rule is broken once."""
    root = tmp_path_factory.mktemp("house")
    shutil.copy(ROOT / "pyproject.toml", root)
    offenders = {
        "statebackend/schema/upward.py": "import statebackend.rocks.db\n",
        "statebackend/state/store.py": "import rocksdict\n",
        "statebackend/operators/late.py": "def run():\n    import rocksdict\n",
        "snapshot/storage/coded.py": "def read():\n    import cloudpickle\n",
        "snapshot/faced.py": "from statebackend import StateBackend\n",
        "recovery/restore/restorer.py": "import recovery.drill\n",
    }
    sound = {
        "statebackend/rocks/db.py": "import rocksdict\n",
        "statebackend/spark/worker/task.py": (
            "import cloudpickle\nimport recovery.decide.restore_plan\n"
        ),
        "recovery/decide/restore_plan.py": "import snapshot\n",
        "recovery/drill/__init__.py": "import statebackend.spark.worker.task\n",
    }
    for name, text in (offenders | sound).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        for folder in path.relative_to(root).parents:
            if folder != Path():
                (root / folder / "__init__.py").touch()
    task = "statebackend.spark.worker.task"
    face = f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import {task}\n"
    (root / "statebackend/__init__.py").write_text(face, encoding="utf-8")
    return _imports(root)


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("statebackend.schema.upward", "statebackend.rocks.db"),
        ("recovery.restore.restorer", "recovery.drill"),
        ("statebackend.state.store", "rocksdict"),
        ("statebackend.operators.late", "rocksdict"),
        ("snapshot.storage.coded", "cloudpickle"),
        ("snapshot.faced", "statebackend"),
    ],
)
def test_import_linter_reports(verdict: str, importer: str, imported: str) -> None:
    assert f"{importer} -> {imported} (l." in verdict, verdict


@pytest.mark.parametrize(
    "importer", ["statebackend.rocks.db", "statebackend.spark.worker.task", "statebackend"]
)
def test_import_linter_lets_pass(verdict: str, importer: str) -> None:
    assert "Contracts: 0 kept, 4 broken" in verdict, verdict
    assert f"{importer} -> " not in verdict.replace(f".{importer} -> ", ""), verdict


def test_every_module_stands_on_a_floor() -> None:
    contracts = CONFIG["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "floors")
    floors = {name.strip(" ()") for layer in layers for name in layer.split(":")}
    homeless = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).iterdir()):
            module = f"{package}.{path.stem}"
            is_code = path.suffix == ".py" or (path.is_dir() and any(path.rglob("*.py")))
            if is_code and path.stem != "__init__" and not {package, module} & floors:
                homeless.append(module)
    assert not homeless, "add them to [tool.importlinter] in pyproject.toml"
