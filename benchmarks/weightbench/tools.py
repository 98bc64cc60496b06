"""The tools that read the tensors of a model's files, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from weightbench.model import files

Weights = Iterator[tuple[str, torch.Tensor]]

# As many threads as SGLang's loader has unless it is told otherwise.
_THREADS = 8


def deepnvme_load_format(folder: Path) -> Weights:
    """``--load-format deepnvme`` of vLLM and SGLang."""
    from deepnvme.integrations.weights import iterate_weights  # noqa: PLC0415

    yield from iterate_weights(folder)


def deepnvme_load(folder: Path) -> Weights:
    """``deepnvme.load`` of one file after the other: nothing is read while a model copies."""
    import deepnvme  # noqa: PLC0415

    for path in files(folder):
        yield from deepnvme.load(path, progress=False).items()


def safetensors_lazy(folder: Path) -> Weights:
    """Do what vLLM and SGLang do by default: each tensor is a piece of a mapped file."""
    from safetensors import safe_open  # noqa: PLC0415

    for path in files(folder):
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                yield name, opened.get_tensor(name)


def safetensors_eager(folder: Path) -> Weights:
    """Do as ``--safetensors-load-strategy eager`` of vLLM: each file is read as a whole, then taken apart."""
    from safetensors.torch import load  # noqa: PLC0415

    for path in files(folder):
        yield from load(path.read_bytes()).items()


def safetensors_threads(folder: Path) -> Weights:
    """SGLang's loader with several threads: ``load_file`` of several shards at once."""
    from safetensors.torch import load_file  # noqa: PLC0415

    with ThreadPoolExecutor(_THREADS) as pool:
        for state in pool.map(load_file, files(folder)):
            yield from state.items()


def runai(folder: Path) -> Weights:
    """``--load-format runai_streamer`` of vLLM, all shards in one stream, as it comes."""
    from runai_model_streamer import SafetensorsStreamer  # noqa: PLC0415

    with SafetensorsStreamer() as streamer:
        streamer.stream_files([str(path) for path in files(folder)])
        yield from streamer.get_tensors()


def fastsafetensors(folder: Path) -> Weights:
    """``--load-format fastsafetensors`` of vLLM: one file after the other, without GPUDirect Storage."""
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup  # noqa: PLC0415

    for path in files(folder):
        loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cpu"), nogds=True)
        loader.add_filenames({0: [str(path)]})
        buffer = loader.copy_files_to_device()
        try:
            for name in buffer.key_to_rank_lidx:
                yield name, buffer.get_tensor(name)
        finally:
            buffer.close()
            loader.close()


EVERYBODY = {
    "deepnvme": deepnvme_load_format,
    "deepnvme.load, file by file": deepnvme_load,
    "safetensors, lazy": safetensors_lazy,
    "safetensors, eager": safetensors_eager,
    "safetensors, 8 threads": safetensors_threads,
    "Run:ai streamer": runai,
    "fastsafetensors": fastsafetensors,
}
