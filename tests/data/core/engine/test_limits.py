"""Cores and memory of a process: those of its machine, or fewer in a control group with limits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from reclaim.data.core.engine import workers
from reclaim.data.core.engine.limits import cores, memory_mib
from reclaim.data.core.engine.workers import Engine, plan_workers

GIB = 1 << 30


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with ``proc`` and ``cgroup``, of a machine with 64 cores and 256 GiB."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 256 * GIB // 4096, "SC_PAGE_SIZE": 4096}.__getitem__)
    return tmp_path


def _write(root: Path, group: str, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in ({"proc/self/cgroup": group} | {f"cgroup/{name}": text for name, text in files.items()}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root / "proc", root / "cgroup"


V2 = "0::/kubepods/pod1/c1\n"
V1 = "5:memory:/kubepods/pod1\n4:cpu,cpuacct:/kubepods/pod1\n1:name=systemd:/\n0::/\n"


@pytest.mark.parametrize(
    ("group", "files", "n"),
    [
        (V2, {}, 64),
        (V2, {"kubepods/pod1/c1/cpu.max": "max 100000\n"}, 64),
        (V2, {"kubepods/pod1/c1/cpu.max": "200000 100000\n"}, 2),
        (V2, {"kubepods/pod1/c1/cpu.max": "210000 100000\n"}, 3),
        (V2, {"kubepods/pod1/c1/cpu.max": "50000 100000\n"}, 1),
        (V2, {"kubepods/pod1/c1/cpu.max": "max 100000\n", "kubepods/pod1/cpu.max": "400000 100000\n"}, 4),
        (V2, {"cpu.max": "300000 100000\n"}, 3),  # a container that sees its group as the outermost
        ("0::/\n", {"unified/cpu.max": "300000 100000\n"}, 3),
        (V2, {"kubepods/pod1/c1/cpu.max": "9900000 100000\n"}, 64),
        (V1, {"cpu,cpuacct/kubepods/pod1/cpu.cfs_quota_us": "-1\n",
              "cpu,cpuacct/kubepods/pod1/cpu.cfs_period_us": "100000\n"}, 64),
        (V1, {"cpu/kubepods/cpu.cfs_quota_us": "150000\n", "cpu/kubepods/cpu.cfs_period_us": "50000\n"}, 3),
        (V1, {"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
    ],
)  # fmt: skip
def test_cores_are_those_that_the_control_groups_pay_for_rounded_up(
    kernel: Path, group: str, files: dict[str, str], n: int
) -> None:
    assert cores(*_write(kernel, group, files)) == n


@pytest.mark.parametrize(
    ("group", "files", "mib"),
    [
        (V2, {"kubepods/pod1/c1/memory.max": "max\n"}, 256 * 1024),
        (V2, {"kubepods/pod1/c1/memory.max": f"{4 * GIB}\n"}, 4096),
        (V2, {"kubepods/pod1/c1/memory.max": f"{4 * GIB}\n", "kubepods/memory.high": f"{2 * GIB}\n"}, 2048),
        (V2, {"memory.max": f"{GIB}\n"}, 1024),
        (V1, {"memory/kubepods/pod1/memory.limit_in_bytes": "9223372036854771712\n"}, 256 * 1024),
        (V1, {"memory/kubepods/pod1/memory.limit_in_bytes": f"{3 * GIB}\n"}, 3072),
        (V1, {"cpu,cpuacct/kubepods/pod1/memory.limit_in_bytes": f"{3 * GIB}\n"}, 256 * 1024),
    ],
)
def test_memory_is_the_least_limit_of_the_control_groups(
    kernel: Path, group: str, files: dict[str, str], mib: int
) -> None:
    assert memory_mib(*_write(kernel, group, files)) == mib


def test_without_control_groups_the_machine_is_the_limit(kernel: Path) -> None:
    assert cores(kernel / "proc", kernel / "cgroup") == 64
    assert memory_mib(kernel / "proc", kernel / "cgroup") == 256 * 1024


def test_this_process_may_use_a_core_and_some_memory() -> None:
    assert 1 <= cores() <= len(os.sched_getaffinity(0))
    assert 1 <= memory_mib() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20


@pytest.mark.parametrize(
    ("n_cores", "mib", "count"), [(64, 256 * 1024, 64), (64, 4096, 8), (2, 256 * 1024, 2), (64, 100, 1)]
)
def test_an_engine_has_a_worker_for_each_core_as_the_memory_allows_or_as_many_as_asked_for(
    n_cores: int, mib: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "cores", lambda: n_cores)
    monkeypatch.setattr(workers, "memory_mib", lambda: mib)
    assert Engine().count == count
    assert Engine("processes", 100).count == 100
    assert plan_workers("processes", 0, 1 << 20, 0)[0] == n_cores
