"""vLLM's weights through deepnvme: ``vllm serve MODEL --load-format deepnvme``.

The wheel says so in the entry-point group ``vllm.general_plugins``: nothing is called, and nothing of vLLM changes,
until somebody asks for this load format. What is found, downloaded, filtered and checked is what vLLM itself finds
for ``--load-format safetensors``.

Settings, in ``--model-loader-extra-config '{"ahead": "1GB"}'``: ``ahead``, how much is in memory at once (default
512 MiB for each rank), and ``verify``, as for ``deepnvme.load``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from deepnvme.integrations._server_methods import split_settings, with_globals
from deepnvme.integrations.weights import iterate_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

LOAD_FORMAT = "deepnvme"


def register() -> None:
    """Give vLLM the load format. vLLM calls this in each of its processes; a second call changes nothing."""
    from vllm.model_executor import model_loader  # noqa: PLC0415

    known = getattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", {})
    if LOAD_FORMAT not in known:
        model_loader.register_model_loader(LOAD_FORMAT)(loader_class())


def loader_class() -> Any:
    """Make the loader, which is a ``DefaultModelLoader`` that reads through deepnvme."""
    import vllm  # noqa: PLC0415
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader  # noqa: PLC0415

    class DeepnvmeModelLoader(DefaultModelLoader):  # type: ignore[misc]
        """vLLM's own loader, but for the reading."""

        def __init__(self, load_config: Any) -> None:
            self._settings, theirs = split_settings(load_config)
            theirs.load_format = "safetensors"
            # Has loaders of vLLM's own choose between strategies of reading; here there is one.
            theirs.model_loader_extra_config.pop("enable_multithread_load", None)
            super().__init__(theirs)

        def _get_weights_iterator(self, source: Any) -> Any:
            host = f"vLLM {vllm.__version__}"
            method = with_globals(
                DefaultModelLoader._get_weights_iterator,  # noqa: SLF001
                host,
                safetensors_weights_iterator=self._read,
            )
            return method(self, source)

        def _read(
            self,
            files: list[str],
            _progress: object = None,
            strategy: str | None = None,
            local_expert_ids: set[int] | None = None,
            **_prefetching: Any,
        ) -> Iterator[tuple[str, torch.Tensor]]:
            if strategy == "torchao":
                msg = "torchao's tensors are put together by vLLM's own reading; use --load-format safetensors"
                raise ValueError(msg)
            wanted = None if local_expert_ids is None else _filter(local_expert_ids)
            ordered: list[str] = sorted(files, key=_by_number)
            return iterate_weights(ordered, wanted=wanted, **self._settings)

    return DeepnvmeModelLoader


def _filter(local_expert_ids: set[int]) -> Any:
    """Leave out the experts that other ranks have, before they are read."""
    from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight  # noqa: PLC0415

    return lambda name: not should_skip_weight(name, local_expert_ids)


def _by_number(path: str) -> list[tuple[int, str]]:
    """Put shard 10 after shard 9, as vLLM does."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path)]
