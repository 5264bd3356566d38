"""How the folds are compiled, and by what the code that numba keeps is told to be stale."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LENT: Final[dict[str, Any]] = {"cache": True, "nogil": True, "error_model": "numpy", "_nrt": False}
"""For functions that are only lent their arrays: without reference counts, which took a fifth of the time, so they can
make no arrays of their own. Division by zero gives infinity or NaN and raises nothing."""

COMPILED_FILES: Final = (
    "data/schema.py", "data/windows.py", "features/compiled.py", "features/kinship.py", "features/reading.py",
    "features/record.py", "features/registry.py", "features/taking.py",
)  # fmt: skip
"""What is compiled into the folds of ``state`` and ``kin``, beside those files themselves: all that they rest on."""


def code_field(*files: str) -> tuple[str, str]:
    """Return a field for a record, named by the content of files, which are named as from the rooms' folder.

    Numba looks at a function's own file alone to tell whether machine code that it kept is stale, but it knows the
    types of the arguments: so other code has another type.
    """
    root = Path(__file__).resolve().parents[1]
    return "code_" + sha256(b"".join((root / name).read_bytes() for name in files)).hexdigest()[:12], "i8"


@intrinsic
def fetch_line(_typing: Any, record: Any, at: Any) -> Any:
    """Ask for the cache line of a record at a byte, so that it is there when it is needed; changes nothing."""

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


CODE: Final = code_field(*COMPILED_FILES)
"""A field of the folds' records."""
