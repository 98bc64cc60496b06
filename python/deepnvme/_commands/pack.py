"""The command ``pack`` as a function."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from deepnvme._commands.result import CommandResult, Path, options, run
from deepnvme._utils.arguments import check_choice, check_flag, whole
from deepnvme._utils.public import public

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_FORMS = ("auto", "lossless", "keep", "bfloat16", "float16", "float32", "bf16", "fp16", "fp32", "int8", "fp8")
_WEIGHTS_MAX = (1 << 32) - 1


@public
def pack(
    source: Path,
    target: Path,
    *,
    dtype: Literal["auto", "lossless", "keep", "bf16", "fp16", "fp32", "int8", "fp8"] | torch.dtype = "auto",
    group: int = 128,
    disks: Sequence[Path] = (),
    dry_run: bool = False,
) -> CommandResult:
    """Write a model's weights layer by layer into a new folder, compressed or quantised, so that it streams faster.

    :func:`stream` reads the new folder like any model. It appears when it is complete, and nothing is overwritten.

    Args:
        source: a model folder, an index, or a safetensors file.
        target: the new folder. The other files of the model are copied into it.
        dtype: ``"auto"`` compresses without loss where that is measured to save time, ``"lossless"`` where it saves
            bytes; ``"keep"`` keeps the weights; ``"int8"`` and ``"fp8"`` quantise matrices; the others cast.
        group: weights that share a scale, with ``"int8"`` and ``"fp8"``.
        disks: stripe the weights over these folders, one on each disk.
        dry_run: only estimate the gain.

    Returns:
        A dict with ``estimate`` (``bytes``, ``packed_bytes``, ``disk_gb_s``, ``decode_gb_s`` and more), ``packed``
        (``file``, ``bytes``, ``left_out``; ``None`` after a dry run) and ``seconds``; ``print`` shows them.

    Raises:
        TypeError: an argument has the wrong type.
        deepnvme.errors.InvalidArgumentError: a value is invalid.
        deepnvme.Error: the source cannot be read, or the target is not empty or cannot be written.

    Example:
        >>> layer = torch.nn.Linear(512, 512)
        >>> size = deepnvme.save(layer.state_dict(), "model.safetensors")
        >>> packed = deepnvme.pack("model.safetensors", "packed", dtype="int8")
        >>> packed["packed"]["bytes"] < size / 3
        True
    """
    # Without an import of torch, which packing does not need.
    is_of_torch = type(dtype).__module__ == "torch"
    form = str(dtype).removeprefix("torch.") if is_of_torch else dtype
    check_choice(form, "dtype", _FORMS)
    check_flag(dry_run, "dry_run")
    if isinstance(disks, (str, bytes, os.PathLike)):
        raise TypeError(f"disks is {disks!r}; it must be a list of folders")
    valued: dict[str, int | str | None] = {"dtype": str(form), "group": whole(group, "group", 1, _WEIGHTS_MAX)}
    folders = [f"--disks={os.fsdecode(disk)}" for disk in disks]
    return run("pack", *options(valued, {"dry-run": dry_run}), *folders, "--", os.fsdecode(source), os.fsdecode(target))
