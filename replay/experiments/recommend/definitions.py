"""Defines the terms of a recommendation."""

from __future__ import annotations

from math import isnan
from typing import Final

from reclaim.data.core.prose import counted
from reclaim.replay.experiments.recommend.policy import Policy, RecommendConfig

PRESENT: Final = "present request"
"""Contender that leaves every request as it is."""


def definitions(config: RecommendConfig, policy: Policy, *, kubernetes: bool) -> dict[str, str]:
    """Return the meaning of the terms of the results."""
    days = counted(config.hold_days, "day")
    of_request = "What a task asks for and is placed by"
    return {
        "workload": "A collection: tasks that share one request. In Kubernetes, one container of a Deployment, "
        "StatefulSet, DaemonSet or Job, and its pods are the tasks." if kubernetes else "A collection: tasks that "
        "share one request.",
        "request": f"{of_request}; the limit caps it." if kubernetes else f"{of_request}. This dataset has no requests "
        "apart from limits, so the limit is taken as the request.",
        "recommended request": f"One number for all tasks of a workload, for the next {days}; run the command again "
        f"after {days}. A statistical estimator sees one series per workload: of each slot of five minutes, or of the "
        "usual window where that is longer, the largest demand of any task. A model answers for each task that ran in "
        f"the last day, {config.horizon_s / 3600:.0f} h ahead, and the largest answer counts. Every "
        "answer is multiplied with a margin, or made at a price, found on the validation part: the least with which "
        f"{config.of_requests[0]:.2%} of its task-windows need more CPU than their request, "
        f"and {config.of_requests[1]:.2%} more memory.",
        "the estimator that won": "Of each resource, of those that can keep the budget on the validation part, the one "
        "that reclaims most of the limits there, where what it does not know counts as the limit. Its settings were "
        "chosen there, too. The test part chooses nothing.",
        "violation": "Share of the task-windows of the test part in which a task needs more than its request: of CPU "
        "the 90th percentile within the window, of memory the largest usage, each at most the limit. It is the "
        "back-test: the request of each workload set at the beginning of the test part and every "
        f"{days.removeprefix('1 ')} after, from what was known then, and judged until it was set again. Tasks that "
        "began later have the same request. "
        "Where an autoscaler keeps the request, the violations of a workload are in its own line and in no total.",
        "as requested": "The same share under the requests that the tasks had then.",
        "set once": "The same back-test with the request of the first time kept to the end of the test part.",
        "reclaimable": "Request less recommended request: in the files for programs of one task, in tables and totals "
        "of the tasks that run at the end of the history; of a workload that is not running, those that ran last. "
        "The request of a workload is the largest of its tasks; where they differ, reclaimable is from the mean."
        + (" Jobs, bare and static pods that are over count in no sum, because those of a week never ran together. "
           "Containers that their pods no longer have count in none either." if kubernetes else ""),
        "unknown": "A request stays where there is no answer yet, and is not lowered before the workload has "
        f"{counted(config.history_days, 'day')} since its first window and {counted(config.ran_hours, 'hour')} of "
        "windows, nor where the test part has no window of it, so that the back-test says nothing.",
        "over budget": f"A request is not lowered where its workload violated more than {config.most_over:g} times the "
        "budget, beyond the noise; in a back-test of under four days the rate itself counts. Nor is any where all "
        f"workloads together violated more than {config.most_over_in_all:g} times the budget.",
        "within the noise": "More than the budget violates, and the interval reaches down to the budget. Of a single "
        "workload there is no interval, and the verdict is unknown.",
        "least change": f"A request stays where the recommended one is less than {config.min_change:.0%} away.",
        "out of memory": "After a task ended out of memory the memory request is at least "
        f"{config.oom_bump:.3g} times the limit that it had"
        + (" and 100 MiB more than it" if policy.oom_bump_by else "")
        + ("; where no limit is enforced, than the larger of its request and its usage then" if kubernetes else "")
        + ", as long as the history remembers it."
        + ("" if isnan(policy.largest_memory) else " It is no more than the largest machine has, above which no task "
           "is placed.")
        + " A request above the limit asks for a limit that is raised as well.",
        "spread": "Largest peak of a task over the median one, of the tasks of the last day: 1 where all are alike. "
        "One request for all is wasteful where it is large.",
        "oracle": "Requests, each time, the largest demand until the next time. It sees the future, and bounds what "
        "never violates.",
        PRESENT: "Every request as it is.",
        "interval": f"{config.confidence:.0%} percentile interval of {config.draws} bootstrap resamples, seed "
        f"{config.seed}: of whole workloads for all together, of whole days for one workload. Fewer than ten days "
        "make it too narrow, and where no window violates it is zero: that is no proof of none.",
    }  # fmt: skip
