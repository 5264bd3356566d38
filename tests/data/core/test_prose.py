"""Numbers for people: short, in a suitable unit, and a dash where nothing is known."""

from __future__ import annotations

from reclaim.data.core.prose import amount, counted, duration, interval, number, percent, points


def test_a_number_has_four_digits_or_is_whole_from_a_thousand_on() -> None:
    values = (None, 0.0, 3.0, 0.123456, 999.94, 1000.4, -1234.5678, 1_234_567.0)
    assert [number(value) for value in values] == ["-", "0", "3", "0.1235", "999.9", "1,000", "-1,235", "1,234,567"]


def test_one_of_a_noun_is_in_the_singular() -> None:
    assert [counted(n, "day") for n in (1.0, 0.5, 2)] == ["1 day", "0.5 days", "2 days"]


def test_a_duration_is_in_the_largest_unit_of_which_there_are_two() -> None:
    # 48 h are two days and 47 h are not; 2 min are 120 s
    hours = (48, 47, 2, 1.5, 2 / 60, 1.9 / 60, 0.0)
    assert [duration(of) for of in hours] == ["2 days", "47 h", "2 h", "90 min", "2 min", "114 s", "0 s"]


def test_an_amount_for_a_table_is_rounded_to_four_digits_or_to_a_whole_number() -> None:
    assert [amount(value) for value in (0.123456, 999.94, 1000.4, -12345.6)] == [0.1235, 999.9, 1000, -12346]
    assert isinstance(amount(1000.4), int)


def test_shares_are_in_percent_and_differences_in_points_with_their_sign() -> None:
    assert [percent(0.01234), percent(0.01234, 1), percent(None)] == ["1.23 %", "1.2 %", "-"]
    assert [points(0.0123), points(-0.0123), points(None)] == ["+1.23 points", "-1.23 points", "-"]


def test_an_interval_of_which_a_bound_is_unknown_is_a_dash() -> None:
    assert interval({"low": 0.012, "high": 0.0345}) == "1.20 to 3.45 %"
    assert interval({"low": None, "high": 0.5}) == interval({"low": 0.5, "high": None}) == "-"
