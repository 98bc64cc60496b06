"""``report``, ``bench`` and ``tune``: the commands of the same names, as functions."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Literal

from deepnvme._deepnvme import _answer

if TYPE_CHECKING:
    from collections.abc import Iterator

_Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]


class Answer(dict[str, Any]):
    """What a command found out: the fields of its ``--json``, and as ``str`` the lines that people read."""

    def __init__(self, fields: dict[str, Any], text: str) -> None:
        super().__init__(fields)
        self._text = text

    def __str__(self) -> str:
        return self._text


def report(*folders: _Path) -> Answer:
    """Find out what works on this machine and in these folders, what costs speed, and what mends it.

    Args:
        folders: places for data, or manifests of stripe sets; by default the current folder. Nothing stays behind.

    Returns:
        A dict with ``system``, ``backends``, ``gpu``, ``packages``, ``ops``, ``folders`` and ``findings`` (each with
        ``severity``, ``text`` and ``remedy``); ``print`` shows it as ``deepnvme report`` does.

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
    """Measure reading or writing on files of its own in ``folders``, which it makes, fills and removes.

    Args:
        direction: ``"read"`` or ``"write"``.
        folders: where the files are made, one in each.
        size: bytes of each file, or a text such as ``"512M"``; default 1 GiB.
        block_size: largest single transfer; default the engine's, 2 MiB.
        queue_depth: transfers in flight per worker; default the engine's, 128.
        workers: threads that submit; default the engine's, one per processor up to 4.
        backend: what moves the bytes; by default the first that works.
        single_submit: one system call for each transfer.
        direct: whether the page cache is bypassed.
        memory: page-locked, or as of ``torch.empty``.
        gpu: the number of a GPU that has the memory instead of the host; ``0`` is the first.
        buffer: memory used again and again, a block at a time, as fio does; default as much as the file has.
        random: a request per block in random order, instead of one for the file.
        cache: whether the page cache has the file before a read.
        durable: what a write waits for.
        stripe: one file striped over all folders, in stripes of that size.
        processes: how many do it at the same time, on files of their own.
        loops: rounds that count.
        warm_up: rounds before them that do not.
        validate: compare every byte, outside of the timing.
        against: ``"fio"``: with the same parameters, in alternating rounds.
        plot: draw latencies and bandwidth there: a name that ends in .svg or .html.

    Returns:
        A dict with ``workload``, ``backend``, ``contestants`` (each with ``summary``: ``gb_per_s`` and more, and
        ``samples``) and ``ratio``; ``print`` shows the table.

    Raises:
        ValueError: for arguments that make no sense, with what to give instead.
        deepnvme.Error: what the machine refused.

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
    """Find the settings that suit ``folders``, and write them to a file that :meth:`Engine.from_file` reads.

    Args:
        folders: where the data will lie; several are tuned one by one and together.
        budget: seconds that all of it may take.
        size: bytes of each trial, or a text such as ``"400M"``.
        read: whether to tune for reading.
        write: whether to tune for writing.
        memory: page-locked, or as of ``torch.empty``.
        gpu: the number of a GPU that has the memory instead of the host; ``0`` is the first.
        durable: what a write waits for.
        sweep_config: a file with the values to choose from: JSON lists by the names of ``ds_io``.
        output: where the settings go.
        plot: draw the trials as a heat map there: a name that ends in .svg or .html.

    Returns:
        A dict with ``places``, each with ``read`` and ``write`` (``config``, ``gb_per_s``, ``statement``, ``tried``)
        and ``both``; ``print`` shows the tables and DeepSpeed's ``"aio"`` block.

    Raises:
        ValueError: for arguments that make no sense, with what to give instead.
        deepnvme.Error: what the machine refused.

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
