"""The delta format: round trips, and what damaged bytes come to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from snapshot.formats import delta as delta_module
from snapshot.formats.delta import Delta, DeltaRows, decode_delta, encode_delta
from snapshot.formats.lineage_digest import DIGEST_BYTES, chain, chain_start
from statebackend.errors import (
    CorruptionError,
    FormatError,
    SettingError,
    UnsupportedFormatError,
)

CHANGES = st.dictionaries(st.binary(max_size=12), st.none() | st.binary(max_size=40), max_size=60)


def encode(changes: dict[bytes, bytes | None], *, level: int = 1) -> Delta:
    keys = sorted(changes)
    return encode_delta(keys, [changes[key] for key in keys], level=level)


def as_dict(rows: DeltaRows) -> dict[bytes, bytes | None]:
    return dict(zip(rows.keys.to_pylist(), rows.values.to_pylist(), strict=True))


def with_metadata(**changes: str) -> bytes:
    """A stream that differs from a delta of one row only in its schema's metadata."""
    metadata = {"statebackend.delta": "1", "statebackend.rows": "1", "range_tombstones": "[]"}
    metadata |= {key.replace("__", "."): value for key, value in changes.items()}
    schema = pa.schema(
        [pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary())],
        metadata={key: value for key, value in metadata.items() if value},
    )
    return stream(schema, [b"k"], [b"v"])


def stream(schema: pa.Schema, keys: list[bytes | None], values: list[object]) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        arrays = [pa.array(keys, schema[0].type), pa.array(values, schema[1].type)]
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    data: bytes = sink.getvalue().to_pybytes()
    return data


@given(CHANGES)
def test_what_is_encoded_is_decoded(changes: dict[bytes, bytes | None]) -> None:
    made = encode(changes)
    assert made.rows == len(changes)
    assert made.digest == blake3(made.data).digest()
    found = decode_delta(made.data, digest=made.digest, name="d")
    assert found.keys.to_pylist() == sorted(changes)
    assert as_dict(found) == changes


@given(CHANGES)
def test_the_same_content_gives_the_same_bytes(changes: dict[bytes, bytes | None]) -> None:
    assert encode(changes) == encode(dict(reversed(changes.items())))


def test_rows_beyond_one_batch_keep_their_bytes_and_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delta_module, "BATCH_ROWS", 8)
    changes = {b"%05d" % i: None if i % 3 else b"v%d" % i for i in range(101)}
    made = encode(changes)
    with pa.ipc.open_stream(made.data) as reader:
        assert [batch.num_rows for batch in reader] == [8] * 12 + [5]
    assert as_dict(decode_delta(made.data, digest=made.digest)) == changes
    assert encode(changes) == made


def test_a_batch_holds_at_most_65536_rows() -> None:
    made = encode({i.to_bytes(4, "big"): b"" for i in range(65_537)})
    with pa.ipc.open_stream(made.data) as reader:
        assert [batch.num_rows for batch in reader] == [65_536, 1]


def test_any_arrow_tool_reads_a_delta() -> None:
    made = encode({b"a": b"1", b"b": None}, level=9)
    with pa.ipc.open_stream(made.data) as reader:
        table = reader.read_all()
    assert table.to_pydict() == {"key": [b"a", b"b"], "value": [b"1", None]}
    assert table.schema.metadata == {
        b"statebackend.delta": b"1",
        b"statebackend.rows": b"2",
        b"range_tombstones": b"[]",
    }
    assert not table.schema.field("key").nullable


@pytest.mark.parametrize(
    "keys",
    [[b"a", b"a"], [b"b", b"a"], [b"\x80", b"\x7f"], [b"aa", b"a"], [None, b"a"]],
)
def test_keys_that_do_not_ascend_are_refused_on_both_sides(keys: list[bytes]) -> None:
    with pytest.raises(SettingError, match="ascending"):
        encode_delta(keys, [b"1", b"2"])
    schema = pa.schema(
        [pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary())],
        metadata={"statebackend.delta": "1", "statebackend.rows": "2", "range_tombstones": "[]"},
    )
    with pytest.raises(CorruptionError, match=r"ascending|null key"):
        decode_delta(stream(schema, list(keys), [b"1", b"2"]), name="data/7")


def test_keys_ascend_as_unsigned_bytes() -> None:
    keys = [b"", b"\x00", b"\x00\x00", b"\x7f", b"\x7f\xff", b"\x80", b"\xff", b"\xff\x00"]
    assert decode_delta(encode_delta(keys, keys).data).keys.to_pylist() == keys


def test_a_missing_value_is_refused() -> None:
    with pytest.raises(SettingError, match="1 keys but 0"):
        encode_delta([b"a"], [])


def test_another_digest_is_refused_with_name_expected_and_found() -> None:
    made, other = encode({b"a": b"1"}), encode({b"a": b"2"})
    with pytest.raises(CorruptionError) as caught:
        decode_delta(made.data, digest=other.digest, name="data/7")
    for part in ("data/7", made.digest.hex(), other.digest.hex()):
        assert part in caught.value.what


def test_every_prefix_is_refused_or_holds_the_same_rows() -> None:
    changes = {b"key%d" % i: b"value%d" % i for i in range(20)}
    made = encode(changes)
    for length in range(len(made.data)):
        with pytest.raises(CorruptionError):
            decode_delta(made.data[:length], digest=made.digest)
        try:  # without a digest: only the end-of-stream marker may be missing
            assert as_dict(decode_delta(made.data[:length])) == changes
        except FormatError:
            continue


def test_a_stream_cut_between_two_batches_is_refused_even_without_a_digest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delta_module, "BATCH_ROWS", 2)
    made = encode({b"%d" % i: b"v" for i in range(6)})
    reasons = set()
    for length in range(len(made.data) - 8):
        with pytest.raises(CorruptionError) as caught:
            decode_delta(made.data[:length])
        reasons.add("rows and says" in caught.value.what)
    assert reasons == {True, False}


def test_every_single_bit_flip_is_refused() -> None:
    made = encode({b"key%d" % i: b"value%d" % i for i in range(5)} | {b"z": None})
    for position in range(len(made.data) * 8):
        flipped = bytearray(made.data)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(CorruptionError, match="digest"):
            decode_delta(bytes(flipped), digest=made.digest)


def test_a_bit_flip_without_a_digest_never_raises_anything_but_a_format_error() -> None:
    made = encode({b"key%d" % i: b"value%d" % i for i in range(5)} | {b"z": None})
    for position in range(len(made.data) * 8):
        flipped = bytearray(made.data)
        flipped[position // 8] ^= 1 << position % 8
        try:
            decode_delta(bytes(flipped))
        except FormatError:
            continue


@given(st.binary(max_size=300))
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptionError):
        decode_delta(data, name="data/7")


def test_a_later_version_is_refused_as_such() -> None:
    with pytest.raises(UnsupportedFormatError, match="data/7"):
        decode_delta(with_metadata(statebackend__delta="2"), name="data/7")


def test_range_tombstones_are_refused_until_they_are_known() -> None:
    with pytest.raises(UnsupportedFormatError, match="1 range tombstones"):
        decode_delta(with_metadata(range_tombstones='[["a", "b"]]'))


@pytest.mark.parametrize(
    "changes",
    [
        {"statebackend__delta": ""},
        {"statebackend__rows": ""},
        {"statebackend__rows": "2"},
        {"range_tombstones": ""},
        {"range_tombstones": "{}"},
        {"range_tombstones": "["},
    ],
)
def test_metadata_that_is_missing_or_wrong_is_refused(changes: dict[str, str]) -> None:
    decode_delta(with_metadata())
    with pytest.raises(CorruptionError):
        decode_delta(with_metadata(**changes))


@pytest.mark.parametrize(
    "fields",
    [
        [pa.field("key", pa.binary()), pa.field("value", pa.binary())],
        [pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.large_binary())],
        [pa.field("key", pa.binary(), nullable=False), pa.field("v", pa.binary())],
    ],
)
def test_other_columns_are_refused(fields: list[pa.Field]) -> None:
    metadata = {"statebackend.delta": "1", "statebackend.rows": "1", "range_tombstones": "[]"}
    with pytest.raises(CorruptionError, match="columns"):
        decode_delta(stream(pa.schema(fields, metadata=metadata), [b"k"], [b"v"]))


def test_a_column_over_its_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_module, "COLUMN_LIMIT_BYTES", 10)
    encode({b"k": b"x" * 10})
    with pytest.raises(SettingError, match="11 bytes"):
        encode({b"k": b"x" * 11})


def test_encoding_and_decoding_do_not_import_pandas() -> None:
    code = (
        "import sys; from snapshot.formats.delta import decode_delta, encode_delta;"
        "decode_delta(encode_delta([b'a', b'b'], [b'1', None]).data);"
        "assert 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


# --- lineage -------------------------------------------------------------------------------------


def test_lineages_of_different_subtasks_start_differently() -> None:
    starts = {
        chain_start(job, operator, groups)
        for job in ("a", "ab", "")
        for operator in ("b", "", "ab")
        for groups in ((0, 1), (1, 0), (0, 256), (256, 0))
    }
    assert len(starts) == 36
    assert {len(start) for start in starts} == {DIGEST_BYTES}


def test_a_lineage_depends_on_every_delta_and_on_their_order() -> None:
    start = chain_start("job", "op", (0, 127))
    one, two = blake3(b"1").digest(), blake3(b"2").digest()
    ends = [
        start,
        chain(start, one),
        chain(start, two),
        chain(chain(start, one), two),
        chain(chain(start, two), one),
    ]
    assert len(set(ends)) == 5
    assert chain(start, one) != blake3(start + one).digest()  # a domain of its own


def test_the_lineage_is_pinned_for_ever() -> None:
    start = chain_start("job", "op", (0, 127))
    assert start.hex() == "1f30f156ba20bd5b20ce2a2f95ec21b0766e75a5be085d0f9d303e5dfbf6012e"
    assert (
        chain(start, bytes(32)).hex()
        == "4a73e7935495b3689217702e5e740850e9c965adebe4f08afac593c050a6cb95"
    )


def test_a_lineage_refuses_what_is_no_digest() -> None:
    with pytest.raises(SettingError, match="32 bytes"):
        chain(b"short", bytes(32))
    with pytest.raises(SettingError, match="32 bytes"):
        chain(bytes(32), b"")
