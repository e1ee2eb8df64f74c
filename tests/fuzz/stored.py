"""What lies in the object store: records, manifests, deltas, file indexes, names."""

from __future__ import annotations

import random
import struct
from itertools import pairwise
from typing import Any, Final

import msgspec
import zstandard
from blake3 import blake3

from snapshot.formats.delta import decode_delta, encode_delta
from snapshot.formats.delta_in_pieces import iter_delta
from snapshot.formats.file_index import FileEntry, FileIndex, decode_index, encode_index
from snapshot.formats.object_names import parse_base_name, parse_data_name
from snapshot.formats.record import (
    FOOTER_BYTES,
    Manifest,
    SliceEntry,
    encode_record,
    parse_record,
    parse_record_name,
    read_manifest,
)
from snapshot.formats.zstd_frame import pack
from snapshot.protocol.lineage import resolve
from snapshot.storage.memory_store import MemoryStore
from tests.fuzz.mutate import damaged_bytes, damaged_text, damaged_value
from tests.fuzz.target import REFUSED, SAME, TAKEN, Target, refused_or
from tests.recovery.driver import Run, new_id

__all__ = ["sealed", "targets"]

_FOOTER: Final = struct.Struct("<8sIQI16sQ8s")  # as the docstring of snapshot.formats.record has it
_LENGTHS: Final = (0, 1, -1, 2**31, 2**40, 2**62, 2**63 - 1)
_BOMB: Final = pack(bytes(300 << 20))  # more than a manifest may be


def _records() -> list[tuple[Manifest, bytes]]:
    """Records as a run writes them, of several sizes, and a claim."""
    run = Run(2, base_every_epochs=2)
    for epoch in range(4):
        run.finish(epoch, changes={b"k%d" % n: bytes(n % 251) for n in range(10 ** (epoch % 3))})
    found = []
    for manifest in run.records:
        bodies = [run.slices[entry.digest] for entry in manifest.slices]
        data = b"".join(encode_record(manifest, bodies))
        found.append((parse_record(data, "r").manifest, data))
    head = run.records[0]
    claim = msgspec.structs.replace(head, kind="claim", slices=[], settings={"a": [1, {"b": None}]})
    found.append((claim, b"".join(encode_record(claim))))
    return found


def _take_record(given: tuple[int, bytes, list[tuple[Manifest, bytes]]]) -> str:
    number, data, whole = given
    manifest, honest = whole[number]

    def read() -> str:
        record = parse_record(data, "log/x")
        assert record.manifest == manifest, "another manifest was believed"
        outcomes = {_slice_of(record, entry, honest) for entry in manifest.slices}
        return REFUSED if REFUSED in outcomes else SAME

    return refused_or(read)


def _slice_of(record: Any, entry: SliceEntry, honest: bytes) -> str:
    def read() -> str:
        start = entry.offset or 0
        assert record.slice(entry) == honest[start : start + entry.size_bytes], "another slice"
        return SAME

    return refused_or(read)


def _take_tail(given: tuple[int, bytes, list[tuple[Manifest, bytes]]]) -> str:
    number, data, whole = given
    store = MemoryStore()
    store.put("log/x", [data])

    def read() -> str:
        assert read_manifest(store, "log/x") == whole[number][0], "another manifest was believed"
        return SAME

    return refused_or(read)


def sealed(packed: bytes, body: bytes = b"", version: int = 2) -> bytes:
    """A record around any bytes for a manifest, with digest and lengths as they must be."""
    digest = blake3(packed).digest(length=16)
    total = len(body) + len(packed) + FOOTER_BYTES
    fields = (b"SBRECORD", version, len(body), len(packed), digest, total, b"DROCERBS")
    return body + packed + _FOOTER.pack(*fields)


def _take_sealed(data: bytes) -> str:
    def read() -> str:
        record = parse_record(data, "log/x")
        for entry in record.manifest.slices:
            if entry.object is None and entry.offset is not None:
                _slice_refused(record, entry)
        refused_or(lambda: _resolved(record.manifest))
        return TAKEN

    return refused_or(read)


def _slice_refused(record: Any, entry: SliceEntry) -> str:
    def read() -> str:
        assert blake3(record.slice(entry)).hexdigest() == entry.digest
        return SAME

    return refused_or(read)


def _resolved(manifest: Manifest) -> str:
    resolve([manifest])
    return TAKEN


def _record_targets() -> list[Target]:
    whole = _records()
    raws = [data for _, data in whole]
    plain = [msgspec.to_builtins(manifest) for manifest, _ in whole]
    bodies = [parse_record(data, "r").body for data in raws]

    def raw(rng: random.Random) -> tuple[int, bytes, list[tuple[Manifest, bytes]]]:
        number = rng.randrange(len(raws))
        return number, damaged_bytes(rng, raws[number], raws), whole

    def resealed(rng: random.Random) -> bytes:
        number = rng.randrange(len(plain))
        pick = rng.random()
        if pick < 0.0005:
            return sealed(_BOMB)
        value = damaged_value(rng, plain[number])
        try:
            text = msgspec.json.encode(value)
        except (ValueError, TypeError):
            text = b"[" * rng.choice((10, 5000)) + b"1e999999"
        if pick < 0.01:
            depth = rng.choice((100, 2000, 100_000))
            text = text[:-1] + b',"settings":{"a":' + b"[" * depth + b"]" * depth + b"}}"
        elif pick < 0.2:
            text = damaged_bytes(rng, text, [text])
        packed = pack(text)
        if pick > 0.9:
            packed = damaged_bytes(rng, packed, [packed])
        return sealed(packed, bytes(bodies[number]), 1 if pick > 0.98 else 2)

    return [
        Target("record", raw, _take_record),
        Target("record, its tail", raw, _take_tail),
        Target("manifest in a record that is sealed", resealed, _take_sealed),
    ]


def _deltas() -> list[bytes]:
    rows = [
        [(b"%05d" % n, None if n % 7 == 3 else b"value %d" % n * (n % 5)) for n in range(count)]
        for count in (1, 3, 50, 700)
    ]
    return [encode_delta([k for k, _ in one], [v for _, v in one]).data for one in rows]


def _rows_are_sound(data: bytes) -> str:
    """Whatever is believed without a digest is a delta all the same."""
    found = decode_delta(data, name="data/x")
    keys = found.keys.to_pylist()
    assert len(keys) == len(found.values), "another number of values"
    assert all(a < b for a, b in pairwise(keys)), "keys do not ascend"
    for value in found.values:
        value.as_py()
    return TAKEN


def _streamed_rows_are_sound(data: bytes) -> str:
    before = b""
    for piece in iter_delta(data, name="data/x"):
        for key in piece.keys.to_pylist():
            assert key > before or not before, "keys do not ascend"
            before = key
        piece.values.to_pylist()
    return TAKEN


def _delta_targets() -> list[Target]:
    whole = _deltas()
    digests = [blake3(data).digest() for data in whole]

    def raw(rng: random.Random) -> tuple[int, bytes]:
        number = rng.randrange(len(whole))
        return number, damaged_bytes(rng, whole[number], whole)

    def alone(rng: random.Random) -> bytes:
        return raw(rng)[1]

    def named(given: tuple[int, bytes]) -> str:
        number, data = given

        def read() -> str:
            decode_delta(data, digest=digests[number], name="data/x")
            assert data == whole[number], "damage went unnoticed"
            return SAME

        return refused_or(read)

    def lengths(rng: random.Random) -> bytes:
        """The Arrow messages' own lengths, which stand at multiples of eight."""
        data = bytearray(whole[rng.randrange(len(whole))])
        for _ in range(rng.randint(1, 3)):
            at = 8 * rng.randrange(len(data) // 8)
            value = rng.choice((*_LENGTHS, len(data), rng.getrandbits(16)))
            data[at : at + 8] = (value % 2**64).to_bytes(8, "little")
        return bytes(data)

    return [
        Target("delta", raw, named),
        Target("delta without a digest", alone, _sound(_rows_are_sound)),
        Target("delta without a digest, streamed", alone, _sound(_streamed_rows_are_sound)),
        Target("delta with other lengths", lengths, _sound(_rows_are_sound)),
    ]


def _sound(read: Any) -> Any:
    return lambda data: refused_or(lambda: read(data))


def _index_target() -> Target:
    files = [
        FileEntry(name=f"{n:06d}.sst", object=f"base/1/g/{n}", size_bytes=n, digest="0" * 64)
        for n in range(6)
    ]
    index = FileIndex(incarnation=new_id(), files=files)
    whole, plain = encode_index(index), msgspec.to_builtins(index)

    def make(rng: random.Random) -> bytes:
        pick = rng.random()
        if pick < 0.0005:
            return zstandard.ZstdCompressor().compress(bytes(100 << 20))
        if pick < 0.4:
            return damaged_bytes(rng, whole, [whole])
        try:
            text = msgspec.json.encode(damaged_value(rng, plain))
        except (ValueError, TypeError):
            text = b'{"a":' * 3000
        return pack(damaged_bytes(rng, text, [text]) if pick > 0.8 else text)

    def take(data: bytes) -> str:
        def read() -> str:
            found = decode_index(data, "base/x")
            for file in found.files:
                assert not set(file.name) & {"/", "\0"}, file.name
                assert file.name[:1] not in ("", "."), file.name
                assert file.size_bytes >= 0, "a file that cannot be"
            return TAKEN

        return refused_or(read)

    return Target("file index of a base", make, take)


def _name_target() -> Target:
    names = ["log/00000000000000000007.ckpt", "data/3/17/0123456789abcdef", "base/3/g0/000012.sst"]

    def take(name: str) -> str:
        found = [parse_record_name(name), parse_data_name(name), parse_base_name(name)]
        return TAKEN if any(one is not None for one in found) else REFUSED

    return Target("object name", lambda rng: damaged_text(rng, rng.choice(names), names), take)


def targets() -> list[Target]:
    """All of them."""
    return [*_record_targets(), *_delta_targets(), _index_target(), _name_target()]
