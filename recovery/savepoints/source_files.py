"""Which files a query's sources need to go on: of a file source, its log up to an offset."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, Final

from recovery.savepoints.location_files import LocationFiles, text_of
from statebackend.errors import NotRestorableError, UnsupportedFormatError

__all__ = ["NO_OFFSET", "file_source_offset", "files_of_sources"]

NO_OFFSET: Final = "-"
_COMPACT: Final = ".compact"
_VERSION: Final = "v1"
_FILE_LOG: Final = b'v1\n{"path":'


def files_of_sources(location: LocationFiles, batch: int) -> list[str]:
    """The files below `sources/` that a query needs to go on where a batch's plan ends.

    Raises:
        NotRestorableError: the log of a file source is not all there.
        UnsupportedFormatError: the plan is of a form that this release does not know.
    """
    offsets = _offsets(location, batch)
    by_source: dict[str, list[str]] = {}
    for name in location.list("sources"):
        by_source.setdefault(name.split("/")[1], []).append(name)
    wanted = []
    for number, names in sorted(by_source.items()):
        its = _offsets_of(int(number), offsets) if number.isdigit() else set()
        wanted += _of_source(location, f"sources/{number}", names, its)
    return wanted


def _offsets(location: LocationFiles, epoch: int) -> list[str]:
    """Each source's offset at the end of an epoch, as Spark wrote it."""
    lines = text_of(location, f"offsets/{epoch}").split("\n")
    if len(lines) < 2 or lines[0].strip() != _VERSION:
        raise UnsupportedFormatError(
            f"The plan of batch {epoch} in {location.path} is of the form "
            f"{(lines or ['nothing'])[0][:20]!r}; this release reads {_VERSION!r}.",
            todo="Leave spark.sql.streaming.queryEvolution.enableSourceEvolution at false.",
        )
    return [line.strip() for line in lines[2:] if line.strip()]


def _offsets_of(number: int, offsets: Sequence[str]) -> set[str]:
    """The offsets that may be those of a source: one, unless a source is read in two places.

    Such a source has one folder and in each place the same offset. So before a source's place stand
    at least as many offsets as there are sources before it, and no more different ones.
    """
    return {
        offset
        for place, offset in enumerate(offsets)
        if len(set(offsets[:place])) <= number <= place
    }


def _of_source(
    location: LocationFiles, folder: str, names: Sequence[str], offsets: Collection[str]
) -> list[str]:
    """What a source knew: of a file source its log up to an offset; of any other all it keeps.

    Args:
        offsets: one of them is the source's. A log goes along up to the largest: what it has beyond
            its own the source reads next, as Spark does at a restart.
    """
    known = len(offsets) == 1 and NO_OFFSET not in offsets
    if not known and not next(location.chunks(names[0]), b"").startswith(_FILE_LOG):
        return sorted(names)
    ends = [end for one in offsets if (end := file_source_offset(one)) is not None]
    if not ends:
        return [] if NO_OFFSET in offsets else sorted(names)
    newest = max(_log_number(folder, name) for name in names)
    last = max((end for end in ends if end <= newest), default=min(ends))
    return _file_log(location, folder, names, last)


def file_source_offset(offset: str) -> int | None:
    """How far the log of a file source had come, by an offset in a plan; None: it is another's."""
    try:
        said: Any = json.loads(offset)
    except ValueError:
        return None
    if not isinstance(said, dict) or set(said) != {"logOffset"}:
        return None
    last = said["logOffset"]
    return last if type(last) is int else None  # a topic of Kafka's may have that name


def _file_log(location: LocationFiles, folder: str, names: Sequence[str], last: int) -> list[str]:
    """A file source's log up to one of its batches, from the newest compact file on.

    The compact file before it goes along: by the distance of the two, Spark knows which batches
    have compact files. Of one alone it takes that there is one at the least divisor of its number
    plus one that is 10 or more (`spark.sql.streaming.fileSource.log.compactInterval`). That is
    wrong for a log that itself began with one alone: after 19 come 39 and 59, and of 59 alone Spark
    takes that 69 is one.
    """
    entries: dict[int, str] = {}
    compacts = []
    for name in names:
        number = _log_number(folder, name)
        if not 0 <= number <= last:
            continue
        if name.endswith(_COMPACT) or number not in entries:
            entries[number] = name
        if name.endswith(_COMPACT):
            compacts.append(number)
    *before, first = sorted(compacts)[-2:] or [0]
    missing = [n for n in range(first, last + 1) if n not in entries]
    if missing:
        raise NotRestorableError(
            f"The log of a file source in {location.path}/{folder} has no entry {missing[0]}, and "
            f"it is needed up to {last}: which files were read is not known.",
            todo="Let the query finish a batch, and try again.",
        )
    return [entries[n] for n in (*before, *range(first, last + 1))]


def _log_number(folder: str, name: str) -> int:
    """-1: it is no file of a log."""
    number = name.removeprefix(f"{folder}/").removesuffix(_COMPACT)
    return int(number) if number.isdigit() else -1
