"""A Ceph object gateway on loopback: one monitor, one disk (a file), one radosgw.

From Debian's packages radosgw, ceph-mon, ceph-osd and ceph-common. Its data are gone with it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.servers import free_port

__all__ = ["Ceph", "start_ceph"]

PROGRAMS = ("radosgw", "radosgw-admin", "ceph", "ceph-mon", "ceph-osd", "monmaptool")
START_LIMIT_S = 120.0

CONFIGURATION = """\
[global]
fsid = {fsid}
mon host = {mon}
public network = 127.0.0.0/8
cluster network = 127.0.0.0/8
auth cluster required = none
auth service required = none
auth client required = none
# Where authentication is off, clients otherwise hang for 300 s.
ms mon client mode = crc secure
run dir = {folder}
admin socket = {folder}/$name.asok
pid file = {folder}/$name.pid
log file = {folder}/$name.log
mon data = {folder}/mon
osd data = {folder}/osd
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 2000
mon data avail crit = 1
osd memory target = 939524096
bluestore block size = 4294967296
bluestore fsck on mount = false
rgw enable usage log = false
rgw thread pool size = 32
"""


class Ceph:
    """The running processes, and the gateway's URL."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"http://127.0.0.1:{free_port()}"
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, access_key: str, secret_key: str) -> None:
        """Everything, up to a gateway that answers and knows one user."""
        fsid = str(uuid.uuid4())
        mon = f"[v2:127.0.0.1:{free_port()}/0,v1:127.0.0.1:{free_port()}/0]"
        configuration = CONFIGURATION.format(folder=self.folder, fsid=fsid, mon=mon)
        (self.folder / "ceph.conf").write_text(configuration)
        for name in ("mon", "osd"):
            (self.folder / name).mkdir()
        monmap = str(self.folder / "monmap")
        self._run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", mon, monmap)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap)
        self._start("ceph-mon", "-i", "a", "-f")
        disk = str(uuid.uuid4())
        self._run("ceph", "osd", "new", disk, limit_s=60)
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk, limit_s=60)
        self._start("ceph-osd", "-i", "0", "-f")
        frontend = f"beast endpoint={self.url.removeprefix('http://')} tcp_nodelay=1"
        self._start("radosgw", "-n", "client.rgw", "-f", "--rgw-frontends", frontend)
        self._wait(self._answers)
        user = ("--uid=tests", "--display-name=tests", f"--access-key={access_key}")
        self._run("radosgw-admin", "user", "create", *user, f"--secret-key={secret_key}")

    def stop(self) -> None:
        """End the processes, the gateway first."""
        for process in reversed(self._processes):
            process.send_signal(signal.SIGKILL)
            process.wait(30)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _command(self, program: str, *words: str) -> list[str]:
        given = [] if program == "monmaptool" else ["-c", str(self.folder / "ceph.conf")]
        return [program, *given, *words]

    def _run(self, program: str, *words: str, limit_s: float = 60) -> None:
        done = subprocess.run(
            self._command(program, *words),
            cwd=self.folder,
            capture_output=True,
            timeout=limit_s,
            check=False,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{program} {words[0]}: {done.stderr[-2000:]}")

    def _start(self, program: str, *words: str) -> None:
        with (self.folder / f"{program}.out").open("wb") as output:
            self._processes.append(
                subprocess.Popen(
                    self._command(program, *words),
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url, timeout=5):
                return True
        except urllib.error.HTTPError as error:
            error.close()
            return True
        except OSError:
            return False

    def _wait(self, ready: Callable[[], bool]) -> None:
        until = time.monotonic() + START_LIMIT_S
        while time.monotonic() < until:
            if ready():
                return
            if any(process.poll() is not None for process in self._processes):
                break
            time.sleep(0.1)
        told = "".join(
            f"\n{path.name}: {path.read_text(errors='replace')[-1000:]}"
            for path in self.folder.glob("*.out")
        )
        raise RuntimeError(f"Ceph did not start:{told}")


def start_ceph(folder: Path, access_key: str, secret_key: str) -> Ceph:
    """A gateway that knows one user; without the packages the test is skipped.

    `tox -e ceph` sets STATEBACKEND_CEPH, and then it fails.

    `folder` must have a short path: Ceph puts sockets there.
    """
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        reason = f"Ceph is not installed ({', '.join(missing)})."
        if os.environ.get("STATEBACKEND_CEPH"):
            pytest.fail(reason)
        pytest.skip(reason)
    ceph = Ceph(folder)
    try:
        ceph.start(access_key, secret_key)
    except BaseException:
        ceph.stop()
        raise
    return ceph
