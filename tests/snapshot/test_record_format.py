"""The record format: round trips, and what damaged bytes come to."""

from __future__ import annotations

import math
import string
import struct

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from snapshot.formats.record import (
    FOOTER_BYTES,
    Manifest,
    SliceEntry,
    encode_record,
    parse_record,
    parse_record_name,
    read_manifest,
    record_name,
)
from snapshot.formats.zstd_frame import pack, unpack
from snapshot.storage import CountingStore, MemoryStore
from statebackend.errors import (
    CorruptionError,
    FormatError,
    SettingError,
    UnsupportedFormatError,
)

INTEGERS = st.integers(0, 2**53)
# Printable, as `str.isprintable` has it.
TEXTS = st.text(st.characters(exclude_categories="CZ", include_characters=" "), max_size=10)


def entry_for(body: bytes, **fields: object) -> SliceEntry:
    defaults: dict[str, object] = {
        "operator": "count",
        "subtask": 0,
        "kind": "delta",
        "epoch": 7,
        "key_group_start": 0,
        "key_group_end": 127,
        "attempt": 0,
        "rows": 1,
        "size_bytes": len(body),
        "digest": blake3(body).hexdigest(),
        "chain": "00" * 32,
    }
    return SliceEntry(**(defaults | fields))  # type: ignore[arg-type]


def manifest_for(bodies: list[bytes], **fields: object) -> Manifest:
    defaults: dict[str, object] = {
        "kind": "checkpoint",
        "job": "clicks",
        "job_id": "j1",
        "generation": 1,
        "sequence": 3,
        "writer": "w",
        "write_id": "id",
        "oldest_needed": 1,
        "slices": [entry_for(body, subtask=i) for i, body in enumerate(bodies)],
    }
    return Manifest(**(defaults | fields))  # type: ignore[arg-type]


def small_record() -> tuple[Manifest, list[bytes], bytes]:
    bodies = [b"first slice", b"", b"third"]
    manifest = manifest_for(bodies, schemas={"s": "k INT"}, settings={"a": [1, None, "x"]})
    data = b"".join(encode_record(manifest, bodies))
    return parse_record(data, "log/x").manifest, bodies, data


@given(
    st.lists(st.none() | st.binary(max_size=50), max_size=6),
    st.fixed_dictionaries(
        {
            "query_id": TEXTS,
            "run": TEXTS,
            "operator": TEXTS,
            "epoch": st.integers(-1, 2**53),
            "stamp_ms": INTEGERS,
            "watermark_ms": st.none() | st.integers(-(2**63), 2**63 - 1),
            "parallelism": INTEGERS,
            "schemas": st.dictionaries(TEXTS, TEXTS, max_size=3),
            "settings": st.dictionaries(TEXTS, st.none() | st.booleans() | INTEGERS | TEXTS),
        }
    ),
    st.dictionaries(TEXTS, st.floats(allow_nan=False, allow_infinity=False), max_size=3),
)
def test_what_is_encoded_is_parsed(
    bodies: list[bytes | None], fields: dict[str, object], timings_ms: dict[str, float]
) -> None:
    slices = [
        entry_for(
            body or b"",
            subtask=subtask,
            object=f"data/{subtask}" if body is None else None,
            timings_ms=timings_ms,
        )
        for subtask, body in enumerate(bodies)
    ]
    manifest = manifest_for([], slices=slices, **fields)
    data = b"".join(encode_record(manifest, bodies))
    record = parse_record(data, "log/3")
    for entry, body in zip(record.manifest.slices, bodies, strict=True):
        if body is None:
            assert entry.offset is None
            with pytest.raises(SettingError, match=f"data/{entry.subtask}"):
                record.slice(entry)
        else:
            assert record.slice(entry) == body
    without_offsets = [msgspec.structs.replace(e, offset=None) for e in record.manifest.slices]
    assert msgspec.structs.replace(record.manifest, slices=without_offsets) == manifest
    store = MemoryStore()
    store.put("log/3", [data])
    assert read_manifest(store, "log/3") == record.manifest


def incompressible(size: int) -> str:
    """Text of ``size`` characters that packs to about three quarters of that, no less."""
    alphabet = string.ascii_letters + string.digits + "+-"
    stream = blake3(b"seed").digest(length=size)
    return "".join(alphabet[byte % 64] for byte in stream)


@pytest.mark.parametrize(("schema_bytes", "requests"), [(10, 1), (64_000, 1), (90_000, 2)])
def test_a_manifest_costs_one_request_unless_it_is_large(schema_bytes: int, requests: int) -> None:
    body = bytes(200_000)
    manifest = manifest_for([body], schemas={"s": incompressible(schema_bytes)})
    store = CountingStore(MemoryStore())
    store.put("log/3", encode_record(manifest, [body]))
    found = read_manifest(store, "log/3")
    assert found.schemas == manifest.schemas
    counts = store.counts
    assert counts["get_tail"].requests == 1
    assert counts["get_tail"].size_bytes == 65_536
    assert ("get_range" in counts) == (requests == 2)


def test_fields_of_a_later_release_are_ignored() -> None:
    manifest, _, data = small_record()
    footer = struct.unpack("<8sIQI16sQ8s", data[-FOOTER_BYTES:])
    text = unpack(data[footer[2] : footer[2] + footer[3]], 1 << 20)
    longer = pack(text[:-1] + b',"new_field":[1,2]}')
    offset = footer[2]
    total_bytes = offset + len(longer) + FOOTER_BYTES
    digest = blake3(longer).digest()[:16]
    packed = struct.pack(
        "<8sIQI16sQ8s", b"SBRECORD", 3, offset, len(longer), digest, total_bytes, b"DROCERBS"
    )
    assert parse_record(data[:offset] + longer + packed, "log/3").manifest == manifest


def test_version_1_with_its_manifest_unpacked_is_still_read() -> None:
    manifest, bodies, data = small_record()
    offset, length = struct.unpack("<8sIQI16sQ8s", data[-FOOTER_BYTES:])[2:4]
    text = unpack(data[offset : offset + length], 1 << 20).replace(b'"format":3', b'"format":1')
    footer = struct.pack(
        "<8sIQI16sQ8s",
        *(b"SBRECORD", 1, offset, len(text), blake3(text).digest()[:16]),
        *(offset + len(text) + FOOTER_BYTES, b"DROCERBS"),
    )
    record = parse_record(data[:offset] + text + footer, "log/3")
    assert msgspec.structs.replace(record.manifest, format=3) == manifest
    assert [record.slice(entry) for entry in record.manifest.slices] == bodies


def test_a_manifest_that_unpacks_to_more_than_the_limit_is_refused() -> None:
    _, _, data = small_record()
    offset = struct.unpack("<8sIQI16sQ8s", data[-FOOTER_BYTES:])[2]
    bomb = bytearray(pack(b"[]"))
    bomb[4:6] = b"\xa0\xff\xff\xff\x7f\x00"[:2]  # a frame header that says gigabytes
    for text in (bytes(bomb), pack(b" " * (300 << 20))):
        footer = struct.pack(
            "<8sIQI16sQ8s",
            *(b"SBRECORD", 2, offset, len(text), blake3(text).digest()[:16]),
            *(offset + len(text) + FOOTER_BYTES, b"DROCERBS"),
        )
        with pytest.raises(CorruptionError):
            parse_record(data[:offset] + text + footer, "log/3")


def outcome(data: bytes, manifest: Manifest, bodies: list[bytes]) -> str:
    """Reads everything both ways; anything that comes back must be right."""
    store = MemoryStore()
    store.put("log/x", [data])
    try:
        found = read_manifest(store, "log/x")
    except FormatError:
        with pytest.raises(FormatError, match="log/x"):
            parse_record(data, "log/x")
        return "refused"
    assert found == manifest
    record = parse_record(data, "log/x")
    assert record.manifest == manifest
    refused = 0
    for entry, body in zip(record.manifest.slices, bodies, strict=True):
        try:
            read = record.slice(entry)
        except CorruptionError:
            refused += 1
        else:
            assert read == body
    return f"{refused} slices refused"


def test_every_prefix_of_a_record_is_refused() -> None:
    manifest, bodies, data = small_record()
    for length in range(len(data)):
        assert outcome(data[:length], manifest, bodies) == "refused"
    assert outcome(data, manifest, bodies) == "0 slices refused"


def test_a_record_with_bytes_before_or_behind_it_is_refused() -> None:
    manifest, bodies, data = small_record()
    for other in (b"x" + data, data + b"x", data + data, data[1:]):
        assert outcome(other, manifest, bodies) == "refused"


def test_every_single_bit_flip_is_refused() -> None:
    manifest, bodies, data = small_record()
    body_bytes = sum(map(len, bodies))
    for position in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        expected = "1 slices refused" if position // 8 < body_bytes else "refused"
        assert outcome(bytes(flipped), manifest, bodies) == expected


@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptionError, match="log/x"):
        parse_record(data, "log/x")


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
def test_lengths_in_a_footer_are_never_believed(offset: int, length: int, total: int) -> None:
    manifest, bodies, data = small_record()
    footer = struct.pack(
        "<8sIQI16sQ8s", b"SBRECORD", 1, offset, length, bytes(16), total, b"DROCERBS"
    )
    forged = data[:-FOOTER_BYTES] + footer
    assert outcome(forged, manifest, bodies) == "refused"
    fitting = struct.pack(
        "<8sIQI16sQ8s", b"SBRECORD", 1, offset, length, bytes(16), len(data), b"DROCERBS"
    )
    assert outcome(data[:-FOOTER_BYTES] + fitting, manifest, bodies) == "refused"


def test_a_slice_outside_the_body_is_refused() -> None:
    _, _, data = small_record()
    record = parse_record(data, "log/x")
    for offset, size_bytes in ((-1, 5), (0, 10_000), (16, 1), (0, -1), (10**30, 1)):
        entry = msgspec.structs.replace(
            record.manifest.slices[0], offset=offset, size_bytes=size_bytes
        )
        with pytest.raises(CorruptionError, match="would be bytes"):
            record.slice(entry)


def test_a_later_format_is_refused_as_such() -> None:
    _, _, data = small_record()
    later = bytearray(data)
    struct.pack_into("<I", later, len(data) - FOOTER_BYTES + 8, 4)
    with pytest.raises(UnsupportedFormatError, match=r"log/x.* version 4"):
        parse_record(bytes(later), "log/x")


def test_a_format_that_never_was_is_damage() -> None:
    _, _, data = small_record()
    other = bytearray(data)
    struct.pack_into("<I", other, len(data) - FOOTER_BYTES + 8, 0)
    with pytest.raises(CorruptionError, match=r"log/x.* no format version 0"):
        parse_record(bytes(other), "log/x")


def test_a_record_that_could_not_be_read_back_is_not_written() -> None:
    body = b"x"
    nan = entry_for(body, timings_ms={"upload": math.nan})
    with pytest.raises(SettingError, match=r"read back|JSON"):
        encode_record(manifest_for([], slices=[nan]), [body])
    for settings in ({"a": (1, 2)}, {"a": math.nan}, {"a": object()}, {"a": b"bytes"}):
        with pytest.raises(SettingError):
            encode_record(manifest_for([], settings=settings))
    with pytest.raises(SettingError):
        encode_record(manifest_for([], run="\ud800"))
    for fields in (
        {"format": 1},
        {"format": 4},
        {"oldest_needed": 4},
        {"oldest_needed": -1},
        {"kind": "other"},
    ):
        with pytest.raises(SettingError):
            encode_record(manifest_for([], **fields))


def test_bodies_and_slices_must_match() -> None:
    body = b"body"
    with pytest.raises(SettingError, match="1 slices was given 0"):
        encode_record(manifest_for([body]), [])
    with pytest.raises(SettingError, match="either"):
        encode_record(manifest_for([body]), [None])
    own = manifest_for([], slices=[entry_for(body, object="data/1")])
    with pytest.raises(SettingError, match="either"):
        encode_record(own, [body])
    for other in (b"bodY", b"bod"):
        with pytest.raises(CorruptionError, match=r"log/0+3"):
            encode_record(manifest_for([body]), [other])


def test_names_sort_as_their_sequences_do() -> None:
    sequences = [0, 9, 10, 99, 100, 10**19, 10**20 - 1]
    names = [record_name(sequence) for sequence in sequences]
    assert names == sorted(names)
    assert [parse_record_name(name) for name in names] == sequences
    assert names[1] == "log/00000000000000000009.ckpt"
    for sequence in (-1, 10**20):
        with pytest.raises(SettingError):
            record_name(sequence)


@pytest.mark.parametrize(
    "name",
    [
        *("", "log/", "log/1.ckpt", f"data/{0:020d}.ckpt", f"log/{0:021d}.ckpt"),
        *(f"log/{0:020d}.ckpt.tmp", f"log/{0:020d}.ckpt\n", f"log/{'٣' * 20}.ckpt"),
    ],
)
def test_a_name_that_is_no_record_has_no_sequence(name: str) -> None:
    assert parse_record_name(name) is None
