"""Training in two processes on loopback: the same gradients and weights as in one, and one of them alone writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from reclaim.data.errors import ConfigError
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.synthetic.job import SyntheticCellConfig, write_cell
from reclaim.features.build import build_features
from reclaim.training.fitting import network as fit
from reclaim.training.fitting.devices.distributed import Ranks, joined, own_device
from reclaim.training.fitting.network import fit_network
from reclaim.training.fitting.samples import Samples
from reclaim.training.fitting.train import assists
from reclaim.training.models.network import Scaling, SurvivalNetwork
from reclaim.training.models.survival import NOW
from reclaim.training.models.trees import Rows
from reclaim.training.settings import FitConfig

CONFIG = FitConfig(width=16, depth=1, epochs=3, batch_size=128, learning_rate=1e-2, dropout=0.0, device="cpu")

SAME = 2e-5
"""Sums of float32 in another order, carried through three epochs of steps that divide by a small second moment."""

PROCESS = """
import json, os, sys
from dataclasses import replace
from pathlib import Path
import torch
from safetensors.torch import save_file
from reclaim.training.fitting.devices.distributed import Ranks, joined
from reclaim.training.fitting.network import fit_network

sys.path.insert(0, TESTS)
from test_distributed import CONFIG, gradients, killed_after_the_first, rows

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
seeds, seed_with = [], torch.manual_seed
for _ in range(5):
    with joined(torch.device("cpu"), go=rank != 0) as go:
        assert not go, "the first rank decides"
with joined(torch.device("cpu"), go=rank == 0) as go:
    assert go, "the first rank decides"
    assert Ranks.current() == Ranks(rank, 2)
    tensors = {f"gradient.{k}": v for k, v in gradients().items()}
    train, valid = rows(1025, 0), rows(20_000, 1)
    for name, at in (("whole", None), ("resumed", folder / "of_one")):
        result = fit_network(train, valid, CONFIG, seed=3, checkpoints=at)
        tensors |= {f"{name}.{k}": v for k, v in result.network.state_dict().items()}
    torch.manual_seed = lambda seed: (seeds.append(seed), seed_with(seed))[1]
    dropped = fit_network(train, valid, replace(CONFIG, dropout=0.5), seed=3)
    tensors |= {f"dropped.{k}": v for k, v in dropped.network.state_dict().items()}
    killed_after_the_first(train, valid, folder / "of_two")
save_file(tensors, folder / f"{rank}.safetensors")
(folder / f"{rank}.json").write_text(json.dumps({"history": result.history, "seeds": seeds}))
"""


class _KilledError(Exception):
    pass


def rows(n: int, seed: int) -> Rows:
    """Return rows of which the ranks know different numbers: every other one lacks most targets."""
    rng = np.random.default_rng(seed)
    x = np.zeros((n, NOW.max() + 1), np.float32)
    x[:, :3] = rng.random((n, 3))
    x[:, NOW] = x[:, :1]
    y = 0.5 * x[:, 0, None, None] + 0.5 * x[:, 1, None, None] * rng.random((n, 3, 3))
    y[::2][rng.random(y[::2].shape) < 0.8] = np.nan
    x[rng.random(n) < 0.2, 2] = np.nan
    oom = np.where(rng.random((n, 3)) < 0.3, np.nan, rng.random((n, 3)) < 0.1)
    return Rows(x, y.astype(np.float32), oom.astype(np.float32))


def gradients() -> dict[str, Tensor]:
    """Return the loss's gradients over a batch, of which each rank takes every other row."""
    ranks, samples = Ranks.current(), Samples.of_rows(rows(101, 5))
    generator = torch.Generator().manual_seed(1)
    scaling = Scaling(*(torch.full((samples.widths[0],), v) for v in (0.3, 0.5, -8.0, 8.0)))
    network = SurvivalNetwork(scaling, n_targets=3, n_horizons=3, width=8, depth=1)
    network.initialise(generator)
    data = fit._Data(samples, samples, CONFIG, ranks)
    batch = samples.take(torch.arange(101)[ranks.rank :: ranks.size])
    wrapped = ranks.wrapped(network, samples.device)  # freed before the backward pass, it would reduce nothing
    data.loss(wrapped, batch, ranks).backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return {k: v.grad for k, v in network.named_parameters() if v.grad is not None}


def killed_after_the_first(train: Rows, valid: Rows, checkpoints: Path) -> None:
    """Fit one epoch of ``CONFIG`` and leave its checkpoint."""

    def kill(epoch: int, loss: float) -> None:
        raise _KilledError(f"{epoch}, {loss}")

    with pytest.raises(_KilledError, match="0, "):
        fit_network(train, valid, CONFIG, seed=3, checkpoints=checkpoints, on_epoch=kill)


def _torchrun(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words],
        cwd=cwd, env={k: v for k, v in os.environ.items() if k != "MLFLOW_TRACKING_URI"},
        capture_output=True, text=True, timeout=1_200, check=False,
    )  # fmt: skip


def _close(mine: dict[str, Tensor], theirs: dict[str, Tensor], prefix: str, far: float) -> None:
    torch.testing.assert_close(mine, {name: theirs[f"{prefix}.{name}"] for name in mine}, rtol=far, atol=far)


@pytest.mark.slow
def test_two_ranks_end_with_the_weights_of_one_and_go_on_from_each_other(tmp_path: Path) -> None:
    train, valid = rows(1025, 0), rows(20_000, 1)  # the last batch is 1 row: the second rank has none
    killed_after_the_first(train, valid, tmp_path / "of_one")
    script = tmp_path / "process.py"
    script.write_text(PROCESS.replace("TESTS", repr(str(Path(__file__).parent))))
    done = _torchrun(str(script), str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = (load_file(tmp_path / f"{rank}.safetensors") for rank in (0, 1))
    assert all(torch.equal(first[k], second[k]) for k in first)  # to the bit, with dropout too
    _close(gradients(), first, "gradient", 1e-6)
    whole = fit_network(train, valid, CONFIG, seed=3)
    _close(whole.network.state_dict(), first, "whole", SAME)
    _close(whole.network.state_dict(), first, "resumed", SAME)
    resumed = fit_network(train, valid, CONFIG, seed=3, checkpoints=tmp_path / "of_two")
    assert len(resumed.history) == CONFIG.epochs
    _close(resumed.network.state_dict(), first, "whole", SAME)
    facts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for key in ("train_loss", "valid_loss"):
        losses = [[epoch[key] for epoch in history] for history in (whole.history, *(f["history"] for f in facts))]
        assert losses[1] == losses[2]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert not set(facts[0]["seeds"]) & set(facts[1]["seeds"])  # each draws dropout of its own


@pytest.mark.slow
def test_torchrun_trains_one_model_and_one_process_finds_it_trained_and_ray_trains_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    write_cell(tmp_path / "cell", SyntheticCellConfig(machines=1, days=1.0))
    build_features(ingest(tmp_path / "cell", tmp_path / "dataset", IngestConfig()).dataset)
    words = ["train", "dataset", "--json"]
    for setting in ("width=8", "depth=1", "epochs=1", "device='cpu'"):
        words += ["--set", f"fit.{setting}"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    done = _torchrun("-m", "reclaim", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(done.stdout)]  # one process alone prints
    reports.append(json.loads(command_line(*words).stdout))
    assert [r["reused"] for r in reports] == [False, True]
    assert [r["version"] for r in reports] == ["1", "1"]
    assert reports[0]["run_id"] == reports[1]["run_id"]
    on_ray = subprocess.run(
        [sys.executable, "-m", "reclaim", *words, "--engine", "ray", "--workers", "2", "--force"],
        cwd=tmp_path, env={k: v for k, v in os.environ.items() if k not in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS")},
        capture_output=True, text=True, timeout=1_200, check=False,
    )  # fmt: skip
    assert on_ray.returncode == 0, on_ray.stderr
    reports.append(json.loads(on_ray.stdout))
    assert (reports[2]["version"], reports[2]["reused"]) == ("2", False)
    weights = [path.read_bytes() for path in tmp_path.glob("mlruns/**/bundle/network.safetensors")]
    assert len(weights) == 2
    assert weights[0] == weights[1]
    assert not (tmp_path / "dataset" / "checkpoints").exists()


def test_without_torchrun_there_is_one_process_and_nothing_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")  # as other launchers set it
    monkeypatch.setenv("RANK", "2")
    assert not assists()
    with joined(torch.device("cpu"), go=False) as go:
        assert go is False
        assert Ranks.current() == Ranks(0, 1)
    assert own_device(torch.device("cuda", 1)) == torch.device("cuda", 1)


def test_under_torchrun_each_process_has_a_gpu_of_its_own_or_an_error_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TORCHELASTIC_RUN_ID", "none"), ("WORLD_SIZE", "4"), ("RANK", "1"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert assists()
    assert own_device(torch.device("cuda")) == torch.device("cuda", 1)
    assert own_device(torch.device("cpu")) == torch.device("cpu")
    with pytest.raises(ConfigError, match="cuda:0 is one GPU, and 4 processes fit together"):
        own_device(torch.device("cuda", 0))
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="process 2 of this machine has no GPU; --nproc-per-node 2 has"):
        own_device(torch.device("cuda"))
