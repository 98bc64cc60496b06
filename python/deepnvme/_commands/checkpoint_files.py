"""The commands ``inspect``, ``verify`` and ``convert`` as functions."""

from __future__ import annotations

import errno
import os

from deepnvme._commands.result import CommandResult, Path, run
from deepnvme._utils.arguments import check_flag, whole
from deepnvme._utils.public import public
from deepnvme.errors import ChecksumError, Error, NotFoundError, PermissionDeniedError

_UNREADABLE = {
    errno.ENOENT: NotFoundError,
    errno.EACCES: PermissionDeniedError,
    errno.EPERM: PermissionDeniedError,
}


@public
def inspect(path: Path, *, depth: int | None = 2) -> CommandResult:
    """List the tensors of a checkpoint: names, dtypes, shapes and sizes. Reads no tensor, and runs no code of a file.

    Args:
        path: a torch archive, a safetensors file, an index of several, or a folder with one of these. Of the folder of
            a :class:`Checkpointer`, every checkpoint is listed.
        depth: levels of the names that ``print`` shows; ``None`` shows every tensor. The dict always lists all.

    Returns:
        A dict with ``files``, each with ``path``, ``format``, ``file_bytes``, ``metadata``, ``tensors`` (``name``,
        ``dtype``, ``shape``, ``bytes``, ``offset`` and more) and ``values``, the pickled values of a sharded
        checkpoint; ``print`` shows the tree of names.

    Raises:
        TypeError: an argument has the wrong type.
        deepnvme.errors.CorruptFileError: a file is no checkpoint, or damaged.
        deepnvme.Error: a file cannot be read.

    Example:
        >>> size = deepnvme.save({"layer.weight": torch.ones(3, 4)}, "model.safetensors")
        >>> [file] = deepnvme.inspect("model.safetensors")["files"]
        >>> [(tensor["name"], tensor["dtype"], tensor["shape"]) for tensor in file["tensors"]]
        [('layer.weight', 'float32', [3, 4])]
    """
    shown = "--all" if depth is None else f"--depth={whole(depth, 'depth', 1)}"
    return run("inspect", shown, "--", os.fsdecode(path))


@public
def verify(*paths: Path, check: bool = True) -> CommandResult:
    """Compare every byte of checkpoints with their checksums, in little memory. The bytes come from the drive.

    Args:
        paths: files, indexes, lists of parts, model folders, and folders of a :class:`Checkpointer`.
        check: whether to raise unless everything is sound. With ``False``, look at ``is_sound`` of the result.

    Returns:
        A dict with ``is_sound``, and with ``files``, each with ``path``, ``verdict`` (``"sound"``, ``"damaged"``,
        ``"unverifiable"``: it has no checksums, or ``"unreadable"``), ``finding`` and ``bytes``; ``print`` shows a line
        for each.

    Raises:
        deepnvme.errors.ChecksumError: a file is damaged. The message lists every file that is not sound.
        deepnvme.errors.NotFoundError: files are missing, and nothing else is wrong.
        deepnvme.errors.PermissionDeniedError: files may not be read, and nothing else is wrong.
        deepnvme.Error: no file is damaged, but one has no checksums or cannot be read.
        TypeError: no path is named, or an argument has the wrong type.

    Example:
        >>> size = deepnvme.save({"weight": torch.randn(1000)}, "model.pt")
        >>> deepnvme.verify("model.pt")["is_sound"]
        True
        >>> with open("model.pt", "r+b") as file:
        ...     position, written = file.seek(1000), file.write(b"damage")
        >>> deepnvme.verify("model.pt", check=False)["files"][0]["verdict"]
        'damaged'
    """
    if not paths:
        raise TypeError('deepnvme.verify needs at least one path: deepnvme.verify("model.pt")')
    check_flag(check, "check")
    result = run("verify", "--", *map(os.fsdecode, paths))
    if check and not result["is_sound"]:
        bad = [file for file in result["files"] if file["verdict"] != "sound"]
        text = "\n".join(f"{file['verdict']}: {file['finding']}" for file in bad)
        if any(file["verdict"] == "damaged" for file in bad):
            raise ChecksumError(text)
        number = bad[0]["errno"]
        if number is None or any(file["errno"] != number for file in bad):
            raise Error(text)
        raise _UNREADABLE.get(number, Error)(number, text, bad[0]["path"])
    return result


@public
def convert(source: Path, target: Path) -> CommandResult:
    """Convert a checkpoint to the other format, in little memory. The source is verified while it is read.

    Tensors that share memory stay shared in a torch archive, and are written separately to a safetensors file.

    Args:
        source: a torch archive, a safetensors file, an index of several, or a folder with one of these.
        target: the new file, replaced if it exists: safetensors with that extension, else a torch archive. It appears
            when it is complete, and has checksums.

    Returns:
        A dict with ``source``, ``target``, ``file_bytes``, the number of ``tensors``, and ``left_out``: the name and
        the type of every entry that is no tensor; ``print`` shows them.

    Raises:
        TypeError: an argument has the wrong type.
        deepnvme.errors.ChecksumError: the bytes of the source are not those that were saved.
        deepnvme.errors.CorruptFileError: a file is no checkpoint, or damaged.
        deepnvme.Error: a file cannot be read or written.

    Example:
        >>> torch.save({"weight": torch.ones(3), "step": 7}, "theirs.pt")
        >>> converted = deepnvme.convert("theirs.pt", "model.safetensors")
        >>> converted["tensors"], converted["left_out"]
        (1, [['step', 'int']])
        >>> deepnvme.load("model.safetensors")["weight"].tolist()
        [1.0, 1.0, 1.0]
    """
    return run("convert", "--", os.fsdecode(source), os.fsdecode(target))
