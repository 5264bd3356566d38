"""Reads the samples that follow a history, as they come."""

from __future__ import annotations

from reclaim.data.errors import ConfigError
from reclaim.data.fetch.prometheus.client import Access, Client
from reclaim.data.fetch.prometheus.job import LATE_S, config_of, metrics_of
from reclaim.data.fetch.prometheus.probe import LARGEST_PIECE, choose, too_large
from reclaim.data.fetch.prometheus.reading import external_labels, read_series
from reclaim.data.fetch.prometheus.transports import held
from reclaim.data.traces.history import History, RawSeries, finite


class LiveReader:
    """Reads a server's samples of a few minutes by the metrics, labels and options of a history.

    Parameters
    ----------
    client : Client
        Open connection to the server of the history.
    access : Access
    history : History
    now_s : float or None
        Current time, seconds of Unix time, where the server may have lost the samples of the history.

    Raises
    ------
    ConfigError
        The server cannot be read.
    TraceError
        It fails.
    """

    def __init__(self, client: Client, access: Access, history: History, now_s: float | None = None) -> None:
        config = config_of(history, access)
        start_s, end_s = history.range_s
        self._client, self._metrics = client, metrics_of(history.dialect, config)
        found = choose(client, self._metrics[0], start_s, end_s, config.transport)
        self._without = external_labels(client, self._metrics[0], found, start_s, end_s, now_s)
        # a chunk is up to an hour long, and only a few minutes are wanted
        self._transport = "samples" if found == "chunks" else found

    def scraped(self, now_s: int) -> bool:
        """Return whether there is usage of the ten minutes before a time, seconds of Unix time; raises as ``read``."""
        return bool(self.usage(now_s - LATE_S, now_s))

    def usage(self, start_s: int, end_s: int) -> list[RawSeries]:
        """Return the series of the first role of usage in [start, end), as ``read`` does; TraceError where it fails."""
        range_ms = start_s * 1000, end_s * 1000
        rows = read_series(self._client, self._metrics[0], self._transport, *range_ms, without=self._without)
        return [row for row in map(finite, rows) if len(row.value)]

    def read(self, start_s: int, end_s: int) -> dict[str, list[RawSeries]]:
        """Return the series by role in [start, end), in seconds of Unix time, as ``read_piece`` does.

        Raises
        ------
        TraceError
            The server fails or refuses.
        ConfigError
            There are more samples than memory is for.
        """
        found: dict[str, list[RawSeries]] = {}
        total = 0
        for metric in self._metrics:
            range_ms = start_s * 1000, end_s * 1000
            rows = read_series(self._client, metric, self._transport, *range_ms, without=self._without)
            total += sum(map(held, rows))
            if total > LARGEST_PIECE:
                raise ConfigError(too_large(self._client.url, "more samples than planned"))
            if rows := [row for row in map(finite, rows) if len(row.value)]:
                found[metric.role] = rows
        return found
