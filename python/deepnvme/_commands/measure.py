"""The commands ``report``, ``bench`` and ``tune`` as functions."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from deepnvme._commands.result import CommandResult, Path, options, run
from deepnvme._utils.arguments import DURABILITIES, check_choice, parse_bytes
from deepnvme._utils.public import public

if TYPE_CHECKING:
    from collections.abc import Iterator

_CHOICES = {
    "backend": ("auto", "io_uring", "aio", "threads"),
    "submit": ("batch", "single"),
    "direct": ("required", "preferred", "disabled"),
    "memory": ("pinned", "plain"),
    "cache": ("cold", "warm"),
    "durability": DURABILITIES,
}


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
        deepnvme.Error: if the machine refuses.

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
    return run("bench", direction, *_options(valued, flags), "--", *_folders("bench", folders))


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
        deepnvme.Error: if the machine refuses.

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
    return run("tune", *_options(valued, flags), "--", *_folders("tune", folders))


def _folders(command: str, folders: tuple[Path, ...]) -> list[str]:
    if not folders:
        arguments = '"read", ' if command == "bench" else ""
        raise TypeError(f'deepnvme.{command} needs at least one folder: deepnvme.{command}({arguments}"/mnt/nvme")')
    return [os.fsdecode(folder) for folder in folders]


def _options(valued: dict[str, int | str | None], flags: dict[str, bool]) -> Iterator[str]:
    for name, value in valued.items():
        if name in _CHOICES:
            check_choice(value, name, _CHOICES[name])
    return options(valued, flags)
