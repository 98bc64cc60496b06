"""``python -m offloadbench.child TOOL FOLDER MEMORY BATCH``: train, one step for each request.

The reply has seconds of the step, CPU seconds of all threads, bytes from and to the disk, the
peak of resident memory above that after the imports, and the loss.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from common.child import serve
from zerobench.child import CONTEXT, WORDS, Model, config, prepare, spent

if TYPE_CHECKING:
    from collections.abc import Callable

LR = 1e-4


def resident(name: str) -> int:
    """Return ``VmRSS`` or ``VmHWM`` of this process in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))


def loss_of(model: torch.nn.Module, text: torch.Tensor) -> torch.Tensor:
    """Return the loss of a batch."""
    logits = model(text[:, :-1]).flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, text[:, 1:].flatten())


def step_with(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a step of a torch optimizer."""

    def step(text: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, text)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def torch_in_memory(_folder: str, _memory: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Everything in memory."""
    model = Model()
    return step_with(model, torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0, foreach=False))


def ours(*, in_backward: bool) -> Callable[[str, str], Callable[[torch.Tensor], torch.Tensor]]:
    """``deepnvme.offload``."""

    def make(folder: str, memory: str) -> Callable[[torch.Tensor], torch.Tensor]:
        import deepnvme  # noqa: PLC0415

        settings = {"lr": LR, "weight_decay": 0, "in_backward": in_backward}
        model, optimizer = deepnvme.offload(Model(), torch.optim.AdamW, memory=memory, swap_dir=folder, **settings)
        train = step_with(model, optimizer)

        def step(text: torch.Tensor) -> torch.Tensor:
            loss = train(text)
            print(optimizer.plan, file=sys.stderr, flush=True)
            return loss

        return step

    return make


def activations_only(folder: str, memory: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """``deepnvme.offload_activations``, and everything else in memory."""
    import deepnvme  # noqa: PLC0415

    model = Model()
    activations = deepnvme.offload_activations(folder, memory=memory)
    activations.wrap(model)
    return step_with(model, torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0, foreach=False))


def deepspeed_with(op: str) -> Callable[[str, str], Callable[[torch.Tensor], torch.Tensor]]:
    """ZeRO-3 with optimizer and parameters on disk, on DeepSpeed's op or on ours."""

    def make(folder: str, _memory: str) -> Callable[[torch.Tensor], torch.Tensor]:
        deepspeed = prepare(op)
        settings = config("both-pipelined", folder)
        settings["train_micro_batch_size_per_gpu"] = int(sys.argv[4])
        settings["optimizer"] = {"type": "Adam", "params": {"lr": LR, "weight_decay": 0}}
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = Model()
        engine, *_ = deepspeed.initialize(model=model, config=settings, model_parameters=list(model.parameters()))

        def step(text: torch.Tensor) -> torch.Tensor:
            loss = loss_of(engine, text)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return step

    return make


TOOLS = {
    "deepnvme": ours(in_backward=False),
    "deepnvme in backward": ours(in_backward=True),
    "torch in memory": torch_in_memory,
    "only activations": activations_only,
    "DeepSpeed": deepspeed_with("DeepSpeed"),
    "DeepSpeed on deepnvme": deepspeed_with("deepnvme"),
}


def make() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that makes a step."""
    tool, folder, memory, batch = sys.argv[1:]
    torch.manual_seed(1)
    before = resident("VmRSS")
    step = TOOLS[tool](folder, memory)
    generator = torch.Generator().manual_seed(2)

    def answer(_: dict[str, Any]) -> dict[str, Any]:
        text = torch.randint(0, WORDS, (int(batch), CONTEXT + 1), generator=generator)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        began = spent()
        loss = step(text)
        took = [after - at_start for at_start, after in zip(began, spent(), strict=True)]
        fields = dict(zip(("step_s", "cpu_s", "read_bytes", "write_bytes"), took, strict=True))
        return {**fields, "loss": loss.item(), "resident_bytes": resident("VmHWM") - before}

    return answer


if __name__ == "__main__":
    serve(make)
