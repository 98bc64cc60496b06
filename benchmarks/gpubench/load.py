"""The row `load`: whole files of weights to a GPU."""

from __future__ import annotations

import gc

import deepnvme
import torch

from common.measure import Sample, timed
from gpubench import loaders
from gpubench.data import compare_state, random_model, size_text
from gpubench.rows import RoundLimits, RowResult, construct, make_cold_or_note, run_rounds
from gpubench.tool import Loader, Setup


def load(setup: Setup, row: RowResult, limits: RoundLimits) -> RowResult:
    """Load a file of weights to the GPU: safetensors, and the same weights as a torch archive."""
    row.title = f"cold load of a safetensors or .pt file of {size_text(setup.nbytes)} to the GPU"
    row.ours = loaders.OURS
    row.counterparts = {loaders.TorchLoad.name: loaders.OURS_PT}
    tools = construct(row, loaders.KINDS, setup, limits)
    model = random_model(setup.nbytes)
    paths = {suffix: setup.scratch / f"model{suffix}" for suffix in (".safetensors", ".pt")}
    deepnvme.save(model, paths[".safetensors"], progress=False)
    # The random tensors are views of one storage, which an archive would keep. Those of a model have their own.
    deepnvme.save({name: tensor.clone() for name, tensor in model.items()}, paths[".pt"], progress=False)

    def once(one: Loader, is_first: bool) -> Sample:  # noqa: FBT001 - the first round, or a later one
        path = paths[one.suffix]
        make_cold_or_note(path, row)

        def action() -> dict[str, torch.Tensor]:
            state = one.load(path)
            setup.gpu.wait()
            return state

        state: object = None
        try:
            sample, state = timed(action, path.stat().st_size)
            compare_state(setup, state, model, whole=is_first)
        finally:
            del state
            one.free_last_load()
            gc.collect()
        return sample

    try:
        return run_rounds(row, tools, limits, once)
    finally:
        for path in paths.values():
            path.unlink(missing_ok=True)
