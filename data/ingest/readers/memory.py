"""Loads and stores bytes and words by their address, in compiled code, without a count of references."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_BYTE, _WORD = ir.IntType(8), ir.IntType(64)


def _load_byte(_typing: Any, _address: Any) -> Any:
    """Return the byte at an address."""

    def load(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _BYTE.as_pointer())
        return builder.zext(builder.load(pointer), _WORD)

    return types.int64(types.int64), load


def _load_word(_typing: Any, _address: Any) -> Any:
    """Return the 8 bytes from an address on as one number, the first byte lowest."""

    def load(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _WORD.as_pointer())
        return builder.load(pointer, align=1)

    return types.uint64(types.int64), load


def _store_single(_typing: Any, _address: Any, _value: Any) -> Any:
    """Store a single float at an address."""

    def store(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.FloatType().as_pointer())
        builder.store(arguments[1], pointer, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), store


def _store_word(_typing: Any, _address: Any, _value: Any) -> Any:
    """Store a number in the 8 bytes from an address on, the lowest byte first."""

    def store(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _WORD.as_pointer())
        builder.store(arguments[1], pointer, align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint64), store


def _length(_typing: Any, _value: Any) -> Any:
    """Return the number of bytes of a number without its leading zeros, 0 to 8."""

    def count(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        zeros = builder.ctlz(arguments[0], ir.IntType(1)(0))
        return builder.sub(_WORD(8), builder.lshr(zeros, _WORD(3)))

    return types.int64(types.uint64), count


byte_at: Any = intrinsic(_load_byte)
word_at: Any = intrinsic(_load_word)
put_single: Any = intrinsic(_store_single)
put_word: Any = intrinsic(_store_word)
length_of: Any = intrinsic(_length)
