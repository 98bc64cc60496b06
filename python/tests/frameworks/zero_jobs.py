"""The jobs of the programs of `test_deepspeed_training`: configs in the form that DeepSpeed's users write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

AIO = {
    "block_size": 1 << 20,
    "queue_depth": 8,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
}
STEPS = 3
# DeepSpeed's own op silently skips transfers to memory that is not aligned to 512 bytes. That happens if a parameter,
# or a rank's part of it, is not a multiple of 512 bytes: with the default width on two ranks, and with `fast_init`.
# This width avoids it.
WIDTH_FOR_THEIRS = 512


def job(name: str, folder: Path, zero: dict[str, Any], *, adam: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """One `deepspeed.initialize` and the steps after it, as `more` says."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": more.pop("accumulation", 1),
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 1_200_000,
            "stage3_param_persistence_threshold": 10_000,
            "stage3_prefetch_bucket_size": 1_000_000,
            **zero,
        },
        "aio": AIO,
        **more.pop("config", {}),
    }
    if more.pop("bf16", False):
        config["bf16"] = {"enabled": True}
    if adam is not None:
        config["optimizer"] = {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.01, **adam}}
        config["zero_force_ds_cpu_optimizer"] = "torch_adam" not in adam
    return {"name": name, "folder": str(folder / name), "steps": STEPS, "config": config, **more}


def offloaded(folder: Path, *, optimizer: str = "", parameters: str = "", **optimizer_settings: Any) -> dict[str, Any]:
    """Return the part of the config that says where state is stored."""
    zero: dict[str, Any] = {}
    if optimizer:
        zero["offload_optimizer"] = {
            "device": optimizer,
            "nvme_path": str(folder),
            "buffer_count": 14,
            **optimizer_settings,
        }
    if parameters:
        buffers = {"buffer_count": 16, "buffer_size": 2_600_000, "max_in_cpu": 0}
        zero["offload_param"] = {"device": parameters, "nvme_path": str(folder), **buffers}
    return zero


def single(folder: Path, adam: dict[str, Any]) -> list[dict[str, Any]]:
    """For one process: name, what is on NVMe, and the job in memory with the same losses (`like`)."""
    made = []

    def add(name: str, like: str, *, bf16: bool = False, more: dict[str, Any] | None = None, **where: Any) -> None:
        zero = offloaded(folder / name, **where)
        own_adam = None if like == "inference in memory" else adam
        made.append(job(name, folder, zero, adam=own_adam, bf16=bf16, like=like, **(more or {})))

    pipelined: dict[str, Any] = {"pipeline_read": True, "pipeline_write": True}
    add("optimizer", "memory", optimizer="nvme")
    add("optimizer, pipelined", "memory", optimizer="nvme", **pipelined)
    # DeepSpeed swaps the parameters of an existing model only in bf16, whatever the config says.
    add("parameters", "memory, bf16", bf16=True, optimizer="cpu", parameters="nvme")
    fast: dict[str, Any] = {"bf16": True, "optimizer": "nvme", "parameters": "nvme", "fast_init": True}
    add("fast_init, not aligned", "memory, bf16", more={"only_ours": True}, **fast)
    add("fast_init", "memory, wide", more={"width": WIDTH_FOR_THEIRS}, **fast)
    add("sharded from birth", "memory", more={"born_sharded": True}, optimizer="nvme", parameters="nvme")
    add("bf16", "memory, bf16", bf16=True, optimizer="nvme", parameters="nvme")
    add("bf16, pipelined", "memory, bf16", bf16=True, optimizer="nvme", parameters="nvme", **pipelined)
    accumulating = {"accumulation": 2}
    add(
        "accumulation",
        "memory, accumulation",
        bf16=True,
        more=accumulating,
        optimizer="nvme",
        parameters="nvme",
        **pipelined,
    )
    inferring = {"inference": True}
    add("inference", "inference in memory", bf16=True, more=inferring, parameters="nvme")
    return made


def in_memory(folder: Path, adam: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the same job without NVMe."""
    zero = offloaded(folder, optimizer="cpu")
    return [
        job("memory", folder, zero, adam=adam),
        job("memory, bf16", folder, zero, adam=adam, bf16=True),
        job("memory, wide", folder, zero, adam=adam, bf16=True, width=WIDTH_FOR_THEIRS),
        job("memory, accumulation", folder, zero, adam=adam, bf16=True, accumulation=2),
        job("inference in memory", folder, {}, adam=None, bf16=True, inference=True),
    ]


def saving(folder: Path, adam: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the jobs of three steps, a checkpoint and two more steps."""
    zero = offloaded(folder / "saving", optimizer="nvme", parameters="nvme")
    writer = {"checkpoint": {"writer": {"type": "fast", "decoupled": False, "io_buffer_size": 1 << 20}}}
    return [
        job("saving", folder, zero, adam=adam, bf16=True, save=str(folder / "checkpoint"), more=2),
        job(
            "saving, writer",
            folder,
            zero,
            adam=adam,
            bf16=True,
            save=str(folder / "checkpoint-writer"),
            more=2,
            config=writer,
        ),
        job(SMALL_GROUPS, folder, small_groups(folder / "saving"), adam=adam, save=str(folder / "small"), more=2),
    ]


SMALL_GROUPS = "small sub-groups"


def small_groups(folder: Path) -> dict[str, Any]:
    """Return a config in which small parameters have sub-groups of their own, which stay in memory."""
    return {**offloaded(folder, optimizer="nvme"), "sub_group_size": 1000}


def loading(folder: Path, adam: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the jobs that continue, each in a new process, since DeepSpeed numbers parameters from its start."""
    zero = offloaded(folder / "loading", optimizer="nvme", parameters="nvme")
    resumed: dict[str, Any] = {"adam": adam, "bf16": True, "skip": STEPS}
    jobs = [
        job("saving", folder, zero, load=str(folder / "checkpoint"), **resumed),
        job("saving, writer", folder, zero, load=str(folder / "checkpoint-writer"), **resumed),
        job(SMALL_GROUPS, folder, small_groups(folder / "loading"), adam=adam, skip=STEPS, load=str(folder / "small")),
    ]
    return [{**one, "steps": 2} for one in jobs]


def pair(folder: Path, adam: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """For two processes."""
    pipelined = {"pipeline_read": True, "pipeline_write": True}
    in_memory, optimizer = (offloaded(folder / "o", optimizer=where) for where in ("cpu", "nvme"))
    both = offloaded(folder / "b", optimizer="nvme", parameters="nvme", **pipelined)
    zeros = {"memory": in_memory, "optimizer": optimizer, "both, pipelined": both}
    return [job(name, folder, zero, adam=adam, bf16=True, **more) for name, zero in zeros.items()]
