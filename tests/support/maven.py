"""Jars that are published on Maven Central, fetched once.

They go into the folder that the environment variable STATEBACKEND_JARS names, or ``.tox/jars``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

__all__ = ["jars_folder", "jars_of"]

FETCH_LIMIT_S: Final = 900.0
_ROOT: Final = Path(__file__).parents[2]
_POM: Final = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>local</groupId><artifactId>jars</artifactId><version>1</version>
  <packaging>pom</packaging>
  <dependencies><dependency>
    <groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version>
  </dependency></dependencies>
</project>
"""


def jars_folder() -> Path:
    """Where jars are kept."""
    return Path(os.environ.get("STATEBACKEND_JARS") or _ROOT / ".tox" / "jars")


def jars_of(artifact: str) -> list[Path]:
    """The jars of an artifact and of what it needs; fetched if they are not there."""
    folder = jars_folder()
    group, name, version = artifact.split(":")
    home = folder / f"{name}-{version}"
    if not home.is_dir():
        draft = folder / f".{home.name}.{os.getpid()}"
        draft.mkdir(parents=True)
        (draft / "pom.xml").write_text(_POM.format(group, name, version))
        words = ["dependency:copy-dependencies", "-DincludeScope=runtime"]
        done = subprocess.run(
            ["mvn", "-q", "-B", *words, f"-DoutputDirectory={draft / 'jars'}"],
            cwd=draft,
            capture_output=True,
            text=True,
            timeout=FETCH_LIMIT_S,
            check=False,
        )
        if done.returncode:
            shutil.rmtree(draft)
            raise RuntimeError(f"mvn did not fetch {artifact}: {done.stdout[-2000:]}")
        try:
            (draft / "jars").replace(home)
        except OSError:  # another process was first
            assert home.is_dir()
        shutil.rmtree(draft, ignore_errors=True)
    return sorted(home.glob("*.jar"))
