"""Turns of the writes that wait: commands, then small writes in batches, then a chunk of a bulk write."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from reclaim.data.windows import empty_windows
from reclaim.serving.wire.errors import RequestError
from reclaim.serving.wire.rows import UsageRows
from reclaim.serving.writing.queue import _SMALL_ROWS, FactWrite, UsageWrite, Work, WriteQueue
from tests.serving.cell_fixtures import fact_rows, usage_rows


def windows(n: int) -> UsageRows:
    return usage_rows(empty_windows(n))


FACT = fact_rows({"task": 1, "limit": 1.0})


def sizes(work: Work | None) -> list[list[int] | str]:
    """Return the rows of each write of each batch, and ``facts`` for facts."""
    assert work is not None
    return ["facts" if isinstance(of, FactWrite) else [len(one.usage.row) for one in of] for of in work.small]


def test_small_writes_between_facts_are_batched_in_their_order() -> None:
    queue = WriteQueue(10)
    for rows in (windows(3), windows(1), FACT, windows(2), FACT, FACT):
        queue.add(rows)
    assert queue.waiting == 6
    assert sizes(queue.next(0.0)) == [[3, 1], "facts", [2], "facts", "facts"]
    assert queue.waiting == 0
    assert queue.next(0.0) == Work()  # each is given once


def test_a_batch_ends_with_the_write_that_passes_the_rows_of_one_small_write() -> None:
    queue = WriteQueue(10)
    for n in (_SMALL_ROWS - 1, 1, 1, 5):
        queue.add(windows(n))
    assert sizes(queue.next(0.0)) == [[_SMALL_ROWS - 1, 1, 1]]
    assert sizes(queue.next(0.0)) == [[5]]
    for rows in (FACT, windows(_SMALL_ROWS), FACT):  # facts count as rows, too
        queue.add(rows)
    assert sizes(queue.next(0.0)) == ["facts", [_SMALL_ROWS]]


def bulk_of(work: Work | None) -> UsageWrite:
    assert work is not None
    assert work.bulk is not None
    return work.bulk


def test_a_write_of_more_rows_than_a_small_one_has_is_a_bulk_write_and_stays_first_until_it_is_finished() -> None:
    queue = WriteQueue(10)
    for n in (_SMALL_ROWS + 1, _SMALL_ROWS + 2):
        queue.add(windows(n))
    assert not queue.small_writes_recent
    for _ in range(2):
        work = queue.next(0.0)
        assert (sizes(work), len(bulk_of(work).usage.row)) == ([], _SMALL_ROWS + 1)
    assert queue.waiting == 2
    queue.finished(bulk_of(work))
    queue.add(windows(_SMALL_ROWS))
    work = queue.next(0.0)
    assert (sizes(work), len(bulk_of(work).usage.row)) == ([[_SMALL_ROWS]], _SMALL_ROWS + 2)


def test_small_writes_are_recent_after_they_were_taken_too_and_facts_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reclaim.serving.writing.queue.monotonic", lambda: 7.0)
    for rows, recent in ((FACT, False), (windows(_SMALL_ROWS), True)):
        queue = WriteQueue(10)
        queue.add(rows)
        queue.next(0.0)
        assert queue.small_writes_recent == recent


def test_small_writes_count_as_recent_for_as_long_as_one_waits_facts_too() -> None:
    queue = WriteQueue(10)
    queue.add(FACT)
    assert queue.small_writes_recent
    queue.next(0.0)
    assert not queue.small_writes_recent


def test_a_command_goes_first_and_alone() -> None:
    queue = WriteQueue(10)
    queue.add(windows(1))
    done = queue.command(lambda: None)
    first, second = queue.next(0.0), queue.next(0.0)
    assert first is not None
    assert first.command is not None
    assert first.done == [done]
    assert (first.small, first.bulk) == ((), None)
    assert sizes(second) == [[1]]


def test_no_more_writes_wait_than_is_said_small_ones_and_bulk_ones_together() -> None:
    queue = WriteQueue(2)
    queue.add(windows(1))
    queue.add(windows(_SMALL_ROWS + 1))
    with pytest.raises(RequestError, match="2 writes are waiting already"):
        queue.add(FACT)
    queue.next(0.0)
    queue.add(FACT)


def test_a_closed_queue_takes_nothing_gives_what_waits_and_then_ends() -> None:
    queue = WriteQueue(2)
    assert queue.next(0.0) == Work()
    queue.add(windows(1))
    queue.close()
    with pytest.raises(RequestError, match="stopping"):
        queue.add(windows(1))
    assert queue.command(lambda: None).done()
    assert sizes(queue.next(0.0)) == [[1]]
    assert queue.next(0.0) is None


def test_rejected_are_the_writes_that_wait_and_those_under_way_that_are_not_done() -> None:
    queue = WriteQueue(10)
    answered, taken, fact = queue.add(windows(1)), queue.add(windows(1)), queue.add(FACT)
    work = queue.next(0.0)
    assert work is not None
    (batch, _) = work.small
    assert isinstance(batch, list)
    batch[0].done.set_result(None)  # type: ignore[arg-type]  # any answer
    left: list[Future[Any]] = [
        taken,
        fact,
        queue.add(windows(2)),
        queue.add(windows(_SMALL_ROWS + 1)),
        queue.command(lambda: None),
    ]
    queue.reject_all("the disk is gone")
    assert answered.exception() is None
    for one in left:
        with pytest.raises(RequestError, match="the disk is gone"):
            one.result(0.0)
    assert queue.next(0.0) is None


def test_of_a_write_that_waits_nothing_is_done() -> None:
    write = UsageWrite(windows(3), Future())
    assert (write.at, write.outcome.tolist()) == (0, [0, 0, 0])


def test_the_next_work_is_waited_for_only_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, waited = WriteQueue(10), list[float]()
    monkeypatch.setattr(queue._changed, "wait", waited.append)
    assert queue.next(3.0) == Work()
    assert waited == [3.0]
    queue.add(windows(1))
    queue.command(lambda: None)
    for _ in range(2):
        assert queue.next(3.0) != Work()
    queue.close()
    assert queue.next(3.0) is None
    assert waited == [3.0]


@pytest.mark.parametrize(
    "come",
    [lambda queue: queue.add(windows(1)), lambda queue: queue.command(lambda: None), lambda queue: queue.close()],
    ids=["write", "command", "end"],
)
def test_the_thread_that_waits_for_work_is_woken_as_soon_as_some_comes(come: Callable[[WriteQueue], object]) -> None:
    queue, long_s = WriteQueue(10), 60.0
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(queue.next, long_s)
        while not queue._changed._waiters:  # type: ignore[attr-defined]  # until the thread waits
            assert not taken.done()
        come(queue)
        assert taken.result(30.0) != Work()


def test_a_caller_that_leaves_withdraws_neither_a_write_nor_a_command() -> None:
    queue = WriteQueue(10)
    for done in (queue.add(windows(1)), queue.command(lambda: None)):
        assert not done.cancel()
