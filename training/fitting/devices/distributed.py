"""Joins the processes that fit one network, and averages what they compute."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from reclaim.data.errors import ConfigError

INTERFACES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that name the interface over which processes talk."""
_JOINS: Final = itertools.count()
"""Numbers the groups of this process: torchrun's store keeps the addresses of earlier ones, whose ports are closed."""
Value = TypeVar("Value")


@dataclass(frozen=True)
class Ranks:
    """The processes that fit one network together; one alone is the rule.

    Attributes
    ----------
    rank : int
        This process, from 0.
    size : int
        All of them.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls) -> Ranks:
        """Return the processes that ``joined`` brought together, else only this one."""
        together = dist.is_available() and dist.is_initialized()
        return cls(dist.get_rank(), dist.get_world_size()) if together else cls()

    def of_first(self, value: Value) -> Value:
        """Return the first rank's value on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    @property
    def first(self) -> bool:
        """True in the one process that writes and logs."""
        return self.rank == 0

    def wrapped(self, network: nn.Module, device: torch.device) -> nn.Module:
        """Return the network whose gradients, after each backward pass, are the mean over the ranks."""
        if self.size == 1:
            return network
        # the buffers are constants, alike on all ranks: nothing to send with each step
        return DistributedDataParallel(
            network, device_ids=[device] if device.type == "cuda" else None, forward_sync_buffers=False
        )

    def shares(self, *values: Tensor, weight: Tensor | None = None) -> list[Tensor | float]:
        """Return the factors for averages over this rank's known rows that make gradients exact.

        A loss divides its sum over the rows of a batch by how many are known, and ranks know different numbers: the
        mean of their averages is not the average over all. Multiplied with ``size * known here / known on all ranks``,
        it is, and so are its gradients.

        Parameters
        ----------
        *values : Tensor, shape (B, ...)
            This rank's rows; NaN unknown.
        weight : Tensor, shape (B,), or None
            How much each counts in the averages; None: all alike.

        Returns
        -------
        list of Tensor, shape (...), in the order given; 1.0 each where there is one process.
        """
        if self.size == 1:
            return [1.0] * len(values)
        each = torch.ones(len(values[0]), device=values[0].device) if weight is None else weight
        here = [(torch.isfinite(v) * each.reshape(-1, *(1,) * (v.ndim - 1))).sum(0) for v in values]
        everywhere = torch.cat([counts.flatten() for counts in here])
        dist.all_reduce(everywhere)
        parts = torch.split(everywhere, [counts.numel() for counts in here])
        return [
            self.size * counts / total.reshape(counts.shape).clamp(min=1)
            for counts, total in zip(here, parts, strict=True)
        ]

    def total(self, value: float, device: torch.device) -> float:
        """Return the sum of a number over the ranks, the same on each to the bit."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(tensor)
        return float(tensor)


def own_device(device: torch.device) -> torch.device:
    """Return this process's own device of the kind: next to others the GPU of its local rank.

    Raises
    ------
    ConfigError
        There are more processes here than GPUs, or one GPU is named for all of them.
    """
    if device.type != "cuda" or _size() == 1:
        return device
    if device != torch.device("cuda"):
        raise ConfigError(
            f"fit.device: {device} is one GPU, and {_size()} processes fit together; cuda gives each its own"
        )
    rank, present = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if rank >= present:
        raise ConfigError(f"fit.device: process {rank} of this machine has no GPU; --nproc-per-node {present} has")
    return torch.device("cuda", rank)


@contextmanager
def joined(device: torch.device, *, go: bool = True) -> Iterator[bool]:
    """Work together with the other processes of torchrun inside the block; without torchrun nothing is changed.

    They talk over gloo on the CPU and NCCL on GPUs; on one machine over the loopback interface, unless
    ``GLOO_SOCKET_IFNAME`` or ``NCCL_SOCKET_IFNAME`` name another.

    Parameters
    ----------
    device : torch.device
        This process's own.
    go : bool
        The first rank's decision, which every rank receives.
    """
    if _size() == 1:
        yield go
        return
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        for variable in INTERFACES:
            os.environ.setdefault(variable, loopback())
    store, rank, size = next(rendezvous("env://"))
    with_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if with_gpu else "gloo",
        store=PrefixStore(f"reclaim/{next(_JOINS)}", store),
        rank=rank, world_size=size, device_id=device if with_gpu else None,
    )  # fmt: skip
    try:
        word = torch.tensor(int(go), device=device)
        dist.broadcast(word, src=0)
        yield bool(word)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def loopback() -> str:
    """Return the name of this machine's loopback interface."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _size() -> int:
    """Return how many processes Ray Train joined or torchrun started; 1 without, whatever else set ``WORLD_SIZE``."""
    if not dist.is_available():
        return 1
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1
