"""Records a step of training on CUDA once and repeats it by one launch, as small networks mostly wait for launches."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

log = logging.getLogger(__name__)

Step = Callable[[Tensor], Tensor]
"""Takes the positions of a batch, steps the weights and returns the loss, which the next call may overwrite."""
_WARM_UP: Final = 3
"""Steps before the recording, in which CUDA's libraries choose their kernels."""
_SAME: Final = 1e-3
"""Largest relative difference between a loss as recorded and as computed step by step."""


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate; one that is a tensor stays where a recording reads it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def recorded_step(step: Step, optimizer: torch.optim.Optimizer, batch_size: int, device: torch.device) -> Step:
    """Return a step that repeats a recording for whole batches; the step itself where the two do not agree.

    Recording takes steps, so weights and moments are put back. Two steps are then compared, as recorded and one by one,
    so that a recording that computes something else is never trained with.

    Parameters
    ----------
    step : callable
        Reads nothing but its argument and tensors that stay where they are.
    optimizer : Optimizer
        Capturable, its learning rate a tensor.
    batch_size : int
        Rows of a whole batch; a smaller one is stepped as it is.
    device : torch.device
    """
    kept = _Kept(optimizer)
    positions = torch.arange(batch_size, device=device)
    try:
        repeat = _record(step, positions)
    except RuntimeError as error:
        kept.put_back()
        _draw_outside_recordings(device)
        log.warning("steps are not recorded on %s: %s", device, str(error).partition("\n")[0])
        return step
    losses = []
    for one in (step, lambda _: repeat()):
        kept.put_back()
        torch.manual_seed(0)  # both draw the same dropout
        losses.append([float(one(positions)) for _ in range(2)])  # the second shows the first's effect
    kept.put_back()
    if not all(math.isclose(a, b, rel_tol=_SAME) for a, b in zip(*losses, strict=True)):
        log.warning("steps are not recorded on %s: losses %s, recorded %s", device, *losses)
        return step

    def stepped(batch: Tensor) -> Tensor:
        if len(batch) != batch_size:
            return step(batch)
        positions.copy_(batch)
        return repeat()

    return stepped


def _record(step: Step, positions: Tensor) -> Callable[[], Tensor]:
    """Record a step on the positions that a tensor holds; return what repeats it, and returns its loss."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            step(positions)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(positions)

    def repeat() -> Tensor:
        graph.replay()
        return loss

    return repeat


def _draw_outside_recordings(device: torch.device) -> None:
    """Give the device's random numbers a state of their own.

    A recording that breaks off leaves the one before waiting for its end: no dropout could be drawn in this process.
    """
    if device.type == "cuda":
        own = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[own].graphsafe_set_state(torch.Generator(device))


class _Kept:
    """Weights and moments of an optimizer, to put back where they are."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._weights = [(p, p.detach().clone()) for group in optimizer.param_groups for p in group["params"]]
        self._moments = {p: {k: v.clone() for k, v in of.items()} for p, of in optimizer.state.items()}

    def put_back(self) -> None:
        """Restore in place: a recording reads these very tensors; moments that were not there are zero again."""
        with torch.no_grad():
            for weight, before in self._weights:
                weight.copy_(before)
            for weight, moments in self._optimizer.state.items():
                for name, value in moments.items():
                    before = self._moments.get(weight, {}).get(name)
                    value.zero_() if before is None else value.copy_(before)
