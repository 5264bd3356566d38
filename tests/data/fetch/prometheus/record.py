"""Records the answers that the decoders are tested on: of a real Prometheus and a VictoriaMetrics, to made-up series.

    python -m tests.data.fetch.prometheus.record

needs both programs; the recorded files are the folder's own.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import httpx

from reclaim.data.fetch.prometheus.transports import HEADERS, remote_read_request
from reclaim.data.traces.dialect import Matcher, Metric

RECORDED = Path(__file__).parent / "recorded"
START_S = 1_793_520_000
"""2026-11-01 08:00 UTC."""
SECONDS = 7200
METRIC = Metric("cpu", "recorded", (Matcher("series", "!=", "left out"),))


def series() -> dict[str, list[tuple[int, float]]]:
    """Return times (ms) and values by name: a counter, one with resets, constants, odd values, odd times, gaps."""
    beat = range(START_S * 1000 + 7_123, (START_S + SECONDS) * 1000, 30_000)
    odd = [0.0, -0.0, 1.0, -1e308, 1e-308, 5e-324, math.pi, 2.0**53 + 2, math.inf, -math.inf, 1e15 / 3]
    return {
        "counter": [(t, round(k * 3.217 + (k % 7) * 0.001, 3)) for k, t in enumerate(beat)],
        "resets": [(t, float(k % 50) * 1.5) for k, t in enumerate(beat)],
        "constant": [(t, 42.0) for t in beat],
        "odd values": [(t, odd[k % len(odd)]) for k, t in enumerate(beat)],
        "odd times": [(t + k * k * 17 % 29_000, float(k)) for k, t in enumerate(beat)],
        "gaps": [(t, float(k)) for k, t in enumerate(beat) if k % 60 < 20],
        "long gap": [(START_S * 1000, 1.0), (START_S * 1000 + 1, 2.0), ((START_S + SECONDS) * 1000 - 1, 3.0)],
        "one sample": [(START_S * 1000 + 3_600_000, 7.25)],
        "ünïcode \\ \"label\"": [(t, k / 3) for k, t in enumerate(beat)],
        "left out": [(t, 1.0) for t in beat],
    }  # fmt: skip


def openmetrics(path: Path) -> None:
    """Write the series as text."""
    lines = []
    for name, samples in series().items():
        escaped = name.replace("\\", "\\\\").replace('"', '\\"')
        for time, value in samples:
            text = {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, repr(value))
            lines.append(f'recorded{{series="{escaped}",job="made up"}} {text} {time / 1000:.3f}')
    path.write_text("\n".join([*lines, "# EOF\n"]), encoding="utf-8")


def main() -> None:
    """Record."""
    from tests.data.fetch.prometheus.servers import backfilled, prometheus, victoria_metrics

    start_ms, end_ms = START_S * 1000, (START_S + SECONDS) * 1000
    RECORDED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        text = Path(name) / "recorded.om"
        openmetrics(text)
        with prometheus(Path(name) / "prometheus", backfilled(Path(name) / "blocks", [text])) as url:
            for streamed, file in ((True, "chunks.bin"), (False, "samples.bin")):
                body = remote_read_request(METRIC, start_ms, end_ms, streamed=streamed)
                answer = httpx.post(f"{url}/api/v1/read", content=body, headers=HEADERS)
                (RECORDED / file).write_bytes(answer.content)
            form = {"query": f"{METRIC.selector}[{SECONDS * 1000}ms]", "time": f"{(end_ms - 1) / 1000:.3f}"}
            (RECORDED / "query.json").write_bytes(httpx.post(f"{url}/api/v1/query", data=form).content)
        with victoria_metrics(Path(name) / "victoria", [text]) as url:
            form = {"match[]": METRIC.selector, "start": str(START_S), "end": f"{(end_ms - 1) / 1000:.3f}"}
            (RECORDED / "export.jsonl").write_bytes(httpx.post(f"{url}/api/v1/export", data=form).content)


if __name__ == "__main__":
    main()
