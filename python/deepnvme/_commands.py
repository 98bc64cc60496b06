"""The commands of the command line as functions. Each returns what its ``--json`` prints."""

from __future__ import annotations

import errno
import json
import os
import re
from typing import TYPE_CHECKING, Any, Literal

from deepnvme._deepnvme import StripeSet, _command_result
from deepnvme._utils.public import DURABILITIES, check_choice, check_flag, parse_bytes, public, whole
from deepnvme.errors import ChecksumError, Error, InvalidArgumentError, NotFoundError, PermissionDeniedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]
Source = Path | StripeSet

# The error of `verify`, by error number.
_UNREADABLE = {
    errno.ENOENT: NotFoundError,
    errno.EACCES: PermissionDeniedError,
    errno.EPERM: PermissionDeniedError,
}
# Values of arguments: of `dtype` and `group` of `pack`, and of those of `bench` and `tune`.
_FORMS = ("auto", "lossless", "keep", "bfloat16", "float16", "float32", "bf16", "fp16", "fp32", "int8", "fp8")
_WEIGHTS_MAX = (1 << 32) - 1
_CHOICES = {
    "backend": ("auto", "io_uring", "aio", "threads"),
    "submit": ("batch", "single"),
    "direct": ("required", "preferred", "disabled"),
    "memory": ("pinned", "plain"),
    "cache": ("cold", "warm"),
    "durability": DURABILITIES,
}
# An option in the text of a usage error.
_OPTION = re.compile(r"--([a-z-]+)([= ]?<[A-Z_]+>)?")


@public
def inspect(path: Source, *, depth: int | None = 2) -> CommandResult:
    """List the tensors of a checkpoint: names, dtypes, shapes and sizes. Reads no tensor, and runs no code of a file.

    Args:
        path: a torch archive, a safetensors file, an index of several, a folder with one of these, a
            :class:`StripeSet`, or its manifest. Of the folder of a :class:`Checkpointer`, every checkpoint is listed.
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
    return run("inspect", shown, "--", _name_of(path))


@public
def verify(*paths: Source, check: bool = True) -> CommandResult:
    """Compare every byte of checkpoints with their checksums, using little memory.

    The bytes come from the drive, not from the page cache, if the file system has direct I/O.

    Args:
        paths: files, indexes, stripe sets and their manifests, model folders, and folders of a :class:`Checkpointer`.
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
    result = run("verify", "--", *map(_name_of, paths))
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
def convert(source: Source, target: Path) -> CommandResult:
    """Convert a checkpoint to the format of the target's name, without loading the model into memory.

    The source is verified while it is read. Tensors that share memory stay shared in a torch archive, and are written
    separately to a safetensors file.

    Args:
        source: a torch archive, a safetensors file, an index of several, a folder with one of these, a
            :class:`StripeSet`, or its manifest.
        target: the new file, replaced if it exists: safetensors with that extension, else a torch archive. It appears
            when it is complete, and has checksums.

    Returns:
        A dict with ``source``, ``target``, ``file_bytes``, the number of ``tensors``, and ``left_out``: the name and
        the type of every entry that is no tensor; ``print`` shows them.

    Raises:
        TypeError: an argument has the wrong type.
        deepnvme.errors.ChecksumError: the bytes of the source are not those that were saved.
        deepnvme.errors.CorruptFileError: a file is no checkpoint, or damaged.
        deepnvme.errors.UnsupportedError: the source is a packed model, or the target cannot contain its tensors.
        deepnvme.Error: a file cannot be read or written.

    Example:
        >>> torch.save({"weight": torch.ones(3), "step": 7}, "theirs.pt")
        >>> converted = deepnvme.convert("theirs.pt", "model.safetensors")
        >>> converted["tensors"], converted["left_out"]
        (1, [['step', 'int']])
        >>> deepnvme.load("model.safetensors")["weight"].tolist()
        [1.0, 1.0, 1.0]
    """
    given: object = target
    if isinstance(given, StripeSet):
        raise TypeError("the target is a StripeSet; it must be a path: a conversion writes one file")
    return run("convert", "--", _name_of(source), os.fsdecode(target))


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
        A dict with ``estimate`` (``bytes``, ``packed_bytes``, ``disk_gb_per_s``, ``decode_gb_per_s`` and more),
        ``packed`` (``file``, ``bytes``, ``left_out``; ``None`` after a dry run) and ``seconds``; ``print`` shows them.

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


@public
def report(*folders: Path) -> CommandResult:
    """Diagnose this machine and these folders, with a remedy for each problem.

    Args:
        folders: folders for data, or manifests of stripe sets; default the current folder. A folder that does not exist
            is a finding. No file stays behind.

    Returns:
        A dict with ``system``, ``backends``, ``gpu``, ``packages``, ``ops``, ``folders`` and ``findings`` (each with
        ``severity``, ``text`` and ``remedy``); ``print`` shows the text of ``deepnvme report``.

    Raises:
        TypeError: a folder is not a path.

    Example:
        >>> report = deepnvme.report(".")
        >>> [backend["name"] for backend in report["backends"]]
        ['io_uring', 'aio', 'threads']
    """
    return run("report", *map(os.fsdecode, folders))


@public
def bench(
    direction: Literal["read", "write"],
    *folders: Path,
    size: int | str = "1G",
    block_bytes: int | str | None = None,
    queue_depth: int | None = None,
    workers: int | None = None,
    backend: Literal["auto", "io_uring", "aio", "threads"] = "auto",
    submit: Literal["batch", "single"] = "batch",
    direct: Literal["required", "preferred", "disabled"] = "preferred",
    memory: Literal["pinned", "plain"] = "pinned",
    gpu: int | None = None,
    buffer: int | str | None = None,
    random: bool = False,
    cache: Literal["cold", "warm"] = "cold",
    durability: Literal["none", "data", "full"] = "none",
    stripe_bytes: int | str | None = None,
    processes: int = 1,
    loops: int = 5,
    warm_up: int = 1,
    validate: bool = False,
    against: Literal["fio"] | None = None,
    plot: Path | None = None,
) -> CommandResult:
    """Measure reading or writing. Makes its own files in ``folders`` and removes them.

    Args:
        direction: ``"read"`` or ``"write"``.
        folders: folders for the files, one file in each.
        size: bytes of each file, or text such as ``"512MiB"``; default 1 GiB.
        block_bytes: maximum bytes of an op, in bytes or as text; default 2 MiB.
        queue_depth: ops in flight per worker; default 128.
        workers: threads that submit; default one per CPU, at most 4.
        backend: the backend; default the first that works.
        submit: ``"single"`` submits each op with its own system call.
        direct: whether to bypass the page cache.
        memory: pinned, or pageable like ``torch.empty``.
        gpu: the GPU that holds the memory instead of the host; ``0`` is the first.
        buffer: bytes, or text, of a buffer that is reused block by block, as fio does; default as large as the file.
        random: one request per block in random order, instead of one for the file.
        cache: state of the page cache before a read.
        durability: as for :func:`write`.
        stripe_bytes: stripe one file over all folders, with stripes of this size, in bytes or as text.
        processes: processes that run at the same time, each with its own files.
        loops: measured rounds.
        warm_up: warm-up rounds before them.
        validate: compare every byte, outside the timing.
        against: ``"fio"`` measures fio with the same parameters, in alternating rounds.
        plot: draw latencies and bandwidth to this .svg or .html file.

    Returns:
        A dict with ``workload``, ``backend``, ``results`` (each with ``summary``: ``gb_per_s`` and more, and
        ``samples``) and ``ratio``; ``print`` shows the table.

    Raises:
        TypeError: no folder is named, or an argument has the wrong type.
        deepnvme.errors.InvalidArgumentError: a value is invalid.
        deepnvme.Error: the folder cannot be written, or the backend or GPU does not work.

    Example:
        >>> outcome = deepnvme.bench("read", ".", size="4M", loops=2, validate=True)
        >>> outcome["results"][0]["summary"]["gb_per_s"] > 0
        True
    """
    check_choice(direction, "direction", ("read", "write"))
    if against is not None:
        check_choice(against, "against", ("fio",))
    valued: dict[str, int | str | None] = {
        "size": parse_bytes(size, "size"),
        "block-bytes": None if block_bytes is None else parse_bytes(block_bytes, "block_bytes"),
        "queue-depth": queue_depth,
        "workers": workers,
        "backend": backend,
        "submit": submit,
        "direct": direct,
        "memory": memory,
        "gpu": gpu,
        "buffer": None if buffer is None else parse_bytes(buffer, "buffer"),
        "cache": cache,
        "durability": durability,
        "stripe-bytes": None if stripe_bytes is None else parse_bytes(stripe_bytes, "stripe_bytes"),
        "processes": processes,
        "loops": loops,
        "warm-up": warm_up,
        "against": against,
        "plot": None if plot is None else os.fsdecode(plot),
    }
    flags = {"random": random, "validate": validate}
    return run("bench", direction, *_checked_options(valued, flags), "--", *_folders("bench", folders))


@public
def tune(
    *folders: Path,
    budget: float = 60,
    size: int | str = "400M",
    read: bool = True,
    write: bool = True,
    memory: Literal["pinned", "plain"] = "pinned",
    gpu: int | None = None,
    durability: Literal["none", "data", "full"] = "none",
    sweep_config: Path | None = None,
    output: Path = "deepnvme.toml",
    plot: Path | None = None,
) -> CommandResult:
    """Find the settings that suit ``folders``, and write them to a file that :meth:`Engine.from_file` reads.

    Args:
        folders: folders for data; several are tuned one by one and together.
        budget: seconds for all searches.
        size: bytes of each trial, or text such as ``"400MiB"``.
        read: whether to tune for reading.
        write: whether to tune for writing.
        memory: pinned, or pageable like ``torch.empty``.
        gpu: the GPU that holds the memory instead of the host; ``0`` is the first.
        durability: as for :func:`write`.
        sweep_config: a JSON file with a list of values for each setting, by the names of ``ds_io``.
        output: file for the settings.
        plot: draw the trials as a heat map to this .svg or .html file.

    Returns:
        A dict with ``results``, each with ``read`` and ``write`` (``config``, ``gb_per_s``, ``confidence``, ``tried``)
        and ``both``; ``print`` shows the tables and DeepSpeed's ``"aio"`` block.

    Raises:
        TypeError: no folder is named, or an argument has the wrong type.
        deepnvme.errors.InvalidArgumentError: a value is invalid.
        deepnvme.Error: the folder cannot be written, or the backend or GPU does not work.

    Example:
        >>> found = deepnvme.tune(".", budget=1, size="1M", write=False)
        >>> found["results"][0]["both"] == found["results"][0]["read"]["config"]
        True
        >>> engine = deepnvme.Engine.from_file("deepnvme.toml")
    """
    valued: dict[str, int | str | None] = {
        "budget": f"{budget}s",
        "size": parse_bytes(size, "size"),
        "memory": memory,
        "gpu": gpu,
        "durability": durability,
        "sweep-config": None if sweep_config is None else os.fsdecode(sweep_config),
        "output": os.fsdecode(output),
        "plot": None if plot is None else os.fsdecode(plot),
    }
    flags = {"no-read": not read, "no-write": not write}
    return run("tune", *_checked_options(valued, flags), "--", *_folders("tune", folders))


@public
class CommandResult(dict[str, Any]):
    """The result of a command: a dict with the fields of its ``--json``. ``str`` gives the text of the command.

    Example:
        >>> result = deepnvme.report(".")
        >>> sorted(result)[:3], str(result).startswith("deepnvme")
        (['backends', 'findings', 'folders'], True)
    """

    def __init__(self, fields: dict[str, Any], text: str) -> None:
        super().__init__(fields)
        self._text = text

    def __str__(self) -> str:
        return self._text


def options(valued: dict[str, int | str | None], flags: dict[str, bool]) -> Iterator[str]:
    """Yield command line options: those with a value that is not ``None``, and the flags that are set."""
    yield from (f"--{name}={value}" for name, value in valued.items() if value is not None)
    yield from (f"--{name}" for name, is_set in flags.items() if is_set)


def run(*arguments: str) -> CommandResult:
    """Run ``deepnvme ARGUMENTS...``. A usage error names the Python argument."""
    try:
        fields, text = _command_result(list(arguments))
    except InvalidArgumentError as error:
        if error.filename is not None:  # It is about a file, and not about an argument.
            raise
        # The first paragraph is the reason. The others tell how to use the command.
        reason = " ".join(str(error).removeprefix("error: ").partition("\n\n")[0].split())
        named = _OPTION.sub(lambda option: option[1].replace("-", "_"), reason)
        raise InvalidArgumentError(named) from None
    return CommandResult(json.loads(fields), text)


def _name_of(source: Source) -> str:
    return os.fsdecode(source.manifest_path if isinstance(source, StripeSet) else source)


def _folders(command: str, folders: tuple[Path, ...]) -> list[str]:
    if not folders:
        arguments = '"read", ' if command == "bench" else ""
        raise TypeError(f'deepnvme.{command} needs at least one folder: deepnvme.{command}({arguments}"/mnt/nvme")')
    return [os.fsdecode(folder) for folder in folders]


def _checked_options(valued: dict[str, int | str | None], flags: dict[str, bool]) -> Iterator[str]:
    for name, value in valued.items():
        if name in _CHOICES:
            check_choice(value, name, _CHOICES[name])
    return options(valued, flags)
