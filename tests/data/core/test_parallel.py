"""Work in parts: all of it is done, and memory that one thread freed is used by another one."""

from __future__ import annotations

import platform
import subprocess
import sys
from threading import Event, Thread
from time import sleep

import pytest

from reclaim.data.core.parallel import ROWS_WORTH_A_THREAD, in_parts, in_pieces

_PROGRAM = """
import resource, sys
from threading import Thread
import numpy as np
from reclaim.data.core.parallel import keep_one_heap

if sys.argv[1] == "shared":
    keep_one_heap()
    keep_one_heap()

def arrays():
    for megabytes in (7, 3, 2, 1):  # larger ones first: then the system's pages are no longer asked for one by one
        np.ones(megabytes << 17)

arrays()
arrays()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
thread = Thread(target=arrays)
thread.start()
thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _new_pages(how: str) -> int:
    command = [sys.executable, "-c", _PROGRAM, how]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library: the command goes on as it is")
def test_a_thread_uses_the_pages_that_another_one_freed() -> None:
    shared, by_default = _new_pages("shared"), _new_pages("default")
    assert shared < 0.2 * by_default, (shared, by_default)


def test_parts_that_call_for_parts_of_their_own_from_all_threads_at_once_are_all_done() -> None:
    rows, done = ROWS_WORTH_A_THREAD, []

    def outer(part: int, parts: int) -> None:
        in_parts(lambda p, n: done.append((part, p, n)), rows, parts)

    callers = [Thread(target=in_parts, args=(outer, rows, 2), daemon=True) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(120)
    assert sorted(done) == sorted([(a, b, 2) for a in range(2) for b in range(2)] * 8)


@pytest.mark.parametrize("failing", [0, 1])
def test_what_fails_in_a_part_is_told_when_all_that_had_begun_is_done(failing: int) -> None:
    begun, done = Event(), []

    def work(part: int, _parts: int) -> None:
        if part == 1:
            begun.set()
            sleep(0.05)
        else:
            begun.wait(120)
        if part == failing:
            raise ValueError("broken")
        done.append(part)

    with pytest.raises(ValueError, match="broken"):
        in_parts(work, ROWS_WORTH_A_THREAD, 2)
    assert done == [1 - failing]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("n", [0, 1, ROWS_WORTH_A_THREAD - 1, ROWS_WORTH_A_THREAD, 3 * ROWS_WORTH_A_THREAD])
def test_pieces_are_all_rows_in_order_none_large_enough_for_a_second_thread_and_there_is_one_at_least(
    n: int, threads: int
) -> None:
    rows = range(n)
    made = in_pieces(lambda piece: rows[piece], n, threads)
    assert [row for piece in made for row in piece] == list(rows)
    assert len(made) == max(1, -(-n // (ROWS_WORTH_A_THREAD - 1)))
    assert max(map(len, made)) < ROWS_WORTH_A_THREAD
