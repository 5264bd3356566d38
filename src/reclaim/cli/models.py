"""Commands for registered models: promote one, copy one into a folder, show the record of runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reclaim.cli import results
from reclaim.cli.console import AsJson, fail, here, place, print_result, print_status, print_table

if TYPE_CHECKING:
    from reclaim.replay.runs.promote import Promotion


def promote(
    datasets: Annotated[
        list[Path] | None,
        typer.Argument(help="Datasets whose validation rows the model is judged on.", metavar="DATASET", parser=place),
    ] = None,
    model: Annotated[str, typer.Option(help="NAME@ALIAS or NAME/VERSION.", metavar="MODEL")] = "reclaim@candidate",
    force: Annotated[bool, typer.Option("--force", help="Promote without a comparison; a rollback, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a model `champion`, which is served, if it is not worse than the current one on validation rows."""
    promotion = promoted(datasets or [], model, force=force, as_json=as_json)
    print_result(results.of_promotion(promotion), as_json)
    end_if_refused(promotion)


def promoted(datasets: list[Path], model: str, *, force: bool = False, as_json: bool = False) -> Promotion:
    """Promote a model and print the comparison."""
    from reclaim.data.errors import ConfigError
    from reclaim.replay.runs.promote import promote as run

    for path in datasets:
        if not path.exists() and re.fullmatch(r".+(@[^/]+|/\d+)", str(path)):
            raise ConfigError(f"{path}: no such dataset; where it is a model, `reclaim promote DATASET --model {path}`")
    promotion = run(datasets, model, force=force)
    if promotion.comparison and not as_json:
        print_table(promotion.table)
    return promotion


def end_if_refused(promotion: Promotion | None) -> None:
    """End with one line and exit code 2 where a promotion was refused."""
    if promotion is not None and promotion.refused:
        fail(promotion.why)


def bundle(
    model: Annotated[
        str, typer.Argument(help="NAME@ALIAS, NAME/VERSION, a bundle's folder or `builtin`.", metavar="MODEL")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write.", metavar="DIR", parser=here)],
    as_json: AsJson = False,
) -> None:
    """Copy a model into a folder, for `--model DIR` on a machine without the registry, and for a bento."""
    from reclaim.training.bundle import copy_bundle

    print_result(results.of_bundle(copy_bundle(model, out), out), as_json)


def mlflow(
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65_535)] = 5000,
) -> None:
    """Show the record of runs and models in a browser, on this machine only, until stopped (Ctrl-C)."""
    from reclaim.training.tracking.client import run_interface

    run_interface(port, lambda: print_status(f"http://127.0.0.1:{port}/ answers in a few seconds; Ctrl-C ends it"))
