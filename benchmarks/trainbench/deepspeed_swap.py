"""DeepSpeed's optimizer swappers, driven as ZeRO stage 3 drives them in a step.

As in ZeRO, the disk has fp32 master weights and two moments. With fp32 parameters, that is 1.5 times the state of
torch's AdamW. A sub-group is a number of whole parameters with enough elements. Gradients are in memory, as for
deepnvme; ZeRO would read them from disk as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from common.not_offered import NotOffered
from trainbench.steppers import Stepper
from trainbench.tensors import LR, WEIGHT_DECAY, gradients, shapes, weights

# Below it, the swappers leave state in memory.
_GROUP_MIN = 1 << 18
# Three tensors are read, three changed and three written at a time.
_BUFFERS = 9


class Pipelined(Stepper):
    """Reads the next sub-group and writes the last one while one is changed."""

    name = "DeepSpeed, pipelined"
    contract = "fp32 weights and moments on disk, direct; its steps end when all of it is written"
    is_pipelined = True
    trials: tuple[dict[str, int], ...] = (
        {"sub_group": 16_000_000, "queue_depth": 32, "intra_op_parallelism": 2},
        {"sub_group": 4_000_000, "queue_depth": 32, "intra_op_parallelism": 2},
        {"sub_group": 30_000_000, "queue_depth": 32, "intra_op_parallelism": 2},
        {"sub_group": 16_000_000, "queue_depth": 128, "intra_op_parallelism": 2},
        {"sub_group": 16_000_000, "queue_depth": 32, "intra_op_parallelism": 1},
    )

    def open(self) -> None:
        """See the base."""
        try:
            from zerobench.child import AIO, prepare  # noqa: PLC0415

            prepare("DeepSpeed")
            from deepspeed.runtime.swap_tensor import (  # noqa: PLC0415
                partitioned_optimizer_swapper,
                pipelined_optimizer_swapper,
            )
            from deepspeed.runtime.zero.offload_config import (  # noqa: PLC0415
                DeepSpeedZeroOffloadOptimizerConfig,
            )
        except (ImportError, RuntimeError) as error:
            raise NotOffered(f"DeepSpeed does not run here: {error}") from error
        self._make_tensors()
        options = {**self.trials[0], **self.setting.options}
        self._optimizer, self._kernel = _adam(self._masters)
        kind = (
            pipelined_optimizer_swapper.PipelinedOptimizerSwapper
            if self.is_pipelined
            else partitioned_optimizer_swapper.PartitionedOptimizerSwapper
        )
        self._swapper: Any = kind(
            swap_config=DeepSpeedZeroOffloadOptimizerConfig(
                device="nvme",
                nvme_path=self.setting.folder,
                buffer_count=_BUFFERS,
                pipeline_read=self.is_pipelined,
                pipeline_write=self.is_pipelined,
            ),
            aio_config={**AIO, **{key: value for key, value in options.items() if key in AIO}},
            base_folder=str(Path(self.setting.folder) / "zero_stage_3"),
            optimizer=self._optimizer,
            largest_numel=max(flat.numel() for flat in self._flats),
            device="cpu",
            dtype=torch.float32,
            timers=None,
        )
        self._swapper.initialize_parameters(parameters=self._masters, src_tensors=self._flats)
        self._round(self._begin)

    def _make_tensors(self) -> None:
        """Make a flat buffer for each sub-group, in which its parameters are, and another for its gradients."""
        values, slopes = weights(), gradients()
        self._flats, self._slopes, self._masters = [], [], []
        for index, count in enumerate(self._groups()):
            flat = torch.empty(count, dtype=self.setting.dtype)
            values.fill(flat)
            slope = torch.empty(count, dtype=self.setting.dtype)
            slopes.fill(slope)
            self._flats.append(flat)
            # ZeRO casts gradients in the backward pass.
            self._slopes.append(slope.float())
            # ZeRO's master weights, which have memory only while they are swapped in. An optimizer requires a leaf.
            master = torch.empty(0, requires_grad=True)
            master.ds_id = str(index)  # type: ignore[attr-defined]
            self._masters.append(master)

    def _groups(self) -> Iterator[int]:
        options = {**self.trials[0], **self.setting.options}
        wanted, left, count = max(_GROUP_MIN, options["sub_group"]), self.setting.elements, 0
        for shape in shapes(self.setting.elements):
            count += torch.Size(shape).numel()
            left -= torch.Size(shape).numel()
            # The rest makes a group that is large enough to be swapped, or goes with the last one.
            if (count >= wanted and left >= _GROUP_MIN) or left == 0:
                yield count
                count = 0

    def _round(self, change: Any) -> None:
        """Swap in, change and swap out one sub-group after the other."""
        followers: list[torch.Tensor | None] = [*self._masters[1:], None]
        for index, (master, follower) in enumerate(zip(self._masters, followers, strict=True)):
            self._swapper.swap_in_optimizer_state(parameter=master, async_parameter=follower)
            change(index, master)
            self._swapper.swap_out_optimizer_state(parameter=master, async_swap=follower is not None)
            master.grad = None

    def _begin(self, _index: int, master: torch.Tensor) -> None:
        """Create the moments. ZeRO makes a step without gradients for that."""
        step: Any = 0 if self._kernel == "cpu_adam" else torch.tensor(0.0)
        moments = {name: torch.zeros(master.numel()) for name in ("exp_avg", "exp_avg_sq")}
        self._optimizer.state[master] = {"step": step, **moments}

    def _change(self, index: int, master: torch.Tensor) -> None:
        group = self._optimizer.param_groups[0]
        master.grad = self._slopes[index]
        group["params"] = [master]
        self._optimizer.step()
        group["params"] = []
        self._flats[index].copy_(master.data)

    def step(self, rate: float) -> None:
        """See the base."""
        self._optimizer.param_groups[0]["lr"] = rate
        self._round(self._change)

    def close(self) -> None:
        """Release locked memory; the swapper frees it after its last use."""
        del self._swapper

    def parameters(self) -> list[torch.Tensor]:
        """See the base."""
        return self._flats

    def gradients(self) -> list[torch.Tensor]:
        """See the base."""
        return self._slopes

    def settings(self) -> dict[str, Any]:
        """See the base."""
        largest = max(flat.numel() for flat in self._flats)
        return {
            **self.trials[0],
            **super().settings(),
            "groups": len(self._flats),
            "buffer_bytes": _BUFFERS * largest * 4,
            "kernel": self._kernel,
        }


class Partitioned(Pipelined):
    """Reads, changes and writes each sub-group by itself."""

    name = "DeepSpeed, not pipelined"
    is_pipelined = False
    trials = Pipelined.trials[:3]


def _adam(masters: list[torch.Tensor]) -> tuple[torch.optim.Optimizer, str]:
    """Return DeepSpeed's Adam if it was compiled, which takes minutes; otherwise torch's, which is as fast."""
    built = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / "cpu_adam" / "cpu_adam.so"
    if built.exists():
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: PLC0415

        return DeepSpeedCPUAdam(masters, lr=LR, weight_decay=WEIGHT_DECAY), "cpu_adam"
    return torch.optim.AdamW(masters, lr=LR, weight_decay=WEIGHT_DECAY, fused=True), "torch, fused"
