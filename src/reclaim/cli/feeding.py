"""Command `feed`: sends windows from a Prometheus to a running service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reclaim.cli import results
from reclaim.cli.console import AsJson, Progress, here, print_result, print_status
from reclaim.cli.fetching import Authorities, Certificate, CertificateKey, HeaderFile, TokenFile, option

_SERVICE = "The service"


def feed(
    history: Annotated[
        Path,
        typer.Argument(
            help="Folder of `reclaim fetch prometheus`; it grows with time.", metavar="HISTORY", parser=here
        ),
    ],
    url: Annotated[str, option("Address of the Prometheus, before `/api/v1`.", "URL")],
    service: Annotated[str, option("Address of `reclaim serve`.", "URL", _SERVICE)] = "http://127.0.0.1:3000",
    service_token_file: Annotated[Path | None, option("Bearer token of the service.", "FILE", _SERVICE)] = None,
    service_ca: Annotated[
        Path | None, option("CA certificates to check the service's by, PEM.", "FILE", _SERVICE)
    ] = None,
    margin: Annotated[
        str | None, option("Safety margin of what is written. Default: the service's own.", "NAME", _SERVICE)
    ] = None,
    out: Annotated[
        list[Path] | None,
        typer.Option(
            help="File of reservations by name: `.csv`, `.parquet` or `.prom`; repeatable.", metavar="FILE", parser=here
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(help="Address where a Prometheus scrapes them: a port of this machine, or HOST:PORT.",
                     metavar="ADDRESS"),
    ] = None,
    delay: Annotated[
        float, typer.Option(help="Seconds to wait after a slot of five minutes for its samples.")
    ] = 60.0,
    keep: Annotated[
        float | None, typer.Option(help="Days of the history to keep on disk. Default: all.", metavar="DAYS")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="End when the service has all that there is now.")] = False,
    header_file: HeaderFile = None,
    token_file: TokenFile = None,
    ca: Authorities = None,
    cert: Certificate = None,
    key: CertificateKey = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Send a cluster's windows from a Prometheus to a running service as they end, and write its reservations by name.

    The service is given the history first, so that its forecasts begin with it. Stopped and run again, it continues
    after the last window that the service has.
    """
    from reclaim.data.fetch.prometheus.client import Access
    from reclaim.serving.feed.job import FeedConfig
    from reclaim.serving.feed.job import feed as run
    from reclaim.serving.http.tokens import read_token

    token = None if service_token_file is None else read_token(service_token_file).decode()
    config = FeedConfig(
        Access(url, header_file, token_file, ca, cert, key), service, token, service_ca, margin,
        tuple(out or ()), listen, delay, once, keep,
    )  # fmt: skip
    with Progress("feeding") as progress:
        report = run(config, history, progress=progress, say=print_status)
    print_result(results.of_feed(report, history), as_json)
