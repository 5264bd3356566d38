"""Answers before a margin or price: what lifts each row to its need does, and rows stay rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reclaim.data.windows import Windows, empty_windows
from reclaim.training.estimators.base import MODEL, Estimate
from reclaim.training.margins.answers import Answers, Priced, Widened, three_of
from reclaim.training.margins.ladder import N_RUNGS
from reclaim.training.margins.margin import MARGIN_NAMES, Margin
from reclaim.training.margins.price import Price


def _widened(rng: np.random.Generator, n: int) -> Widened:
    rule = np.full((n, 2), MODEL, np.uint8)
    return Widened({name: Estimate(rng.uniform(0.1, 5, (n, 2)), rule) for name in ("baseline", "aggressive")})


def _priced(rng: np.random.Generator, n: int) -> Priced:
    return Priced(np.sort(rng.random((n, 2, N_RUNGS)).astype(np.float32), axis=-1))


def _windows(n: int) -> Windows:
    windows = empty_windows(n)
    windows.limit[:] = 4.0
    return windows


MAKERS = pytest.mark.parametrize("make", [_widened, _priced])


@MAKERS
@given(seed=st.integers(0, 10_000))
def test_the_setting_that_a_row_scores_reserves_what_it_needs(make, seed: int) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(seed)
    answers: Answers = make(rng, 1)
    windows, need = _windows(1), rng.uniform(0.1, 3.9, (1, 2))
    score = answers.score("baseline", need, windows.limit)
    highest = isinstance(answers, Priced) & ~(score <= answers.HIGHEST)  # the ladder ends below the need
    found = {name: np.clip(score[0], answers.LOWEST, answers.HIGHEST) for name in ("baseline", "aggressive")}
    held = answers.under(answers.settings(found, None), "baseline", windows)
    assert ((held >= need * (1 - 1e-9)) | highest).all()
    lowest = score <= answers.LOWEST
    assert ((held <= np.maximum(need, answers.under(answers.settings(found, None), "aggressive", windows)) * (1 + 1e-9))
            | lowest).all()  # fmt: skip


@MAKERS
def test_chosen_rows_answer_as_they_do_among_all(make) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(1)
    answers: Answers = make(rng, 9)
    windows, rows = _windows(9), np.array([5, 2, 7])
    both = (
        (Price(name, (value, value)) for name, value in (("baseline", 9.0), ("aggressive", 2.0)))
        if isinstance(answers, Priced)
        else (Margin(name, (share, share)) for name, share in (("baseline", 0.5), ("aggressive", 0.1)))
    )
    settings = three_of(*both)
    for name in MARGIN_NAMES:
        whole = answers.under(settings, name, windows)
        assert answers.take(rows).under(settings, name, windows.take(rows)).tolist() == whole[rows].tolist()
        for chosen in (slice(3, 5), np.arange(9) > 6):
            assert answers.take(chosen).under(settings, name, windows.take(chosen)).tolist() == whole[chosen].tolist()
        of_these = answers.take(rows).take(np.array([2, 0]))
        assert of_these.under(settings, name, windows.take(np.array([7, 5]))).tolist() == whole[[7, 5]].tolist()
    need = rng.uniform(0.1, 3.9, (9, 2))
    for budget in ("baseline", "aggressive"):
        score = answers.score(budget, need, windows.limit)
        of_rows = answers.take(rows).score(budget, need[rows], windows.limit[rows])
        assert of_rows.tolist() == score[rows].tolist()


def test_answers_of_parts_are_joined_in_their_order_for_each_budget() -> None:
    def part(*reservation: float) -> Estimate:
        return Estimate(np.array([reservation]), np.full((1, 2), MODEL, np.uint8))

    alike = Widened.alike(part(5.0, 6.0))
    parts = [Widened({"baseline": part(1.0, 2.0), "aggressive": part(3.0, 4.0)}), alike]
    whole = Widened.joined(parts)
    assert whole.of["baseline"].reservation.tolist() == [[1.0, 2.0], [5.0, 6.0]]
    assert whole.of["aggressive"].reservation.tolist() == [[3.0, 4.0], [5.0, 6.0]]
    assert parts == []  # so that their memory is freed
    assert not whole.is_alike
    assert Widened.joined([alike, alike]).is_alike


def test_chosen_rows_of_answers_that_both_budgets_share_are_shared() -> None:
    answers = Widened.alike(Estimate(np.ones((3, 2)), np.full((3, 2), MODEL, np.uint8)))
    assert answers.is_alike
    assert answers.take(slice(1, 3)).is_alike


def test_ladders_of_parts_are_joined_in_their_order_with_their_risks() -> None:
    rng = np.random.default_rng(4)
    known = [
        Priced(of.ladder, risk=rng.integers(0, 99, of.ladder.shape, np.uint16))
        for of in (_priced(rng, n) for n in (3, 1, 4))
    ]
    for parts in (known, [Priced(of.ladder) for of in known]):
        ladder, risks = np.concatenate([of.ladder for of in parts]), [of.risk for of in parts if of.risk is not None]
        whole = Priced.joined(list(parts))
        assert whole.ladder.tobytes() == ladder.tobytes()
        found = whole.take(np.array([6, 0])).risk_of_rows()
        if risks:
            assert found is not None
            assert found[0].tobytes() == np.concatenate(risks).tobytes()
            assert found[1].tolist() == [6, 0]
            every = whole.risk_of_rows()
            assert every is not None
            assert every[1].tolist() == list(range(8))
        else:
            assert found is None


def test_a_wider_margin_never_reserves_less() -> None:
    rng = np.random.default_rng(2)
    for answers, three in (
        (_widened(rng, 40), three_of(Margin("baseline", (0.0, 0.3)), Margin("aggressive", (0.1, 0.1)))),
        (_priced(rng, 40), three_of(Price("baseline", (1.0, 8.0)), Price("aggressive", (2.0, 3.0)))),
    ):
        held = [answers.under(three, name, _windows(40)) for name in MARGIN_NAMES]
        assert (held[0] >= held[1]).all()
        assert (held[1] >= held[2]).all()


def test_a_row_that_nothing_is_known_of_asks_for_nothing() -> None:
    nothing = np.full((1, 2), np.nan)
    widened = Widened.alike(Estimate(nothing, np.full((1, 2), MODEL, np.uint8)))
    priced = Priced(np.full((1, 2, N_RUNGS), np.nan, np.float32))
    for answers in (widened, priced):
        assert answers.score("baseline", np.ones((1, 2)), np.full((1, 2), 4.0)).tolist() == [[-np.inf, -np.inf]]


def test_a_row_that_needs_nothing_asks_for_no_margin_even_where_nothing_is_reserved() -> None:
    answers = Widened.alike(Estimate(np.array([[0.0, 2.0]]), np.full((1, 2), MODEL, np.uint8)))
    assert answers.score("baseline", np.zeros((1, 2)), np.full((1, 2), 4.0)).tolist() == [[-np.inf, -np.inf]]
