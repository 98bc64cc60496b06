"""Keys to tensors: the bytes are the extension's business, dtypes and shapes are told apart here."""

from __future__ import annotations

import atexit
import math
import os
import weakref
from typing import TYPE_CHECKING, NoReturn

import torch

from deepnvme._deepnvme import StripeSet, _Swapper
from deepnvme._offload.stats import SwapStats
from deepnvme._offload.view import Lend, check_tensor, label_of, parse_label, shape_of, transfer_part, view_tensor
from deepnvme._utils.arguments import parse_bytes, whole

_FD_MAX = (1 << 31) - 1

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from typing_extensions import Self

    from deepnvme._deepnvme import Engine, _Lend

# Closed before the interpreter goes, so that no named file stays.
_OPEN: weakref.WeakSet[Swapper] = weakref.WeakSet()


class Swapper:
    """Keys to tensors that stay on disk, and pass through bounded memory while they are used.

    A tensor is lent in a slot of page-locked memory, without a copy. What was changed is written back behind the
    caller while the next ones are read. No more than ``memory`` bytes are ever used, whatever the number of tensors;
    who finds memory full waits. All methods may be called from several threads.

    Args:
        folder: where the swap file is made; several folders, one per disk, for a striped one. The file is private, has
            no name where the file system knows such files, and is gone with the swapper, also after a crash.
        memory: bytes for tensors, such as ``"4GB"``.
        checksums: keep a checksum of all that is written, and compare it with what is read.
        named: give the file a name (``.deepnvme-swap-...``), for those who open it by that.
        ahead: bytes of what comes next in the order that may be in memory before it is used. Default: three eighths of
            ``memory``, 1 GiB at most.
        reserve: bytes that are kept ready for what comes, by writing early. Default: as ``ahead``.
        stripe_bytes: of several folders, bytes that go to one before the next has its turn. Default 1 MiB.
        engine: what moves the bytes. Default: the default engine.

    Raises:
        OSError: the file cannot be made, or there is not so much memory.
        ValueError: a setting is out of its range.

    Example:
        >>> swapper = deepnvme.Swapper(".", memory="64MB")
        >>> for layer in range(4):
        ...     swapper.put(f"moment.{layer}", torch.zeros(1000))
        >>> with swapper.lend("moment.2") as moment:
        ...     moment.add_(1.5)[:2]
        tensor([1.5000, 1.5000])
        >>> swapper.read("moment.2", 4, torch.empty(2))
        tensor([1.5000, 1.5000])
        >>> swapper.close()
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        memory: int | str,
        checksums: bool = False,
        named: bool = False,
        ahead: int | str | None = None,
        reserve: int | str | None = None,
        stripe_bytes: int | None = None,
        engine: Engine | None = None,
    ) -> None:
        folders = [folder] if isinstance(folder, (str, bytes, os.PathLike)) else list(folder)
        self._swapper = _Swapper(
            folders,
            parse_bytes(memory),
            None if ahead is None else parse_bytes(ahead, "ahead"),
            None if reserve is None else parse_bytes(reserve, "reserve"),
            checksums,
            named,
            None if stripe_bytes is None else whole(stripe_bytes, "stripe_bytes"),
            engine,
        )
        self._memory: torch.Tensor = torch.utils.dlpack.from_dlpack(self._swapper.capsule())
        _OPEN.add(self)

    @property
    def lock_refusal(self) -> str | None:
        """Why the memory is not page-locked, and what to do about it; ``None`` where it is.

        Memory that is not works all the same; ``RLIMIT_MEMLOCK`` is the usual reason.
        """
        return self._swapper.lock_refusal

    def put(self, key: str, tensor: torch.Tensor) -> None:
        """Put a copy of a tensor under a key.

        It is in memory then, and is written some time later. What was under the key is replaced, once nobody has it
        lent any more. Where a put fails half way, there is nothing under the key.

        Args:
            key: any text.
            tensor: any dtype, any shape, any strides, on the host or on a GPU.

        Raises:
            MemoryError: it is larger than all memory; the message says how much is enough.
            OSError: the disk is full, or what has to make room cannot be written.
            RuntimeError: this thread has lent what it would wait for.
            TypeError: it is no tensor, or not one block of memory (sparse, nested, quantised).
        """
        check_tensor(tensor)
        source = tensor.detach()
        with self.create(key, source.shape, source.dtype) as held, torch.no_grad():
            try:
                held.copy_(source)
            except NotImplementedError:
                # Types of few bits, which torch does not copy.
                held.view(torch.uint8).copy_(source.view(torch.uint8))

    def create(self, key: str, shape: Sequence[int], dtype: torch.dtype) -> Lend:
        """Lend a new tensor for a ``with`` block, which fills it: a :meth:`put` without a copy.

        What is in it at first is anything. When the block ends without an exception, the tensor replaces what was under
        the key. When it raises, there is nothing under the key.

        Args:
            key: any text.
            shape: of the tensor.
            dtype: of the tensor.

        Raises:
            MemoryError: it is larger than all memory. This and all that follows is raised where the block begins.
            OSError: the disk is full, or what has to make room cannot be written.
            RuntimeError: this thread has lent what it would wait for.
            ValueError: a dimension is negative.

        Example:
            >>> swapper = deepnvme.Swapper(".", memory="1MB")
            >>> with swapper.create("moment", (2, 3), torch.float32) as moment:
            ...     _ = moment.fill_(0.5)
            >>> swapper.read("moment", 0, torch.empty(2))
            tensor([0.5000, 0.5000])
        """
        size = torch.Size(whole(length, f"a dimension of {key!r}") for length in shape)
        nbytes = whole(math.prod(size) * dtype.itemsize, f"the bytes of {key!r}")

        def view(held: _Lend) -> torch.Tensor:
            return view_tensor(self._memory, held, dtype, size)

        return Lend(key, lambda: self._swapper.fill(key, nbytes), view, label_of(dtype, size))

    def lend(self, key: str, *, shared: bool = False) -> Lend:
        """Lend a tensor for a ``with`` block.

        The block has it in memory, without a copy. Nobody else has it meanwhile, and it is written back some time
        later; with ``shared`` others may have it too, nobody changes it, and nothing is written. After the block its
        memory shows other tensors: copy what is to stay.

        Args:
            key: of the tensor.
            shared: to read only.

        Raises:
            KeyError: there is none. This and all that follows is raised where the block begins.
            OSError: it cannot be read, or what has to make room cannot be written.
            CorruptFileError: with checksums, the bytes are not those that were written.
            RuntimeError: this thread has lent what it would wait for.
            ValueError: it was adopted, and can only be lent shared.
        """
        return Lend(
            key,
            lambda: self._swapper.lend(key, not shared),
            lambda held: view_tensor(self._memory, held, *parse_label(held.label)),
        )

    def prefetch(self, keys: Iterable[str]) -> None:
        """Fetch tensors that will be lent soon, in this order, as far as there is memory for them.

        Raises:
            KeyError: one of them is not there.
        """
        self._swapper.prefetch([keys] if isinstance(keys, str) else list(keys))

    def schedule(self, keys: Iterable[str], *, repeat: bool = True) -> None:
        """Tell the order in which tensors will be lent from now on.

        They are read ahead in that order, and who makes room is whose next use is farthest away. Without an order that
        is who was used longest ago. An empty order is none.

        Args:
            keys: in order; a key may come several times, and need not be there yet.
            repeat: the order begins again when it is through, as the steps of a training do.
        """
        self._swapper.schedule(list(keys), repeat)

    def delete(self, key: str) -> None:
        """Do away with a tensor. Who has it lent may use it until the end of that.

        Raises:
            KeyError: there is none.
        """
        self._swapper.forget(key)

    def flush(self, keys: Iterable[str] | None = None) -> None:
        """Wait until all that was changed is on disk, or the tensors of these keys.

        Raises:
            OSError: something could not be written. It is in memory still, and the next flush tries again.
            RuntimeError: this thread has one of them lent, and could change it still.
        """
        self._swapper.flush(None if keys is None else list(keys))

    def read(self, key: str, offset: int, out: torch.Tensor) -> torch.Tensor:
        """Read a part of a tensor, without the rest of it where that is on disk.

        Args:
            key: of the tensor.
            offset: in bytes, where the part begins.
            out: is filled; any dtype, on the host or on a GPU.

        Returns:
            ``out``.

        Raises:
            ValueError: the tensor has not so many bytes.
        """
        check_tensor(out)
        offset = whole(offset, "offset")
        held = self._swapper.access(key, False)
        try:
            part = transfer_part(self._memory, held, key, offset, out)
            if part is not None:
                with torch.no_grad():
                    out.copy_(part)
            elif out.is_contiguous():
                held.read_part(offset, out.detach())
            else:
                dense = torch.empty_like(out, memory_format=torch.contiguous_format)
                held.read_part(offset, dense)
                with torch.no_grad():
                    out.copy_(dense)
        finally:
            held.release()
        return out

    def write(self, key: str, offset: int, tensor: torch.Tensor) -> None:
        """Write a part of a tensor, without the rest of it where that is on disk.

        Args:
            key: of the tensor.
            offset: in bytes, where the part begins.
            tensor: its bytes are written; any dtype, on the host or on a GPU.

        Raises:
            ValueError: the tensor has not so many bytes, or was adopted.
            OSError: it cannot be written; of a tensor on disk, a part of the range may have been.
        """
        check_tensor(tensor)
        offset = whole(offset, "offset")
        held = self._swapper.access(key, True)
        try:
            source = tensor.detach()
            part = transfer_part(self._memory, held, key, offset, source, is_written=True)
            if part is None:
                held.write_part(offset, source.contiguous().resolve_conj().resolve_neg())
        finally:
            held.release()

    def attach(
        self,
        key: str,
        path: str | os.PathLike[str] | StripeSet,
        offset: int,
        nbytes: int,
        *,
        dtype: torch.dtype = torch.uint8,
        shape: Sequence[int] | None = None,
    ) -> None:
        """Take a range of somebody else's file as a tensor, without copying it.

        It is read from there whenever it is needed, and never written: it can be lent ``shared`` only.

        Args:
            key: what it is called here.
            path: of the file, which has to stay as it is.
            offset: in bytes, where the tensor begins.
            nbytes: of the tensor.
            dtype: of its elements.
            shape: default: one dimension.

        Raises:
            ValueError: the file has no such range, or shape and dtype make other bytes.
        """
        offset, nbytes = whole(offset, "offset"), whole(nbytes, "nbytes")
        size = shape_of(nbytes, dtype, shape)
        where = os.fspath(path) if not isinstance(path, StripeSet) else path
        self._swapper.adopt(key, where, (offset, nbytes), dtype.itemsize, label_of(dtype, size))

    def import_(
        self,
        key: str,
        fd: int,
        offset: int,
        nbytes: int,
        *,
        dtype: torch.dtype = torch.uint8,
        shape: Sequence[int] | None = None,
    ) -> dict[str, int]:
        """Put a copy of a range of an open file under a key; the reverse of :meth:`export`.

        The file system shares the blocks where it can (XFS, Btrfs), else the kernel copies; the bytes pass through
        memory where neither can, and with checksums.

        Args:
            key: what it is called here.
            fd: of the file.
            offset: in bytes, where the tensor begins.
            nbytes: of the tensor.
            dtype: of its elements.
            shape: default: one dimension.

        Returns:
            How many bytes came which way: ``shared_bytes``, ``kernel_bytes``, ``memory_bytes``.
        """
        fd, offset, nbytes = whole(fd, "fd", 0, _FD_MAX), whole(offset, "offset"), whole(nbytes, "nbytes")
        size = shape_of(nbytes, dtype, shape)
        return self._swapper.import_(key, fd, offset, nbytes, label_of(dtype, size))

    def extents(self, key: str) -> list[tuple[str, int, int, int]]:
        """Tell where on disk a tensor is, once all that was changed of it is written.

        That is so until it is changed or forgotten.

        Returns:
            Path, descriptor, offset and bytes of each stretch, in order. The path of a file without a name works as
            long as this process has it open; the descriptor is the swapper's.
        """
        return self._swapper.locate(key)

    def export(self, key: str, fd: int, offset: int = 0) -> dict[str, int]:
        """Copy a tensor into an open file, as it is now; what was changed is written first.

        Nobody changes it meanwhile. Whole blocks are shared where the file system can (XFS, Btrfs; ``offset`` a
        multiple of its blocks), else the kernel copies.

        Returns:
            How many bytes went which way: ``shared_bytes``, ``kernel_bytes``, ``memory_bytes``.
        """
        return self._swapper.export(key, whole(fd, "fd", 0, _FD_MAX), whole(offset, "offset"))

    def stats(self) -> SwapStats:
        """Tell what it has cost so far, and how full it is."""
        return SwapStats(**self._swapper.stats())

    def keys(self) -> list[str]:
        """Give the keys, in no order."""
        return self._swapper.keys()

    def close(self) -> None:
        """End it: what was in it is gone, and who waits for it gets a ``ClosedError``."""
        self._swapper.close()

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._swapper.contains(key)

    def __len__(self) -> int:
        return len(self._swapper.keys())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a swapper is neither copied nor pickled: its tensors are in files of its own")


@atexit.register
def _close_all() -> None:
    for swapper in list(_OPEN):
        swapper.close()
