"""Settings of compiled code, and the record fields by which numba notices that cached code is stale."""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic, overload

LENT: Final[dict[str, Any]] = {"cache": True, "nogil": True, "error_model": "numpy", "_nrt": False}
"""For functions that only borrow their arrays: reference counts, a fifth of the time, are off, so they cannot make
arrays. Division by zero gives infinity or NaN and raises nothing."""


@numba.njit(inline="always")
def straight(x: float, x0: float, y0: float, x1: float, y1: float) -> Any:
    """Return the height at x of the line through two points, of different x0 and x1."""
    return y0 + (x - x0) / (x1 - x0) * (y1 - y0)


def copy_row(source: Any, i: int, target: Any, j: int) -> None:
    """Copy row ``i`` of a named tuple of columns into row ``j`` of another one, or of an array of records.

    Fields of the same name belong together. Columns have shape (n,) or (n, places). Compiled code alone calls it.
    """
    raise NotImplementedError


_GENERATED: Final[Any] = {name: value for name, value in LENT.items() if name != "cache"}


@overload(copy_row, jit_options=_GENERATED, strict=False)  # strictly, generated code would have to be annotated
def _copy_row(source: Any, i: Any, target: Any, j: Any) -> Any:  # noqa: ARG001
    to_record = isinstance(target, types.Array)
    lines = ["record = target[j]"] if to_record else []
    for name, column in zip(source.fields, source.types, strict=True):
        place = f"record.{name}" if to_record else f"target.{name}[j]"
        if column.ndim == 1:
            lines.append(f"{place} = source.{name}[i]")
        else:
            length = f"len({place})" if to_record else f"source.{name}.shape[1]"
            to_place = f"{place}[k]" if to_record else f"target.{name}[j, k]"
            lines += [f"for k in range({length}):", f"    {to_place} = source.{name}[i, k]"]
    scope: dict[str, Any] = {}
    exec("def copy(source, i, target, j):\n    " + "\n    ".join(lines), scope)  # a line for each column
    return scope["copy"]


def code_field(*files: str) -> tuple[str, str]:
    """Return a record field named by the content of files, whose names are relative to the rooms' folder.

    Numba checks only a function's own file to decide whether cached machine code is stale, but it knows the types of
    the arguments, so changed code gets another type.
    """
    root = Path(__file__).resolve().parents[2]
    return "code_" + sha256(b"".join((root / name).read_bytes() for name in files)).hexdigest()[:12], "i8"


_UNUSED: Final = ("scipy.linalg.cython_blas", "cffi")
"""Modules that numba imports if they are there, for products of matrices and for functions of C."""


def begin_lean() -> None:
    """Prepare numba to run compiled code without two modules that it imports and no kernel needs.

    The import of scipy takes about as long as numba's own. In this process no code with a product of matrices or a
    function of C can be compiled after this call, so it is for a command, and not for an interpreter that runs other
    code, too.
    """
    absent = [name for name in _UNUSED if name not in sys.modules]
    for name in absent:
        sys.modules[name] = None  # type: ignore[assignment]  # an import of it fails, as where it is not installed
    try:
        cpu_target.target_context.refresh()
    finally:
        for name in absent:
            del sys.modules[name]


@intrinsic
def fetch_line(_typing: Any, record: Any, at: Any) -> Any:
    """Prefetch the cache line of a record at a byte."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        prefetch = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]  # numba has no types
            builder.module, kind, "llvm.prefetch.p0"
        )
        address = builder.gep(builder.bitcast(arguments[0], byte), [arguments[1]])
        builder.call(prefetch, [address, number(0), number(3), number(1)])  # to be read, into all caches, data
        return context.get_dummy_value()

    return types.void(record, at), generate
