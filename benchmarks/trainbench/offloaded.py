"""A model of transformer blocks that is trained with its parameters on disk, or in memory."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch

from trainbench.protocol import Reply, took
from trainbench.tensors import weights

# Tokens of each batch entry.
TOKENS = 8
_LR = 1e-2


@dataclass(frozen=True)
class Size:
    """A number of blocks, each with 12 times the width squared parameters."""

    width: int
    blocks: int

    @property
    def parameter_bytes(self) -> int:
        """The approximate bytes of all parameters in fp32."""
        return self.blocks * 12 * self.width * self.width * 4


class Model(torch.nn.Module):
    """Transformer blocks, and a loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(
                size.width,
                nhead=max(1, size.width // 64),
                dim_feedforward=4 * size.width,
                dropout=0.0,
                batch_first=True,
                norm_first=True,
            )
            for _ in range(size.blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the last block's result."""
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _model(size: Size) -> Model:
    """Make a model from the numbers that all tools have, in seconds instead of minutes."""
    with torch.device("meta"):
        model = Model(size)
    model.to_empty(device="cpu")
    numbers = weights()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            numbers.fill(parameter.detach().view(-1))
        else:
            parameter.detach().fill_(float("norm" in name and name.endswith("weight")))
    return model


class Trained:
    """One training run, which serves the requests of its worker."""

    _offloading: Any = None

    def open(self, setting: dict[str, Any]) -> Reply:
        """Make ready.

        Args:
            setting: ``width`` and ``blocks`` of the model, entries of a ``batch``, bytes of ``memory`` for
                parameters (0 has all of them there), whether blocks change ``in_backward``, and a ``folder`` for
                what is on disk.
        """
        self._size, self._batch = Size(setting["width"], setting["blocks"]), setting["batch"]
        self._model = _model(self._size)
        self._optimizer: torch.optim.Optimizer = torch.optim.SGD(self._model.parameters(), lr=_LR)
        if setting["memory"]:
            import deepnvme  # noqa: PLC0415

            where = {"memory": setting["memory"], "swap_dir": setting["folder"]}
            self._offloading = deepnvme.offload_parameters(self._model, **where)
            self._offloading.attach(self._optimizer, in_backward=setting["in_backward"])
        self._generator = torch.Generator().manual_seed(2)
        # The first step learns the order of the parameters. From the second on it is known.
        losses = [self._step() for _ in range(3)]
        self._settle()
        return {"losses": losses, "parameter_bytes": sum(one.nbytes for one in self._model.parameters())}

    def _step(self) -> float:
        x = torch.randn(self._batch, TOKENS, self._size.width, generator=self._generator)
        loss = self._model(x)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss)

    def _settle(self) -> None:
        """Write the changes that a step leaves to be written during the next one."""
        if self._offloading is not None:
            self._offloading._swapper.flush()  # noqa: SLF001

    def _counted(self) -> dict[str, float]:
        if self._offloading is None:
            return {}
        stats = self._offloading.stats()
        return {name: float(getattr(stats, name)) for name in ("bytes_read", "bytes_written", "stalled_s", "waits")}

    def close(self) -> Reply:
        """Do nothing: the process ends with its row."""
        return {}

    def turn(self, steps: int) -> Reply:
        """Make steps."""
        from zerobench.child import spent  # noqa: PLC0415

        counted = self._counted()
        gc.collect()
        gc.disable()
        before = spent()
        losses = [self._step() for _ in range(steps)]
        self._settle()
        spending = took(before, spent())
        gc.enable()
        own = {name: value - counted[name] for name, value in self._counted().items()}
        return {**spending, "steps": steps, "own": own, "losses": losses}
