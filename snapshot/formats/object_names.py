"""Where things lie in a job's folder: the names of its objects, and what can be read off them.

    log/<sequence, 20 digits>.ckpt                        records (see snapshot.formats.record)
    data/<generation, 10 digits>/<epoch, 20 digits>/<id>  deltas and bases too large for a record
    base/<generation, 10 digits>/<grant>/<file>           files of bases that were uploaded apart
    probe/<id>                                            gone at once

Generation and epoch (or grant) stand in the name so that what nothing refers to can be told from
what may still be referred to: nobody commits anything of an earlier generation any more, and nobody
acks an earlier epoch. No clock is needed for that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

__all__ = [
    "BASE_PREFIX",
    "DATA_PREFIX",
    "BaseName",
    "DataName",
    "base_file_name",
    "data_name",
    "parse_base_name",
    "parse_data_name",
]

DATA_PREFIX: Final = "data/"
BASE_PREFIX: Final = "base/"

_DATA: Final = re.compile(r"data/([0-9]{10})/([0-9]{20})/([^/]+)")
# A file of a store in parts lies in its part's folder.
_BASE: Final = re.compile(r"base/([0-9]{10})/([^/]+)/[^/]+(?:/[^/]+)?")


@dataclass(frozen=True)
class DataName:
    """A slice's own object: the driver's tenure and the epoch it was made in."""

    generation: int
    epoch: int


@dataclass(frozen=True)
class BaseName:
    """A file of a base: the driver's tenure and the grant it was uploaded under."""

    generation: int
    grant: str


def data_name(generation: int, epoch: int, unique: str) -> str:
    """The name of a slice's own object; ``unique`` is never given twice."""
    return f"{DATA_PREFIX}{generation:010d}/{epoch:020d}/{unique}"


def base_file_name(generation: int, grant: str, file: str) -> str:
    """The name of one file of a base; a grant is used by one upload only."""
    return f"{BASE_PREFIX}{generation:010d}/{grant}/{file}"


def parse_data_name(name: str) -> DataName | None:
    """What a name under ``data/`` says; None for one of another form."""
    match = _DATA.fullmatch(name)
    return DataName(int(match[1]), int(match[2])) if match else None


def parse_base_name(name: str) -> BaseName | None:
    """What a name under ``base/`` says; None for one of another form."""
    match = _BASE.fullmatch(name)
    return BaseName(int(match[1]), match[2]) if match else None
