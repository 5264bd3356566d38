"""Decoders, on recorded answers of real servers (`record.py`), on answers made here, and on damaged ones."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reclaim.data.fetch.prometheus.chunks import crc32c, decode_samples, decode_xor
from reclaim.data.fetch.prometheus.client import TooMuchError
from reclaim.data.fetch.prometheus.protobuf import MalformedError, content, field, fields, read_varint, varint
from reclaim.data.fetch.prometheus.transports import (
    OtherEncodingError,
    chunked_series,
    exported,
    frames,
    remote_read_request,
    samples_of,
    unpack,
)
from reclaim.data.traces.dialect import Matcher, Metric
from reclaim.data.traces.history import RawSeries, joined
from tests.data.fetch.prometheus.record import RECORDED, SECONDS, START_S, series

STALE = struct.unpack("d", struct.pack("Q", 0x7FF0000000000002))[0]


def recorded(parts: list[RawSeries]) -> dict[str, list[tuple[int, float]]]:
    """Return times and values by the label ``series``."""
    whole = joined(parts, START_S * 1000, (START_S + SECONDS) * 1000)
    assert all(one.named["job"] == "made up" for one in whole)
    return {one.named["series"]: list(zip(one.time_ms.tolist(), one.value.tolist(), strict=True)) for one in whole}


def bits(found: dict[str, list[tuple[int, float]]]) -> dict[str, list[tuple[int, bytes]]]:
    return {name: [(time, struct.pack("d", value)) for time, value in rows] for name, rows in found.items()}


EXPECTED = {name: [(t, v + 0.0) for t, v in rows] for name, rows in series().items() if name != "left out"}
"""Without a negative zero, which samples of remote read have not."""


def streamed(size: int = 1 << 20) -> list[RawSeries]:
    content = (RECORDED / "chunks.bin").read_bytes()
    parts = (content[at : at + size] for at in range(0, len(content), size))
    return [one for frame in frames(parts) for one in chunked_series(frame)]


def test_chunks_of_a_real_prometheus_are_the_series_that_it_was_given() -> None:
    assert bits(recorded(streamed())) == bits(EXPECTED)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_stream_may_come_in_parts_of_any_size(size: int) -> None:
    assert bits(recorded(streamed(size))) == bits(EXPECTED)


def test_samples_of_a_real_prometheus_are_the_series_that_it_was_given() -> None:
    found = list(samples_of(unpack((RECORDED / "samples.bin").read_bytes())))
    assert bits(recorded(found)) == bits(EXPECTED)


def test_a_query_of_a_real_prometheus_gives_the_series_that_it_was_given() -> None:
    found = json.loads((RECORDED / "query.json").read_bytes())["data"]["result"]
    rows = {one["metric"]["series"]: [(round(t * 1000), float(v) + 0.0) for t, v in one["values"]] for one in found}
    assert bits(rows) == bits(EXPECTED)


def test_an_export_of_a_real_victoriametrics_gives_the_series_that_it_was_given() -> None:
    lines = (RECORDED / "export.jsonl").read_bytes().splitlines()
    found = recorded([exported(line) for line in lines])
    rounded = ("odd values", 'ünïcode \\ "label"')  # it keeps decimals, not doubles: 17 digits do not survive
    assert bits({k: v for k, v in found.items() if k not in rounded}) == bits(
        {k: v for k, v in EXPECTED.items() if k not in rounded}
    )
    for name in rounded:
        assert [time for time, _ in found[name]] == [time for time, _ in EXPECTED[name]]


def test_an_export_may_have_values_that_json_has_not() -> None:
    line = b'{"metric":{"__name__":"x","le":"+Inf"},"values":[1,null,+Inf,-Inf],"timestamps":[1,2,3,4]}'
    found = exported(line)
    assert found.named == {"le": "+Inf"}
    assert found.value[[0, 2, 3]].tolist() == [1, np.inf, -np.inf]
    assert np.isnan(found.value[1])


def test_the_checksum_is_castagnolis() -> None:
    assert crc32c(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283  # the check value of CRC-32C


def test_a_series_is_cut_to_the_range_and_loses_the_markers_of_its_end() -> None:
    labels = (("a", "b"),)
    parts = [
        RawSeries(labels, np.array([5, 10, 15]), np.array([1.0, 2.0, STALE])),
        RawSeries(labels, np.array([20, 10, 30]), np.array([4.0, 2.0, 5.0])),
    ]
    (one,) = joined(parts, 10, 30)
    assert one.time_ms.tolist() == [10, 20]
    assert one.value.tolist() == [2.0, 4.0]
    assert joined([RawSeries(labels, np.array([5]), np.array([STALE]))], 0, 10) == []


class _Bits:
    """Writes bits, most significant first."""

    def __init__(self) -> None:
        self.text = ""

    def add(self, value: int, width: int) -> None:
        self.text += format(value & (1 << width) - 1, f"0{width}b") if width else ""

    def content(self) -> bytes:
        padded = self.text + "0" * (-len(self.text) % 8)
        return int(padded or "0", 2).to_bytes(len(padded) // 8, "big") if padded else b""


def encode_xor(samples: Sequence[tuple[int, float]]) -> bytes:
    """Return a chunk as Prometheus writes it (tsdb/chunkenc/xor.go), slowly."""
    head = len(samples).to_bytes(2, "big")
    out = _Bits()
    lead = trail = -1
    delta = 0
    for k, (time, value) in enumerate(samples):
        now = struct.unpack(">Q", struct.pack(">d", value))[0]
        if k == 0:
            head += varint((time << 1) ^ (time >> 63)) + struct.pack(">Q", now)
            before, last = now, time
            continue
        step = time - last
        if k == 1:
            head += varint(step)
        else:
            change = step - delta
            for size, width in enumerate((0, 14, 17, 20, 64)):
                if (change == 0) if width == 0 else width == 64 or -(1 << width - 1) + 1 <= change <= 1 << width - 1:
                    out.add((1 << size + 1) - 2 if width != 64 else 15, size + 1 if width != 64 else 4)
                    out.add(change, width)
                    break
        delta, last = step, time
        changed = now ^ before
        before = now
        if not changed:
            out.add(0, 1)
            continue
        out.add(1, 1)
        new_lead = min(64 - changed.bit_length(), 31)
        new_trail = (changed & -changed).bit_length() - 1
        if lead >= 0 and new_lead >= lead and new_trail >= trail:
            out.add(0, 1)
        else:
            lead, trail = new_lead, new_trail
            out.add(1, 1)
            out.add(lead, 5)
            out.add((64 - lead - trail) % 64, 6)
        out.add(changed >> trail, 64 - lead - trail)
    return head + out.content()


_SAMPLES = st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(width=64)), max_size=40)


def test_samples_that_are_left_out_for_being_zero_are_read() -> None:
    """Two bytes each, so that 3,000 bytes are 1,500 samples and fit in what is allocated."""
    time, value = decode_samples(np.frombuffer(field(2, b"") * 1500, np.uint8))
    assert time.tolist() == [0] * 1500
    assert value.tolist() == [0.0] * 1500


@given(_SAMPLES, st.integers(-(1 << 40), 1 << 41))
@example([(0, 1.0), (1 << 13, 1.0), (0, 1.0), (1 << 16, 2.0), (1 << 19, 2.0), (1 << 29, 3.0)], 0)
def test_a_chunk_of_any_samples_is_read_to_the_bit(steps: list[tuple[int, float]], start: int) -> None:
    times = np.cumsum([start, *(step for step, _ in steps)])[1:].tolist()
    samples = list(zip(times, (value for _, value in steps), strict=True))
    chunk = encode_xor(samples)
    time, value = decode_xor(np.frombuffer(chunk, np.uint8))
    assert time.tolist() == times
    assert value.tobytes() == np.array([v for _, v in samples], np.float64).tobytes()
    body = b"".join(field(2, varint(1 << 3 | 1) + struct.pack("<d", v) + field(2, t % (1 << 64))) for t, v in samples)
    time, value = decode_samples(np.frombuffer(body, np.uint8))
    assert time.tolist() == times
    assert value.tobytes() == np.array([v for _, v in samples], np.float64).tobytes()


@given(st.binary(max_size=200))
def test_bytes_that_are_no_chunk_are_an_error_and_nothing_worse(content: bytes) -> None:
    for decode in (decode_xor, decode_samples):
        try:
            time, value = decode(np.frombuffer(content, np.uint8))
        except MalformedError:
            continue
        assert len(time) == len(value)
    for read in (lambda: list(fields(memoryview(content))), lambda: list(frames([content])),
                 lambda: list(samples_of(memoryview(content))), lambda: unpack(content)):  # fmt: skip
        try:
            read()
        except (MalformedError, TooMuchError, UnicodeDecodeError):
            continue


@pytest.mark.parametrize("where", [0, 3, 100, 5000])
def test_a_damaged_or_shortened_stream_is_found(where: int) -> None:
    content = bytearray((RECORDED / "chunks.bin").read_bytes())
    with pytest.raises(MalformedError):
        list(frames([bytes(content[: len(content) - 1 - where])]))
    content[10 + where] ^= 4
    with pytest.raises(MalformedError, match="checksum"):
        list(frames([bytes(content)]))


def test_lengths_are_checked_before_they_are_allocated() -> None:
    with pytest.raises(TooMuchError, match="MiB"):
        unpack(varint(1 << 40) + b"x")
    with pytest.raises(MalformedError, match="a frame of"):
        list(frames([varint(1 << 40) + b"xxxx"]))
    with pytest.raises(MalformedError, match="shorter than its samples"):
        decode_xor(np.frombuffer(b"\xff\xff\x00", np.uint8))


def test_a_chunk_of_another_encoding_asks_for_samples() -> None:
    chunk = field(1, 5) + field(2, 6) + field(3, 4) + field(4, b"\x00\x00")
    frame = field(1, field(1, field(1, "a") + field(2, "b")) + field(2, chunk))
    with pytest.raises(OtherEncodingError, match="encoding 4"):
        list(chunked_series(memoryview(frame)))


def test_a_request_names_the_range_the_matchers_and_what_is_accepted() -> None:
    metric = Metric("cpu", "m", (Matcher("a", "=~", "b|c"), Matcher("d", "!=", "")))
    body = remote_read_request(metric, 1000, 2000, streamed=True)
    size, _ = read_varint(memoryview(body), 0)
    request = dict(fields(memoryview(pa.decompress(body, size, codec="snappy", asbytes=True))))
    assert bytes(content(request[2])) == bytes([1, 0])  # chunks, else samples
    query = [(key, value if isinstance(value, int) else bytes(value)) for key, value in fields(content(request[1]))]
    assert query[:2] == [(1, 1000), (2, 1999)]  # both ends are included
    assert [dict(fields(memoryview(value))).get(1, 0) for key, value in query[2:] if isinstance(value, bytes)] == [
        0, 2, 1,
    ]  # fmt: skip
