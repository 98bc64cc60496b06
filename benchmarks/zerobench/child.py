"""``python -m zerobench.child OP ROW FOLDER``: train a language model, one step for each request.

Without arguments, compile DeepSpeed's Adam and exit.

The reply has seconds of the step and of its forward and backward passes, CPU seconds of all
threads, bytes from and to the disk, the loss.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from common.child import serve

if TYPE_CHECKING:
    from collections.abc import Callable

# Each block is 12 * WIDTH * WIDTH weights, and there are two tables of WORDS * WIDTH.
WIDTH, LAYERS, WORDS, CONTEXT = 1024, 4, 8192, 32
# The queue and block as storagebench found best for DeepSpeed's handle.
AIO = {
    "block_size": 1 << 20,
    "queue_depth": 32,
    "intra_op_parallelism": 2,
    "single_submit": False,
    "overlap_events": True,
}
# The state on disk in each row, and whether optimizer states are read ahead and written behind.
ROWS = {
    "both": (True, False),
    "both-pipelined": (True, True),
    "optimizer": (False, False),
    "optimizer-pipelined": (False, True),
}


class Block(torch.nn.Module):
    """Attention and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.joined = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the attention and the perceptron."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, 16, -1).permute(2, 0, 3, 1, 4)
        seen = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.joined(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        y: torch.Tensor = x + self.narrow(torch.nn.functional.gelu(self.wide(self.norm_2(x))))
        return y


class Model(torch.nn.Module):
    """Predicts the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(WORDS, WIDTH), torch.nn.Embedding(CONTEXT, WIDTH)
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.blocks(self.words(text) + self.places(torch.arange(CONTEXT)))
        y: torch.Tensor = self.head(self.norm(x))
        return y


def config(row: str, folder: str) -> dict[str, Any]:
    """Return the config of a row, the same for both ops."""
    has_parameters, is_pipelined = ROWS[row]
    where = {"device": "nvme", "nvme_path": folder}
    zero: dict[str, Any] = {
        "stage": 3,
        "sub_group_size": 8_000_000,
        # Reading parameters ahead stops DeepSpeed 0.19.8 on its own op.
        "stage3_prefetch_bucket_size": 0,
        # Parameters come and go, so that they are read in every pass.
        "stage3_max_live_parameters": 20_000_000,
        "stage3_max_reuse_distance": 0,
        "offload_optimizer": {
            **where,
            "buffer_count": 14,
            "pipeline_read": is_pipelined,
            "pipeline_write": is_pipelined,
        },
    }
    if has_parameters:
        zero["offload_param"] = {**where, "buffer_count": 20, "buffer_size": 13_000_000, "max_in_cpu": 0}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 1 << 30,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
        "aio": AIO,
    }


def spent() -> tuple[float, float, int, int]:
    """Return the clock, CPU seconds of all threads, and the kernel's counts of bytes read and written."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
    return (
        time.perf_counter(),
        usage.ru_utime + usage.ru_stime,
        int(io["read_bytes"]),
        int(io["write_bytes"]),
    )


def prepare(op: str) -> Any:
    """Return DeepSpeed on its own op or on ours, with this process alone in its group."""
    if op == "deepnvme":
        import deepnvme.deepspeed  # noqa: PLC0415

        deepnvme.deepspeed.install()
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "deepspeed-ops"))
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(alone)
    import deepspeed  # noqa: PLC0415

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    return deepspeed


def make() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that makes a step."""
    op, row, folder = sys.argv[1:]
    deepspeed = prepare(op)
    torch.manual_seed(1)
    settings = config(row, folder)
    # Parameters that are on disk must be created there.
    with deepspeed.zero.Init(config_dict_or_path=settings, enabled=ROWS[row][0]):
        model = Model()
    engine, *_ = deepspeed.initialize(model=model, config=settings, model_parameters=list(model.parameters()))
    generator = torch.Generator().manual_seed(2)

    def answer(_: dict[str, Any]) -> dict[str, Any]:
        text = torch.randint(0, WORDS, (1, CONTEXT + 1), generator=generator)
        began = spent()
        loss = torch.nn.functional.cross_entropy(engine(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        engine.backward(loss)
        computed = time.perf_counter()
        engine.step()
        took = [after - before for before, after in zip(began, spent(), strict=True)]
        fields = dict(zip(("step_s", "cpu_s", "read_bytes", "write_bytes"), took, strict=True))
        return {**fields, "loss": loss.item(), "passes_s": computed - began[0]}

    return answer


if __name__ == "__main__":
    if len(sys.argv) == 1:
        prepare("DeepSpeed").ops.op_builder.CPUAdamBuilder().load()
    else:
        serve(make)
