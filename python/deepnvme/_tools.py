"""``report``, ``bench`` and ``tune``: the commands as functions."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Literal

from deepnvme._deepnvme import _answer

if TYPE_CHECKING:
    from collections.abc import Iterator

_Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]


class Answer(dict[str, Any]):
    """The result of a command: a dict with the fields of its ``--json``; ``str`` gives the text for people."""

    def __init__(self, fields: dict[str, Any], text: str) -> None:
        super().__init__(fields)
        self._text = text

    def __str__(self) -> str:
        return self._text


def report(*folders: _Path) -> Answer:
    """Diagnose this machine and these folders: what works, what costs speed, and how to fix it.

    Args:
        folders: folders for data, or manifests of stripe sets; default the current folder. No files are left behind.

    Returns:
        A dict with ``system``, ``backends``, ``gpu``, ``packages``, ``ops``, ``folders`` and ``findings`` (each with
        ``severity``, ``text`` and ``remedy``); ``print`` shows it like ``deepnvme report``.

    Example:
        >>> report = deepnvme.report(".")
        >>> [backend["name"] for backend in report["backends"]]
        ['io_uring', 'aio', 'threads']
    """
    return _run("report", *map(os.fsdecode, folders))


def bench(
    direction: Literal["read", "write"],
    *folders: _Path,
    size: int | str = "1G",
    block_size: int | str | None = None,
    queue_depth: int | None = None,
    workers: int | None = None,
    backend: Literal["auto", "io_uring", "aio", "threads"] = "auto",
    single_submit: bool = False,
    direct: Literal["required", "preferred", "disabled"] = "preferred",
    memory: Literal["pinned", "plain"] = "pinned",
    gpu: int | None = None,
    buffer: int | str | None = None,
    random: bool = False,
    cache: Literal["cold", "warm"] = "cold",
    durable: Literal["none", "data", "full"] = "none",
    stripe: int | str | None = None,
    processes: int = 1,
    loops: int = 5,
    warm_up: int = 1,
    validate: bool = False,
    against: Literal["fio"] | None = None,
    plot: _Path | None = None,
) -> Answer:
    """Measure read or write speed on temporary files in ``folders``.

    Args:
        direction: ``"read"`` or ``"write"``.
        folders: where to create the files, one in each folder.
        size: bytes of each file, or a text such as ``"512M"``; default 1 GiB.
        block_size: size of the largest single transfer; default the engine's, 2 MiB.
        queue_depth: transfers in flight for each worker; default the engine's, 128.
        workers: submitting threads; default the engine's, one for each processor, at most 4.
        backend: the I/O backend; default the first that works.
        single_submit: use one system call for each transfer.
        direct: whether to bypass the page cache.
        memory: page-locked memory, or memory as of ``torch.empty``.
        gpu: number of a GPU to use its memory instead of the host's; ``0`` is the first.
        buffer: size of a buffer that is reused block by block, as in fio; default the size of the file.
        random: one request for each block, in random order, instead of one for the whole file.
        cache: whether the page cache contains the file before a read.
        durable: durability that each write waits for.
        stripe: stripe one file over all folders, with stripes of this size.
        processes: number of concurrent processes, each with its own files.
        loops: measured rounds.
        warm_up: rounds before the measured ones.
        validate: compare every byte, outside the measured time.
        against: ``"fio"`` to run fio with the same parameters in alternating rounds.
        plot: write a plot of latency and bandwidth to this file, .svg or .html.

    Returns:
        A dict with ``workload``, ``backend``, ``contestants`` (each with ``summary``: ``gb_per_s`` and more, and
        ``samples``) and ``ratio``; ``print`` shows the table.

    Raises:
        ValueError: arguments are invalid or contradictory; the message says what to use instead.
        deepnvme.Error: the operating system reported an error.

    Example:
        >>> outcome = deepnvme.bench("read", ".", size="4M", loops=2, validate=True)
        >>> outcome["contestants"][0]["summary"]["gb_per_s"] > 0
        True
    """
    valued = {
        "size": size,
        "block-size": block_size,
        "queue-depth": queue_depth,
        "workers": workers,
        "backend": backend,
        "direct": direct,
        "memory": memory,
        "gpu": gpu,
        "buffer": buffer,
        "cache": cache,
        "durable": durable,
        "stripe": stripe,
        "processes": processes,
        "loops": loops,
        "warm-up": warm_up,
        "against": against,
        "plot": None if plot is None else os.fsdecode(plot),
    }
    flags = {"single-submit": single_submit, "random": random, "validate": validate}
    return _run("bench", direction, *_options(valued, flags), "--", *map(os.fsdecode, folders))


def tune(
    *folders: _Path,
    budget: float = 60,
    size: int | str = "400M",
    read: bool = True,
    write: bool = True,
    memory: Literal["pinned", "plain"] = "pinned",
    gpu: int | None = None,
    durable: Literal["none", "data", "full"] = "none",
    sweep_config: _Path | None = None,
    output: _Path = "deepnvme.toml",
    plot: _Path | None = None,
) -> Answer:
    """Find the best settings for ``folders``, and write them to a file for :meth:`Engine.from_file`.

    Args:
        folders: folders for data; several are tuned one by one and together.
        budget: seconds that tuning may take.
        size: bytes of each trial, or a text such as ``"400M"``.
        read: whether to tune for reading.
        write: whether to tune for writing.
        memory: page-locked memory, or memory as of ``torch.empty``.
        gpu: number of a GPU to use its memory instead of the host's; ``0`` is the first.
        durable: durability that each write waits for.
        sweep_config: a file of candidate values: JSON lists, named as in ``ds_io``.
        output: where to write the settings.
        plot: write a heat map of the trials to this file, .svg or .html.

    Returns:
        A dict with ``places``, each with ``read`` and ``write`` (``config``, ``gb_per_s``, ``statement``, ``tried``)
        and ``both``; ``print`` shows the tables and DeepSpeed's ``"aio"`` block.

    Raises:
        ValueError: arguments are invalid or contradictory; the message says what to use instead.
        deepnvme.Error: the operating system reported an error.

    Example:
        >>> found = deepnvme.tune(".", budget=1, size="1M", write=False)
        >>> found["places"][0]["both"] == found["places"][0]["read"]["config"]
        True
        >>> engine = deepnvme.Engine.from_file("deepnvme.toml")
    """
    valued = {
        "budget": f"{budget}s",
        "size": size,
        "memory": memory,
        "gpu": gpu,
        "durable": durable,
        "sweep-config": None if sweep_config is None else os.fsdecode(sweep_config),
        "output": os.fsdecode(output),
        "plot": None if plot is None else os.fsdecode(plot),
    }
    flags = {"no-read": not read, "no-write": not write}
    return _run("tune", *_options(valued, flags), "--", *map(os.fsdecode, folders))


def _options(valued: dict[str, int | str | None], flags: dict[str, bool]) -> Iterator[str]:
    for name, value in valued.items():
        if value is not None:
            yield f"--{name}={value}"
    yield from (f"--{name}" for name, is_set in flags.items() if is_set)


def _run(*arguments: str) -> Answer:
    fields, text = _answer(list(arguments))
    return Answer(json.loads(fields), text)
