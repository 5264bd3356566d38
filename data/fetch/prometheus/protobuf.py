"""Reads and writes the five protobuf messages of remote read, field by field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

VARINT: Final = 0
"""Wire type of a number."""
BYTES: Final = 2
"""Wire type of text, bytes and messages."""
_FIXED: Final = {1: 8, 5: 4}
"""Wire type of a number of fixed length → its bytes."""


class MalformedError(Exception):
    """The bytes do not follow the format."""


def varint(number: int) -> bytes:
    """Return a number of at least 0 as a varint."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def field(number: int, value: int | bytes | str) -> bytes:
    """Return a field: a number of at least 0, bytes, text, or a message's bytes."""
    if isinstance(value, int):
        return varint(number << 3 | VARINT) + varint(value)
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | BYTES) + varint(len(content)) + content


def read_varint(buffer: memoryview, at: int) -> tuple[int, int]:
    """Return the varint at a place, and the place after it."""
    value = shift = 0
    while at < len(buffer) and shift < 64:
        byte = buffer[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise MalformedError("a number is cut short")


def fields(buffer: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield number and content of each field of a message; MalformedError where it breaks off."""
    at = 0
    while at < len(buffer):
        tag, at = read_varint(buffer, at)
        wire = tag & 7
        if wire == VARINT:
            value, at = read_varint(buffer, at)
            yield tag >> 3, value
            continue
        if wire == BYTES:
            length, at = read_varint(buffer, at)
        elif wire in _FIXED:
            length = _FIXED[wire]
        else:
            raise MalformedError(f"unknown wire type {wire}")
        if at + length > len(buffer):
            raise MalformedError("a field is cut short")
        yield tag >> 3, buffer[at : at + length]
        at += length


def content(value: int | memoryview) -> memoryview:
    """Return a field's bytes; MalformedError for a number."""
    if isinstance(value, int):
        raise MalformedError("expected bytes, got a number")
    return value


def number(value: int | memoryview) -> int:
    """Return a field's number, signed; MalformedError for bytes."""
    if not isinstance(value, int):
        raise MalformedError("expected a number, got bytes")
    return value - (1 << 64) if value >= 1 << 63 else value
