"""What the command line prints: results for a person or a script, errors, tables, a bar."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import typer

if TYPE_CHECKING:
    from reclaim.data.table import Table


def fail(message: str) -> NoReturn:
    """Print one red line that names the thing and the remedy, and exit with 2: the caller can mend it."""
    line = f"error: {' '.join(message.split())}"
    typer.echo(f"\033[31m{line}\033[0m" if sys.stderr.isatty() else line, err=True)
    sys.exit(2)


def say(line: str) -> None:
    """Tell a person what goes on, apart from what a script reads."""
    typer.echo(f"· {line}", err=True)


def tell(facts: dict[str, Any], as_json: bool, *lines: str) -> None:
    """Print what was made, last: for a script or for a person."""
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        for line in lines:
            typer.echo(line)


def kept(already_there: bool) -> str:
    """Return what to add where a stage found its work done."""
    return " (was there already, nothing to do)" if already_there else ""


def print_table(table: Table) -> None:
    """Print a table: ruled on a terminal, plain elsewhere."""
    from rich.console import Console
    from rich.table import Table as Grid

    console = Console()
    if not console.is_terminal:
        typer.echo(table.as_text(), nl=False)
        return
    grid = Grid()
    for number, column in enumerate(table.columns):
        grid.add_column(column, justify="left" if table.is_text(number) else "right")
    for row in table.as_strings():
        grid.add_row(*row)
    console.print(grid)


class Progress:
    """A bar on a terminal, fed with the share done."""

    def __init__(self, what: str) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=100, desc=what, unit="%", disable=None, leave=False)

    def __enter__(self) -> Progress:
        return self

    def __call__(self, share: float) -> None:
        """Move the bar to the share done, in [0, 1]."""
        self._bar.update(round(100 * share) - self._bar.n)

    def __exit__(self, *_: object) -> None:
        self._bar.close()
