"""The tools that generate: with the model in memory, or read from disk at every step."""

from __future__ import annotations

import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from common.not_offered import NotOffered

# Block and depth as storagebench found best for DeepSpeed's handle; the rest, and how much is fetched ahead, was
# the quickest of seven settings in a trial with this model.
_AIO = {
    "block_size": 1 << 20,
    "queue_depth": 32,
    "intra_op_parallelism": 2,
    "single_submit": False,
    "overlap_events": True,
}
_PREFETCH_ELEMENTS = 100_000_000


@dataclass(frozen=True)
class Workload:
    """What a tool has to run."""

    model: Path
    """A folder as Hugging Face lays it out."""
    memory: int
    """Bytes that weights may take."""
    scratch: Path
    """A folder for the files that a tool writes before it can begin."""
    dtype: torch.dtype = torch.bfloat16
    """The dtype of the computation. The files have bf16."""

    @property
    def offload(self) -> Path:
        """The folder of weights that accelerate cannot read from the model's own files."""
        return self.scratch / "offload"


Group: TypeAlias = Literal["memory", "deepnvme", "packed", "accelerate", "DeepSpeed", "comparison"]


class Tool(ABC):
    """One way to have a model that generates."""

    name = ""
    group: Group = "comparison"
    #: The model's files are dropped from the page cache before each step: a larger model would not stay there, and
    #: deepnvme would find there what other tools have read.
    starts_cold = True
    #: Its process ends with its turn. Otherwise it would keep mapped pages of the model's files, which cannot be
    #: dropped, or memory for the whole model, which the page cache of other tools may need.
    ends_with_turn = False
    #: Its weights are those of the model to the last bit, so it must generate the same tokens.
    is_exact = True

    @abstractmethod
    def open(self, workload: Workload) -> Any:
        """Return a model of transformers."""

    def settings(self) -> dict[str, Any]:
        """Return the chosen settings, for the record."""
        return {}

    def roofline(self, ids: torch.Tensor) -> dict[str, float]:
        """Measure disk alone and computing alone, if the tool supports it."""
        return {}


class InMemory(Tool):
    """``from_pretrained``: the reference for computing time and for the generated tokens."""

    name = "in memory"
    group = "memory"
    ends_with_turn = True

    def open(self, workload: Workload) -> Any:
        """See the base."""
        model = _transformers().AutoModelForCausalLM.from_pretrained(workload.model, dtype=workload.dtype).eval()
        # The parameters of from_pretrained are mapped pages of the files, which are read when first touched.
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        return model


class Deepnvme(Tool):
    """``deepnvme.stream`` as it comes."""

    name = "deepnvme"
    group: Group = "deepnvme"

    def open(self, workload: Workload) -> Any:
        """See the base."""
        import deepnvme  # noqa: PLC0415

        self._model = deepnvme.stream(workload.model, memory=workload.memory, dtype=workload.dtype)
        return self._model

    def settings(self) -> dict[str, Any]:
        """See the base."""
        layers = self._model.streaming.layer_cache
        return {"slots": [str(each) for each in layers.classes] if layers is not None else []}

    def roofline(self, ids: torch.Tensor) -> dict[str, float]:
        """See the base: of the layers that this memory cannot keep."""
        from deepnvme._stream import benchmark  # noqa: PLC0415

        model = self._model
        with torch.inference_mode():
            past = model(ids, use_cache=True, logits_to_keep=1).past_key_values
            limit = benchmark.measure(
                model.streaming, lambda: model(ids[:, -1:], past_key_values=past, use_cache=True), rounds=3
            )
        return {"disk_s": limit.disk_s, "compute_s": limit.compute_s, "bytes": limit.bytes_read}


class DeepnvmePacked(Deepnvme):
    """The same model after ``deepnvme pack``: fewer bytes. Lossless, it generates the same tokens.

    Args:
        name: of the tool.
        dtype: the ``--dtype`` of ``pack``.
    """

    group = "packed"

    def __init__(self, name: str, dtype: str) -> None:
        self.name = name
        self.is_exact = dtype == "lossless"
        self._dtype = dtype

    def open(self, workload: Workload) -> Any:
        """See the base; packing is not measured here, as no tool's preparations are."""
        packed = workload.scratch / f"packed-{self._dtype}"
        if not packed.exists():
            command = [
                sys.executable,
                "-m",
                "deepnvme",
                "pack",
                str(workload.model),
                str(packed),
                "--dtype",
                self._dtype,
            ]
            subprocess.run(command, check=True, stdout=sys.stderr)
        return super().open(replace(workload, model=packed))


class Accelerate(Tool):
    """``from_pretrained`` with a device map: safetensors where they are, opened again for each layer.

    Args:
        name: of the tool.
        keeps_layers: keep as many layers as fit with the largest module. Otherwise ``"auto"`` fills memory from
            the first module on, and so with embeddings, of which a step needs a few rows.
        starts_cold: drop the files from the page cache before each step.
    """

    ends_with_turn = True

    def __init__(self, name: str, *, keeps_layers: bool, starts_cold: bool) -> None:
        self.name = name
        self.starts_cold = starts_cold
        self.group = "accelerate" if starts_cold else "comparison"
        self._keeps_layers = keeps_layers

    def open(self, workload: Workload) -> Any:
        """See the base."""
        model = _transformers().AutoModelForCausalLM
        options: dict[str, Any] = {"device_map": "auto", "max_memory": {"cpu": workload.memory}}
        if self._keeps_layers:
            options = {"device_map": _layers_kept(workload)}
        opened = model.from_pretrained(
            workload.model, dtype=workload.dtype, offload_folder=workload.offload, **options
        )
        self._map = {name: str(place) for name, place in opened.hf_device_map.items()}
        if "disk" not in self._map.values():
            raise NotOffered("accelerate put nothing on disk with this memory")
        return opened.eval()

    def settings(self) -> dict[str, Any]:
        """See the base."""
        return {"kept": [name for name, place in self._map.items() if place != "disk"]}


def _layers_kept(workload: Workload) -> dict[str, str]:
    """Keep as many layers of a Llama as fit next to the largest module, which is loaded and unloaded."""
    transformers = _transformers()
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(workload.model), dtype=workload.dtype
        )
    layers = empty.model.layers
    layer = sum(one.nbytes for one in layers[0].parameters())
    fit = max(0, (workload.memory - max(layer, empty.lm_head.weight.nbytes)) // layer)
    places = {f"model.layers.{index}": "cpu" if index < fit else "disk" for index in range(len(layers))}
    ends = {"model.embed_tokens": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    return {**places, **ends}


class ZeroInference(Tool):
    """DeepSpeed's ZeRO-Inference: stage 3, parameters on NVMe, put together as in its own example.

    Args:
        buffers: each as large as the largest parameter, which with its vocabulary is more than a quarter of the
            memory, in addition to the parameter in use and those that are fetched ahead.
    """

    group = "DeepSpeed"

    def __init__(self, buffers: int) -> None:
        self.name = f"ZeRO-Inference, {buffers} buffers"
        self._buffers = buffers

    def open(self, workload: Workload) -> Any:
        """See the base."""
        prepare_deepspeed()
        import deepspeed  # noqa: PLC0415
        from transformers.integrations import HfDeepSpeedConfig  # noqa: PLC0415

        transformers = _transformers()
        config = transformers.AutoConfig.from_pretrained(workload.model)
        hidden = config.hidden_size
        offload = {
            "device": "nvme",
            "nvme_path": str(workload.scratch / f"zero-{self._buffers}"),
            "pin_memory": False,
            "buffer_count": self._buffers,
            "buffer_size": max(config.vocab_size, config.intermediate_size) * hidden,
        }
        zero = {
            "stage": 3,
            "stage3_prefetch_bucket_size": _PREFETCH_ELEMENTS,
            "stage3_param_persistence_threshold": hidden,
            "stage3_max_live_parameters": 2 * hidden * hidden,
            "offload_param": offload,
        }
        self._config: dict[str, Any] = {
            "bf16": {"enabled": workload.dtype is torch.bfloat16},
            "zero_optimization": zero,
            "aio": _AIO,
            "train_batch_size": 1,
            "steps_per_print": 1 << 30,
        }
        # Tells from_pretrained to put parameters on disk one by one; it must outlive the model.
        self._hf_config = HfDeepSpeedConfig(self._config)
        with torch.no_grad():
            model = transformers.AutoModelForCausalLM.from_pretrained(workload.model, dtype=workload.dtype).eval()
            return deepspeed.initialize(model=model, config_params=self._config)[0].module.eval()

    def settings(self) -> dict[str, Any]:
        """See the base."""
        zero = dict(self._config["zero_optimization"])
        zero["offload_param"] = {key: value for key, value in zero["offload_param"].items() if key != "nvme_path"}
        return {"zero": zero, "aio": _AIO}


def prepare_deepspeed() -> None:
    """Have DeepSpeed's ops compiled, and this process as the only one of its group.

    Raises:
        NotOffered: DeepSpeed does not run here.
    """
    from common import deepspeed_op  # noqa: PLC0415

    # The group's messages stay in this process. The port is any free one.
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(alone)
    try:
        deepspeed_op.load()
        import deepspeed  # noqa: PLC0415

        deepspeed.init_distributed("gloo")
    except (ImportError, RuntimeError) as error:
        raise NotOffered(f"DeepSpeed does not run here: {error}") from error


def _transformers() -> Any:
    import transformers  # noqa: PLC0415

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def all_tools() -> Iterator[Tool]:
    """Yield all tools. Those that are exact must generate the same as the first."""
    yield InMemory()
    yield Deepnvme()
    yield DeepnvmePacked("deepnvme, packed", "lossless")
    yield DeepnvmePacked("deepnvme, int8", "int8")
    yield Accelerate("accelerate, auto", keeps_layers=False, starts_cold=True)
    yield Accelerate("accelerate, layers kept", keeps_layers=True, starts_cold=True)
    yield Accelerate("accelerate, page cache kept", keeps_layers=True, starts_cold=False)
    # As few buffers as it runs with, and as many as its own example has.
    yield ZeroInference(2)
    yield ZeroInference(5)
