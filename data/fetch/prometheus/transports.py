"""Reads raw samples in four ways, which give the same samples to the bit: as chunks, samples, an export, or a query.

A transport reads all series of a metric in a range of time, [start, end) in ms, in any form: ``joined`` brings them
into one form.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reclaim.data.errors import TraceError
from reclaim.data.fetch.prometheus.chunks import XOR, crc32c, decode_samples, decode_xor
from reclaim.data.fetch.prometheus.client import LARGEST_WHOLE, Client, TooMuchError, whole
from reclaim.data.fetch.prometheus.protobuf import MalformedError, content, field, fields, number, read_varint
from reclaim.data.traces.dialect import Metric
from reclaim.data.traces.history import RawSeries

Transport = Callable[[Client, Metric, int, int], list[RawSeries]]

LARGEST_FRAME: Final = 64 << 20
"""Bytes of one frame of a streamed answer; Prometheus makes them of 1 MiB."""
LONGEST_LABEL: Final = 1 << 16
"""Bytes of a label's name or value."""
MOST_HELD: Final = 256 << 20
"""Bytes of one answer, decoded, by ``held``: 16 million samples of few series."""
_SERIES_BYTES: Final = 1024
"""Bytes that the labels and arrays of a series take besides its samples, about."""
_KINDS: Final = {"=": 0, "!=": 1, "=~": 2, "!~": 3}
_SAMPLES, _STREAMED = 0, 1
STREAM_TYPE: Final = "application/x-streamed-protobuf"
HEADERS: Final = {
    "Content-Type": "application/x-protobuf", "Content-Encoding": "snappy",
    "X-Prometheus-Remote-Read-Version": "0.1.0",
}  # fmt: skip
_NAME: Final = "__name__"
_INFINITE: Final = re.compile(rb"([\[,])\+?(-?)Inf(?=[,\]])")
WHOLE: Final = {
    "partial_response": "false", "dedup": "true", "max_source_resolution": "0s",  # Thanos
    "nocache": "1", "deny_partial_response": "1",  # VictoriaMetrics
}  # fmt: skip
"""Parameters that ask a querier over many servers for a complete answer or none, and for raw samples; Prometheus
ignores them."""


class OtherEncodingError(Exception):
    """A chunk is of an encoding other than XOR: samples have to be asked for."""


def remote_read_request(metric: Metric, start_ms: int, end_ms: int, *, streamed: bool) -> bytes:
    """Return the body of a request of remote read, packed."""
    matchers = [(_NAME, 0, metric.name), *((m.label, _KINDS[m.kind], m.value) for m in metric.where)]
    query = field(1, start_ms) + field(2, end_ms - 1)
    for label, kind, value in matchers:
        query += field(3, (field(1, kind) if kind else b"") + field(2, label) + field(3, value))
    accepted = bytes([_STREAMED, _SAMPLES] if streamed else [_SAMPLES])
    return bytes(pa.compress(field(1, query) + field(2, accepted), codec="snappy", asbytes=True))


def read_chunks(client: Client, metric: Metric, start_ms: int, end_ms: int) -> list[RawSeries]:
    """Read by remote read as streamed chunks: the least work for the server.

    Raises
    ------
    OtherEncodingError
        A chunk is of another encoding.
    """
    body = remote_read_request(metric, start_ms, end_ms, streamed=True)
    with client.stream("POST", "/api/v1/read", content=body, headers=HEADERS) as parts:
        if client.content_type.startswith(STREAM_TYPE):
            rows = (row for frame in frames(parts) for row in chunked_series(frame))
        else:
            rows = (row for answer in (whole(parts),) for row in samples_of(unpack(answer)))
        return _decoded(client, rows, start_ms, end_ms)


def read_samples(client: Client, metric: Metric, start_ms: int, end_ms: int) -> list[RawSeries]:
    """Read by remote read as samples."""
    body = remote_read_request(metric, start_ms, end_ms, streamed=False)
    answer = client.post("/api/v1/read", content=body, headers=HEADERS)
    return _decoded(client, (row for packed in (answer,) for row in samples_of(unpack(packed))), start_ms, end_ms)


def read_export(client: Client, metric: Metric, start_ms: int, end_ms: int) -> list[RawSeries]:
    """Read by the export of VictoriaMetrics: a line of JSON per series."""
    form = {"match[]": metric.selector, "start": f"{start_ms / 1000:.3f}", "end": f"{(end_ms - 1) / 1000:.3f}"}
    with client.stream("POST", "/api/v1/export", data=form | {"reduce_mem_usage": "1"}) as parts:
        return _decoded(client, map(exported, _lines(parts)), start_ms, end_ms)


def read_query(client: Client, metric: Metric, start_ms: int, end_ms: int) -> list[RawSeries]:
    """Read by an instant query of a range selector: what every server has."""
    # a range is open or closed at its beginning, by version: one ms more is asked for, and cut by the caller
    query = f"{metric.selector}[{end_ms - start_ms}ms]"
    data = client.json("/api/v1/query", {"query": query, "time": f"{(end_ms - 1) / 1000:.3f}", **WHOLE})
    rows = (_row(s["metric"], *zip(*s["values"], strict=True)) for s in _matrix(data))
    return _decoded(client, rows, start_ms, end_ms)


SAMPLES_AT_ONCE: Final = {"chunks": 6_000_000, "samples": 5_000_000, "export": 6_000_000, "query": 1_500_000}
"""Samples that one request asks for, by plan: 100 MB, three times as much while they are decoded; as JSON 60 MB, which
take 350 MB as objects."""
TRANSPORTS: Final[dict[str, Transport]] = {
    "chunks": read_chunks, "samples": read_samples, "export": read_export, "query": read_query,
}  # fmt: skip
"""Ways of reading, by name, the lightest for the server first."""


def held(row: RawSeries) -> int:
    """Return about how many bytes a series takes in memory."""
    return row.time_ms.nbytes + row.value.nbytes + _SERIES_BYTES


def _decoded(client: Client, rows: Iterable[RawSeries], start_ms: int, end_ms: int) -> list[RawSeries]:
    """Return series as they are decoded, cut to the range: whole chunks come; TooMuchError beyond ``MOST_HELD``."""
    found, total = [], 0
    try:
        for row in rows:
            kept = (row.time_ms >= start_ms) & (row.time_ms < end_ms)
            if kept.any():
                found.append(RawSeries(row.labels, row.time_ms[kept], row.value[kept]))
                total += held(found[-1])
            if total > MOST_HELD:
                raise TooMuchError(f"an answer of more than {MOST_HELD >> 20} MiB of samples")
    except (MalformedError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(
            f"{client.url}: an answer cannot be read ({client.said(str(error))}); run again, or choose --transport"
        ) from error
    return found


def _matrix(data: Any) -> Iterator[Any]:
    if data["resultType"] != "matrix":
        raise ValueError(f"expected a matrix, got {data['resultType']}")
    yield from data["result"]


def _row(metric: dict[str, str], times: Iterable[float], values: Iterable[str]) -> RawSeries:
    time_ms = np.array([round(time * 1000) for time in times], np.int64)
    return RawSeries(_labels(metric), time_ms, np.array([float(value) for value in values], np.float64))


def exported(text: bytes) -> RawSeries:
    """Return the series of a line of an export; values that are no numbers become NaN."""
    if b"Inf" in text:  # infinities are written as in Prometheus' own text, which is not JSON
        text = _INFINITE.sub(rb"\1\2Infinity", text)
    line = json.loads(text)
    values = np.array([math.nan if value is None else float(value) for value in line["values"]], np.float64)
    times = np.array(line["timestamps"], np.int64)
    if len(times) != len(values):
        raise ValueError("times and values differ in number")
    return RawSeries(_labels(line["metric"]), times, values)


def _labels(metric: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((str(name), str(value)) for name, value in metric.items() if name != _NAME and value))


def _lines(parts: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        yield from filter(None, lines)
        if len(rest) > LARGEST_FRAME:
            raise TooMuchError(f"a series of more than {LARGEST_FRAME >> 20} MiB")
    if rest:
        yield rest


def unpack(answer: bytes) -> memoryview:
    """Return an answer unpacked; its length is checked before it is allocated."""
    size, _ = read_varint(memoryview(answer[:10]), 0)
    if size > LARGEST_WHOLE:
        raise TooMuchError(f"an answer of {size >> 20} MiB")
    try:
        return memoryview(pa.decompress(answer, size, codec="snappy", asbytes=True))
    except (OSError, pa.ArrowInvalid) as error:
        raise MalformedError(f"not packed by snappy ({error})") from error


def frames(parts: Iterable[bytes]) -> Iterator[memoryview]:
    """Yield the messages of a streamed answer: each is its length, a checksum and its bytes."""
    waiting = bytearray()
    for part in parts:
        waiting += part
        at = 0
        while (found := _frame(waiting, at)) is not None:
            body, at = found
            yield body
        del waiting[:at]
    if waiting:
        raise MalformedError("the answer breaks off within a frame")


def _frame(waiting: bytearray, at: int) -> tuple[memoryview, int] | None:
    """Return the frame at a place, and the place after it; None while it is not whole."""
    head = bytes(waiting[at : at + 10])
    if not any(byte < 0x80 for byte in head):
        if len(head) == 10:
            raise MalformedError("a frame's length is no number")
        return None
    size, used = read_varint(memoryview(head), 0)
    if size > LARGEST_FRAME:
        raise MalformedError(f"a frame of {size >> 20} MiB")
    begin = at + used + 4
    if begin + size > len(waiting):
        return None
    body = bytes(waiting[begin : begin + size])
    if crc32c(np.frombuffer(body, np.uint8)) != int.from_bytes(waiting[begin - 4 : begin], "big"):
        raise MalformedError("a frame's checksum is wrong")
    return memoryview(body), begin + size


def chunked_series(frame: memoryview) -> Iterator[RawSeries]:
    """Yield the series of a ``ChunkedReadResponse``, chunk by chunk."""
    for key, value in fields(frame):
        if key != 1:
            continue
        labels, chunks = [], []
        for part, inner in fields(content(value)):
            if part == 1:
                labels.append(_label(content(inner)))
            elif part == 2:
                chunks.append(_chunk(content(inner)))
        named = _labels(dict(labels))
        for time, values in chunks:
            yield RawSeries(named, time, values)


def _chunk(chunk: memoryview) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    found = dict(fields(chunk))
    if number(found.get(3, 0)) != XOR:
        raise OtherEncodingError(f"chunks of encoding {number(found.get(3, 0))}")
    return decode_xor(np.frombuffer(content(found.get(4, memoryview(b""))), np.uint8))


def samples_of(answer: memoryview) -> Iterator[RawSeries]:
    """Yield the series of a ``ReadResponse``."""
    for key, result in fields(answer):
        if key != 1:
            continue
        for part, series in fields(content(result)):
            if part == 1:
                body = content(series)
                labels = [_label(content(inner)) for name, inner in fields(body) if name == 1]
                yield RawSeries(_labels(dict(labels)), *decode_samples(np.frombuffer(body, np.uint8)))


def _label(label: memoryview) -> tuple[str, str]:
    if len(label) > 2 * LONGEST_LABEL:
        raise MalformedError(f"a label of {len(label)} bytes")
    found = dict(fields(label))
    name, value = (bytes(content(found.get(key, memoryview(b"")))).decode() for key in (1, 2))
    return name, value
