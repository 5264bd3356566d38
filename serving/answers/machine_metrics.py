"""Shows each machine as metrics for Prometheus: limit, what is reclaimable of it, and the outcomes of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from numpy.typing import NDArray
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from reclaim.data.schema import RESOURCES
from reclaim.serving.monitoring.metrics import PREFIX
from reclaim.training.margins.margin import MARGIN_NAMES

if TYPE_CHECKING:
    from reclaim.serving.answers.machine_sums import MachineSums

_LIMIT: Final = "Limits of the machine's tasks, in the cell's unit."
_RECLAIMABLE: Final = "Limits of the machine's tasks less their peak within the horizon, in the cell's unit."
_ANSWERS: Final = "Answers for the machine whose horizon has passed with it measured."
_VIOLATIONS: Final = "Answers for the machine whose reservation was exceeded by the peak."


def as_metrics(found: MachineSums, margin: str) -> bytes:
    """Return the metrics of all machines under a margin, one of ``MARGIN_NAMES``, in Prometheus' text format.

    Outcomes are among them where they are counted over the horizon.
    """
    b, gauge, counter = MARGIN_NAMES.index(margin), GaugeMetricFamily, CounterMetricFamily
    reclaimable = found.limit - found.peaks()[b]
    shown = [
        _metric(found, gauge, "limit_amount", _LIMIT, found.limit),
        _metric(found, gauge, "reclaimable_amount", _RECLAIMABLE, reclaimable, margin),
    ]
    if found.counted:
        judged, violated = found.margins.outcomes_of(found.machine)
        shown += [
            _metric(found, counter, "answers", _ANSWERS, judged),
            _metric(found, counter, "violations", _VIOLATIONS, violated[:, b], margin),
        ]
    return generate_latest(_Families(shown))


def _metric(
    found: MachineSums, kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str,
    values: NDArray[Any], margin: str | None = None,
) -> Metric:  # fmt: skip
    """Return a metric of each machine and resource, and of a margin where one is given; values (m, n_resources)."""
    of = {} if margin is None else {"margin": margin}
    family = kind(f"{PREFIX}machine_{name}", text, labels=("machine_id", *of, "resource"))
    for machine, amounts in zip(map(str, found.machine.tolist()), values.tolist(), strict=True):
        for resource, amount in zip(RESOURCES, amounts, strict=True):
            family.add_metric((machine, *of.values(), resource), amount)
    return family


class _Families(Collector):
    """Metrics that are there already, as a source of them."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        return self._families
