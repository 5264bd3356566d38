"""Tables as text: as aligned columns, within a width."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reclaim.data.core.style import SUBJECTS
from reclaim.data.core.tables import Table, show

WIDE = Table(
    ("estimator", "margin", *(f"column {k}" for k in range(6))), (("borg", "medium", 1, 2, 3, 4, 5, 6),), caption="All"
)


def test_a_caption_stands_above_the_table() -> None:
    assert WIDE.as_text().splitlines()[0] == "All"


def test_a_name_breaks_no_row_and_turns_no_line() -> None:
    names = ("web\nadmin", "\x1b[2Jgone", "a\u202eb", "a\u2028b", "caf\u00e9 \u65e5\u672c\u00a01")
    shown = ["web\ufffdadmin", "\ufffd[2Jgone", "a\ufffdb", "a\ufffdb", names[-1]]
    assert [cell for (cell,) in Table(("name",), tuple((name,) for name in names)).as_strings()] == shown


def test_what_all_rows_say_is_said_once() -> None:
    table = Table(("dataset", "margin", "rows", "run"), (("cell", "medium", 3, "a"), ("cell", "baseline", 3, "b")))
    words, rest = table.common()
    assert words == "dataset cell"
    assert rest.columns == ("margin", "rows", "run")  # a number says something of each row
    assert [row[-1] for row in rest.rows] == ["a", "b"]
    assert Table(("dataset",), ()).common() == ("", Table(("dataset",), ()))


def test_a_table_wider_than_the_terminal_comes_in_parts_that_name_their_rows() -> None:
    assert WIDE.as_text(50) == (
        "All\n"
        "estimator  margin  column 0  column 1  column 2\n"
        "---------  ------  --------  --------  --------\n"
        "borg       medium         1         2         3\n"
        "\n"
        "estimator  margin  column 3  column 4  column 5\n"
        "---------  ------  --------  --------  --------\n"
        "borg       medium         4         5         6\n"
    )


@given(st.lists(st.integers(1, 12), min_size=1, max_size=9), st.integers(30, 90))
def test_each_column_of_a_narrowed_table_is_in_one_part_and_no_line_is_too_long(sizes: list[int], width: int) -> None:
    columns = [f"{k}".rjust(size, "c") for k, size in enumerate(sizes)]
    text = Table(("name", *columns), (("borg", *sizes),)).as_text(width)
    heads = [line.split() for line in text.splitlines() if line.startswith("name")]
    assert [head for line in heads for head in line[1:]] == columns
    assert max(map(len, text.splitlines())) <= width


def test_columns_are_chosen_by_place_or_left_out_by_heading() -> None:
    table = Table(("a", "b", "c"), ((1, None, 3),), frozenset({"c"}))
    assert table.of((2, 0)).as_strings() == [["300.00 %", "1"]]
    assert table.without("a", "b").columns == ("c",)
    assert table.known().columns == ("a", "c")


def test_a_table_can_be_silent_on_a_subject() -> None:
    table = Table(("resource", "CPU used", "memory used"), (("CPU", 0.5, None), ("memory", None, 0.5), ("OOM", 1, 2)))
    assert table.silent_on(SUBJECTS["memory"]) == Table(("resource", "CPU used"), (("CPU", 0.5),))
    assert table.silent_on(SUBJECTS["cpu"]).as_records() == [
        {"resource": "memory", "memory used": 0.5},
        {"resource": "OOM", "memory used": 2},
    ]


def test_a_name_speaks_of_no_subject() -> None:
    table = Table(("estimator", "resource"), (("our-memory", "CPU"), ("our-memory", "memory")))
    assert table.silent_on(SUBJECTS["memory"], {"our-memory"}).rows == (("our-memory", "CPU"),)


def test_a_number_has_four_digits_and_is_whole_where_they_round_it_to_ten_thousand() -> None:
    values = (0.123456, 999.96, 9_999.4, 9_999.6, -9_999.6, 10_000.0, -12_345.6, 12_345, -7)
    assert [show(value) for value in values] == [
        "0.1235", "1000", "9999", "10,000", "-10,000", "10,000", "-12,346", "12,345", "-7",
    ]  # fmt: skip


def test_in_markdown_numbers_are_to_the_right() -> None:
    table = Table(("estimator", "n"), (("borg", 5), ("autopilot", 12_345)))
    assert table.as_markdown() == (
        "| estimator |      n |\n| --------- | -----: |\n| borg      |      5 |\n| autopilot | 12,345 |\n"
    )


def test_a_bar_in_a_heading_or_a_name_begins_no_cell_of_markdown() -> None:
    table = Table(("a|b", "n"), (("web|admin", 5), ("x", 7)))
    assert table.as_markdown() == (
        "| a\\|b       |  n |\n| ---------- | -: |\n| web\\|admin |  5 |\n| x          |  7 |\n"
    )
    assert table.as_text().splitlines()[2] == "web|admin   5"


def test_no_line_of_text_ends_in_blanks() -> None:
    assert Table(("n", "estimator"), ((5, "borg"),)).as_text() == " n  estimator\n--  ---------\n 5  borg\n"


def test_names_that_fill_more_than_half_the_width_are_repeated_only_as_far_as_they_fit() -> None:
    table = Table(("estimator", "margin", "reclaimed", "violation"), (("borg", "medium", 0.25, 0.5),))
    # the two names take 11 + 8 = 19 of 34, so the first one alone heads each part
    assert [line.split() for line in table.as_text(34).splitlines() if line.startswith("estimator")] == [
        ["estimator", "margin", "reclaimed"], ["estimator", "violation"],
    ]  # fmt: skip
