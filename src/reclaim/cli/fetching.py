"""Command `fetch`: public traces, and the history of a cluster from a Prometheus."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from reclaim.cli import results
from reclaim.cli.console import AsJson, Progress, here, print_result, print_status

PROMETHEUS = "prometheus"
_PANEL = "Of a Prometheus"
_TRACES = "Of a public trace"


def option(text: str, metavar: str | None = None, panel: str = _PANEL) -> typer.models.OptionInfo:
    """Return an option of one of the panels that the help has."""
    info: typer.models.OptionInfo = typer.Option(help=text, metavar=metavar, rich_help_panel=panel)
    return info


HeaderFile = Annotated[Path | None, option("File of headers, lines `Name: value`, such as a tenant's.", "FILE")]
TokenFile = Annotated[Path | None, option("Bearer token.", "FILE")]
Authorities = Annotated[Path | None, option("CA certificates to check the server's by, PEM.", "FILE")]
Certificate = Annotated[Path | None, option("Client certificate, PEM.", "FILE")]
CertificateKey = Annotated[Path | None, option("Its key, PEM.", "FILE")]


def fetch(
    trace: Annotated[
        str,
        typer.Argument(help="`google-v3`, `google-v2.1`, `alibaba-2017`, or `prometheus`.", metavar="TRACE"),
    ],
    out: Annotated[Path, typer.Argument(help="Folder for the files.", metavar="OUT", parser=here)],
    cell: Annotated[str | None, option("Cell of `google-v3`, `a` to `h`.", panel=_TRACES)] = None,
    table: Annotated[list[str] | None, option("Table; repeatable. Default: all.", panel=_TRACES)] = None,
    shards: Annotated[str | None, option("Shards of each table, as `0-3,7`. Default: all.", panel=_TRACES)] = None,
    base_url: Annotated[str | None, option("Address of a mirror.", "URL", _TRACES)] = None,
    parallel: Annotated[int | None, option("Files fetched at once. Default: 4.", panel=_TRACES)] = None,
    url: Annotated[str | None, option("Address, before `/api/v1`.", "URL")] = None,
    days: Annotated[float | None, option("Days of history. Default: 14.")] = None,
    end: Annotated[
        str | None, option("End of the history, as `2026-11-02` (UTC). Default: the last full two hours.", "TIME")
    ] = None,
    namespace: Annotated[
        str | None, option("Namespaces, a regular expression as in PromQL. Default: all.", "REGEX")
    ] = None,
    cluster: Annotated[str | None, option("Only series with this label.", "LABEL=VALUE")] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Print what there is and what it takes; fetch nothing.",
                           rich_help_panel=_PANEL)
    ] = False,
    dialect: Annotated[
        str | None, option("TOML with the names of metrics and labels. Default: `kubernetes`.", "FILE")
    ] = None,
    transport: Annotated[
        str | None,
        option("`auto` (default), `chunks`, `samples` (remote read), `export` (VictoriaMetrics) or `query`."),
    ] = None,
    header_file: HeaderFile = None,
    token_file: TokenFile = None,
    ca: Authorities = None,
    cert: Certificate = None,
    key: CertificateKey = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Download a public trace, or a cluster's history from a Prometheus; a run that was interrupted continues."""
    from reclaim.data.errors import ConfigError
    from reclaim.data.fetch.locations import TRACES

    if trace not in (*TRACES, PROMETHEUS):
        raise ConfigError(f"trace must be one of {', '.join((*TRACES, PROMETHEUS))}, got {trace!r}")
    of_traces = {"--cell": cell, "--table": table or None, "--shards": shards, "--base-url": base_url,
                 "--parallel": parallel}  # fmt: skip
    of_prometheus = {"--url": url, "--days": days, "--end": end, "--namespace": namespace, "--cluster": cluster,
                     "--probe": probe or None, "--dialect": dialect, "--transport": transport,
                     "--header-file": header_file, "--token-file": token_file, "--ca": ca, "--cert": cert,
                     "--key": key}  # fmt: skip
    other = of_traces if trace == PROMETHEUS else of_prometheus
    if given := [name for name, value in other.items() if value is not None]:
        raise ConfigError(f"{', '.join(given)}: not an option of `reclaim fetch {trace}`")
    if trace != PROMETHEUS:
        from reclaim.data.fetch.job import FetchConfig
        from reclaim.data.fetch.job import fetch as run

        config = FetchConfig(
            trace=trace, cell=cell, tables=tuple(table or ()), shards=shards, base_url=base_url,
            **({} if parallel is None else {"parallel": parallel}),
        )  # fmt: skip
        print_result(results.of_fetch(run(config, out), out), as_json)
        return
    from reclaim.data.fetch.prometheus.client import Access
    from reclaim.data.fetch.prometheus.job import HistoryConfig, fetch_history

    if url is None:
        raise ConfigError("prometheus: pass its address, as --url https://prometheus.example")
    chosen: dict[str, Any] = {"days": days, "dialect": dialect, "transport": transport}
    asked = HistoryConfig(
        Access(url, header_file, token_file, ca, cert, key), end=end, namespace=namespace, cluster=cluster,
        probe=probe, **{name: value for name, value in chosen.items() if value is not None},
    )  # fmt: skip
    with Progress("fetching") as progress:
        report = fetch_history(asked, out, progress=progress, say=print_status)
    print_result(results.of_history(report, out), as_json)
