"""Settings of compiled code, and the stamp by which numba notices that cached code is stale."""

from __future__ import annotations

import logging
import os
import sys
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba.core import caching, cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic, overload

from reclaim.data.core.files import folder_of_process

log = logging.getLogger(__name__)

CACHED: Final[dict[str, Any]] = {"cache": True, "nogil": True}
"""For every function that Python calls: compiled once, and it lets other threads run meanwhile."""
LENT: Final[dict[str, Any]] = {**CACHED, "error_model": "numpy", "_nrt": False}
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


class Stamp:
    """State of the sources that a compiled function was made of, found when it is compared or saved.

    Numba compares a cached function with its own file alone, and what other files define is compiled into it, too. So
    the stamp of that file gets a digest of all that the function depends on: the code of the functions that it
    calls, and of those that these call, and the values that they take from their modules. It is computed late, because
    a module is not complete while its functions are decorated.
    """

    def __init__(self, own: object, function: Any) -> None:
        self._own, self._function = own, function

    def __bytes__(self) -> bytes:
        return repr(self._own).encode() + digest_of(self._function)

    def __eq__(self, other: object) -> bool:
        return bytes(self) == other

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return bytes, (bytes(self),)


class _Stamped:
    """A place for cached code whose stamp is ``Stamp``."""

    _function: Any

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> Any:
        place = super().from_function(py_func, py_file)  # type: ignore[misc]  # of numba's sibling class
        if place is not None:
            place._function = py_func
        return place

    def get_source_stamp(self) -> Stamp:
        return Stamp(super().get_source_stamp(), self._function)  # type: ignore[misc]


class InCacheFolder(_Stamped, caching.UserProvidedCacheLocator):
    """The folder that ``NUMBA_CACHE_DIR`` names."""


class InTree(_Stamped, caching.InTreeCacheLocator):
    """``__pycache__`` next to the source."""


class OfUser(_Stamped, caching.UserWideCacheLocator):
    """The user's folder of caches, where the source lies in a folder that cannot be written."""


class OfProcess(InCacheFolder):
    """A folder of this process and of those that it starts, where neither of the others can be written."""

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> Any:
        """Return the place of a function."""
        numba.config.CACHE_DIR = _until_the_end()  # type: ignore[attr-defined]
        return super().from_function(py_func, py_file)


@cache
def _until_the_end() -> str:
    """Return the folder of this process for compiled code, and warn that later ones compile again."""
    folder = str(folder_of_process("reclaim-compiled-"))
    os.environ["NUMBA_CACHE_DIR"] = folder
    log.warning(
        "compiled code cannot be kept: neither %s nor the home folder can be written, so each start compiles for half "
        "a minute; let NUMBA_CACHE_DIR name a folder that can", Path(__file__).parents[2],
    )  # fmt: skip
    return folder


if not numba.config.CACHE_LOCATOR_CLASSES:  # type: ignore[attr-defined]  # a user may have named others
    numba.config.CACHE_LOCATOR_CLASSES = ",".join(  # type: ignore[attr-defined]
        [*(f"{place.__module__}.{place.__name__}" for place in (InCacheFolder, InTree, OfUser)),
         "IPythonCacheLocator", "ZipCacheLocator", f"{OfProcess.__module__}.{OfProcess.__name__}"]
    )  # fmt: skip


_OURS: Final = Path(__file__).read_bytes()
"""This file: it generates code, and defines what a digest covers."""


@cache
def digest_of(function: Any) -> bytes:
    """Return a digest of a function's code, of what it calls in its package, and of the values that both take."""
    found, seen = sha256(_OURS), set[FunctionType]()
    package = _package(function)

    def add(value: Any) -> None:
        options = getattr(value, "targetoptions", None)  # of a compiled function
        value = getattr(value, "py_func", value)
        value = getattr(value, "_defn", value)  # of an intrinsic one
        if isinstance(value, FunctionType):
            found.update(f"{value.__module__}.{value.__qualname__} {options}".encode())
            if _package(value) == package and value not in seen:
                seen.add(value)
                add_code(value.__code__, value.__globals__)
                add([cell.cell_contents for cell in value.__closure__ or ()])
        elif isinstance(value, np.ndarray):
            found.update(f"{value.dtype} {value.shape} {value.tobytes()!r}".encode())
        elif isinstance(value, tuple | list):
            found.update(f"{type(value).__qualname__} {len(value)}".encode())
            for item in value:
                add(item)
        elif isinstance(value, frozenset):
            add(sorted(map(repr, value)))
        elif isinstance(value, type):
            members = getattr(value, "__members__", "")  # of an enumeration
            found.update(f"{value.__qualname__} {getattr(value, '_fields', '')} {members}".encode())
        elif isinstance(value, int | float | complex | str | bytes | np.generic | np.dtype) or value is None:
            found.update(repr(value).encode())
        else:
            found.update(type(value).__qualname__.encode())

    def add_code(code: CodeType, names: dict[str, Any]) -> None:
        found.update(f"{code.co_code!r} {code.co_varnames} {code.co_names}".encode())
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                add_code(constant, names)
            else:
                add(constant)
        for name in code.co_names:
            value = names.get(name)
            if not isinstance(value, ModuleType):
                add(value)
            elif value.__name__.partition(".")[0] == package:
                add([getattr(value, attribute, None) for attribute in code.co_names])

    add(function)
    return found.digest()


def _package(function: Any) -> str:
    return str(function.__module__).partition(".")[0]


_UNUSED: Final = ("scipy.linalg.cython_blas", "cffi")
"""Modules that numba imports if they are there, for products of matrices and for functions of C."""


def begin_lean() -> None:
    """Prepare numba to run compiled code without two modules that it imports and no kernel needs.

    Importing scipy takes about as long as importing numba. In this process no code with a product of matrices or a
    function of C can be compiled after this call, so it is for a command, not for an interpreter that also runs other
    code.
    """
    absent = [name for name in _UNUSED if name not in sys.modules]
    for name in absent:
        sys.modules[name] = None  # type: ignore[assignment] # importing it then fails, as if it were not installed
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
