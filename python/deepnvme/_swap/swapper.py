"""``Swapper``: tensors by key. The extension moves the bytes; dtypes and shapes are handled here."""

from __future__ import annotations

import atexit
import math
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

import torch

from deepnvme._deepnvme import StripeSet, _Swapper
from deepnvme._swap.values import (
    Borrowed,
    SwapStats,
    check_tensor,
    checked_key,
    label_of,
    list_of_keys,
    make_swap_folders,
    parse_label,
    shape_of,
    transfer_part,
    view_tensor,
)
from deepnvme._utils.closing import ClosesAtEnd
from deepnvme._utils.devices import relaxed_capture_for
from deepnvme._utils.end_watch import EndWatch
from deepnvme._utils.memory import check_available, refused
from deepnvme._utils.public import check_engine, check_flag, parse_bytes, public, whole
from deepnvme._utils.tensors import checked_dtype, contiguous_exactly, copy_exactly, without_gradients
from deepnvme.errors import ClosedError, OutOfMemoryError

_FD_MAX = (1 << 31) - 1

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepnvme._deepnvme import Engine, _Borrowed

# Closed at interpreter exit, so that no named file remains.
_OPEN: EndWatch[None] = EndWatch(forgets=True)


@public
class Swapper(ClosesAtEnd):
    """Store tensors by key on disk, and pass them through bounded memory while they are used.

    A borrowed tensor is a view of the swapper's memory. The end of its block waits for torch's current stream, which
    may still copy from or to the tensor. Synchronise other streams that copy from or to it. Changes are written back in
    the background while the next tensors are read. At most ``memory`` bytes are used, whatever the number of tensors.
    When memory is full, callers block until space is freed. All methods are thread-safe.

    Args:
        swap_dir: the folder of the swap file; several folders, one per drive, for a striped one. A missing folder is
            created. The file is private, and unnamed where the file system supports that. It vanishes with the
            swapper, even after a crash.
        memory: bytes for tensors, such as ``"4GB"``.
        checksums: checksum everything that is written, and verify it when it is read. Default False.
        named: give the file a name (``.deepnvme-swap-file.deepnvme-tmp-...``), for programs that open it by name.
            Default False.
        prefetch_bytes: limit of prefetched bytes. Default: three eighths of ``memory``, at most 1 GiB.
        headroom_bytes: bytes to keep free for coming tensors, by writing early. Default: ``prefetch_bytes``.
        stripe_bytes: with several folders, bytes per stripe. Default 1 MiB. All sizes may be text.
        engine: the engine to use. Default: the default engine.

    Raises:
        OSError: the file cannot be created.
        OutOfMemoryError: the machine has less memory; the message states how much it has.
        ValueError: a setting is out of range.

    Example:
        >>> swapper = deepnvme.Swapper(".", memory="64MB")
        >>> swapper.put("moment.2", torch.zeros(1000))
        >>> with swapper.borrow("moment.2") as moment:
        ...     moment.add_(1.5)[:2]
        tensor([1.5000, 1.5000])
        >>> swapper.close()
    """

    def __init__(
        self,
        swap_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        memory: int | str,
        checksums: bool = False,
        named: bool = False,
        prefetch_bytes: int | str | None = None,
        headroom_bytes: int | str | None = None,
        stripe_bytes: int | str | None = None,
        engine: Engine | None = None,
    ) -> None:
        nbytes = parse_bytes(memory)
        check_available(nbytes)
        check_engine(engine)
        check_flag(checksums, "checksums")
        check_flag(named, "named")
        folders = make_swap_folders(swap_dir)
        try:
            self._swapper = _Swapper(
                folders,
                nbytes,
                None if prefetch_bytes is None else parse_bytes(prefetch_bytes, "prefetch_bytes"),
                None if headroom_bytes is None else parse_bytes(headroom_bytes, "headroom_bytes"),
                checksums,
                named,
                None if stripe_bytes is None else parse_bytes(stripe_bytes, "stripe_bytes"),
                engine,
            )
        except OutOfMemoryError as error:
            raise refused(nbytes) from error
        self._memory: torch.Tensor = torch.utils.dlpack.from_dlpack(self._swapper.capsule())
        _OPEN.watch(self, None)

    @property
    def pinning_error(self) -> str | None:
        """The reason for which the memory is not pinned, with a remedy; ``None`` if it is.

        The swapper works with unlocked memory too. The usual reason is ``RLIMIT_MEMLOCK``.
        """
        return self._swapper.pinning_error

    @property
    def is_closed(self) -> bool:
        """Whether the swapper is closed, or belongs to the parent of this forked process."""
        return self._swapper.is_closed

    def put(self, key: str, tensor: torch.Tensor) -> None:
        """Store a copy of a tensor under a key.

        It is in memory first and written later. It replaces the previous tensor of the key once nobody uses that. If a
        put fails half way, the key does not exist.

        Args:
            key: any text that UTF-8 can hold.
            tensor: any dtype, shape and strides, on the CPU or on a GPU.

        Raises:
            MemoryError: the tensor is larger than the swapper's ``memory``; the message states how much is enough.
            OSError: the disk is full, or tensors cannot be written to make room.
            RuntimeError: this thread holds the tensors that it would wait for.
            TypeError: it is not a tensor, or not one block of memory (sparse, nested, quantised).
            ValueError: its storage has fewer bytes than its shape takes.
        """
        check_tensor(tensor)
        source = tensor.detach()
        with self.create(key, source.shape, source.dtype) as held, relaxed_capture_for(source.device):
            try:
                copy_exactly(held, source)
            except NotImplementedError:
                # torch does not copy types with few bits.
                held.view(torch.uint8).copy_(source.view(torch.uint8))

    def create(self, key: str, shape: Sequence[int], dtype: torch.dtype) -> Borrowed:
        """Create a tensor and borrow it for a ``with`` block that fills it: a :meth:`put` without a copy.

        It is uninitialised. When the block ends, the tensor replaces the previous one of the key. If the block raises,
        the key does not exist.

        Args:
            key: any text that UTF-8 can hold.
            shape: shape of the tensor.
            dtype: dtype of the tensor.

        Returns:
            A :class:`Borrowed`, whose block gets the tensor.

        Raises:
            TypeError: ``dtype`` is not a ``torch.dtype``, or a dimension is not an integer.
            ValueError: a dimension is negative.
            MemoryError: the tensor is larger than the swapper's ``memory``. This and the following errors are raised
                when the block begins.
            OSError: the disk is full, or tensors cannot be written to make room.
            RuntimeError: this thread holds the tensors that it would wait for.

        Example:
            >>> swapper = deepnvme.Swapper(".", memory="1MB")
            >>> with swapper.create("moment", (2, 3), torch.float32) as moment:
            ...     _ = moment.fill_(0.5)
            >>> swapper.read("moment", 0, torch.empty(2))
            tensor([0.5000, 0.5000])
        """
        checked_key(key)
        checked_dtype(dtype)
        size = torch.Size(whole(length, f"a dimension of {key!r}") for length in shape)
        nbytes = whole(math.prod(size) * dtype.itemsize, f"the bytes of {key!r}")

        def view(held: _Borrowed) -> torch.Tensor:
            return view_tensor(self._memory, held, dtype, size)

        return Borrowed(key, lambda: self._swapper.create(key, nbytes), view, label_of(dtype, size))

    def borrow(self, key: str, *, shared: bool = False) -> Borrowed:
        """Borrow a tensor for a ``with`` block, without a copy.

        The block has exclusive access. The tensor is written back later, even if the block raises, unless
        ``mark_clean()`` of the result was called. With ``shared`` several blocks may read it, and none may change it.
        If a shared block changes the tensor, the end of the block raises an error. The change is kept, except that of
        an attached tensor. The view is invalid after the block: its memory is reused. Copy the values to keep.

        Args:
            key: key of the tensor.
            shared: read only. Default False.

        Returns:
            A :class:`Borrowed`, whose block gets the tensor.

        Raises:
            KeyError: the key does not exist. This and the following errors are raised when the block begins.
            OSError: it cannot be read, or tensors cannot be written to make room.
            CorruptFileError: with checksums, the bytes differ from those that were written.
            RuntimeError: this thread holds the tensors that it would wait for.
            ValueError: it was attached, and can only be borrowed shared; or a shared block has changed it.
        """
        return Borrowed(
            checked_key(key),
            lambda: self._swapper.borrow(key, not shared),
            lambda held: view_tensor(self._memory, held, *parse_label(held.label)),
            is_shared=shared,
        )

    def prefetch(self, keys: Iterable[str]) -> None:
        """Load tensors that will be borrowed soon, in this order, as far as memory allows.

        Args:
            keys: one key or several.

        Raises:
            KeyError: one of the keys does not exist.
        """
        self._swapper.prefetch(list_of_keys(keys))

    def schedule(self, keys: Iterable[str], *, repeat: bool = True) -> None:
        """Set the order in which tensors will be borrowed.

        Tensors are prefetched in that order, and the one whose next use is farthest away is evicted first. Without an
        order the least recently used one is evicted. An empty order removes the schedule.

        Args:
            keys: keys in order, possibly repeated, or one key. They need not exist yet.
            repeat: start again after the end, as training steps do. Default True.

        Raises:
            TypeError: a key is not a str.
        """
        check_flag(repeat, "repeat")
        self._swapper.schedule(list_of_keys(keys), repeat)

    def delete(self, key: str) -> None:
        """Delete a tensor. Current borrowers may use it until their block ends.

        Args:
            key: key of the tensor.

        Raises:
            KeyError: the key does not exist.
        """
        self._swapper.delete(checked_key(key))

    def flush(self, keys: Iterable[str] | None = None) -> None:
        """Wait until all changes are on disk, or the changes of some keys.

        Changes that begin after the call may be on disk or not. A borrow that would change a tensor again waits until
        that tensor is written.

        Args:
            keys: the keys to wait for. Default: all.

        Raises:
            OSError: a tensor could not be written. It stays in memory, and the next flush tries again.
            RuntimeError: this thread holds one of them and could still change it.
        """
        self._swapper.flush(None if keys is None else list_of_keys(keys))

    def read(self, key: str, offset: int, out: torch.Tensor) -> torch.Tensor:
        """Read a part of a tensor. If the tensor is on disk, the rest of it stays there.

        Args:
            key: key of the tensor.
            offset: byte offset of the part.
            out: the tensor to fill; any dtype, on the CPU or on a GPU.

        Returns:
            ``out``.

        Raises:
            KeyError: the key does not exist.
            OSError: it cannot be read.
            TypeError: ``out`` is not a tensor, or not one block of memory (sparse, nested, quantised).
            ValueError: the part exceeds the tensor.

        Example:
            >>> with deepnvme.Swapper(".", memory="1MB") as swapper:
            ...     swapper.put("moment", torch.arange(4.0))
            ...     swapper.read("moment", 8, torch.empty(2))
            tensor([2., 3.])
        """
        check_tensor(out)
        offset = whole(offset, "offset")
        held = self._swapper.access(checked_key(key), False)
        try:
            with relaxed_capture_for(out.device):
                part = transfer_part(self._memory, held, key, offset, out)
                if part is not None:
                    without_gradients(copy_exactly, out, part)
                elif out.is_contiguous():
                    held.read_at(offset, out.detach())
                else:
                    dense = torch.empty_like(out, memory_format=torch.contiguous_format)
                    held.read_at(offset, dense)
                    without_gradients(copy_exactly, out, dense)
        finally:
            held.release()
        return out

    def write(self, key: str, offset: int, tensor: torch.Tensor) -> None:
        """Write a part of a tensor. If the tensor is on disk, the rest of it stays there.

        Args:
            key: key of the tensor.
            offset: byte offset of the part.
            tensor: the bytes to write; any dtype, on the CPU or on a GPU.

        Raises:
            KeyError: the key does not exist.
            ValueError: the part exceeds the tensor, or the tensor was attached.
            OSError: it cannot be written. If the tensor is on disk, part of the range may have been written.
        """
        check_tensor(tensor)
        offset = whole(offset, "offset")
        held = self._swapper.access(checked_key(key), True)
        try:
            source = tensor.detach()
            with relaxed_capture_for(source.device):
                part = transfer_part(self._memory, held, key, offset, source, is_written=True)
                if part is None:
                    held.write_at(offset, contiguous_exactly(source).resolve_conj().resolve_neg())
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
        """Use a range of an existing file as a tensor, without copying it.

        It is read from the file when needed and never written. It can only be borrowed ``shared``.

        Args:
            key: key for the tensor.
            path: path of the file, which must not change.
            offset: byte offset of the tensor.
            nbytes: bytes of the tensor.
            dtype: dtype of its elements.
            shape: its shape. Default: one dimension.

        Raises:
            OSError: the file cannot be opened.
            ValueError: the file is too short, or shape and dtype do not match ``nbytes``.
            MemoryError: the tensor is larger than the swapper's ``memory``.
            RuntimeError: this thread has borrowed the tensor that this one replaces.
            ClosedError: the swapper was closed.
        """
        offset, nbytes = whole(offset, "offset"), whole(nbytes, "nbytes")
        size = shape_of(nbytes, checked_dtype(dtype), shape)
        where = os.fspath(path) if not isinstance(path, StripeSet) else path
        self._swapper.attach(checked_key(key), where, (offset, nbytes), dtype.itemsize, label_of(dtype, size))

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
        """Store a copy of a range of an open file under a key. The reverse of :meth:`export`.

        The file system shares the blocks if it can (XFS, Btrfs); otherwise the kernel copies. Bytes pass through memory
        if neither is possible, or with checksums.

        Args:
            key: key for the tensor.
            fd: descriptor of the file.
            offset: byte offset of the tensor.
            nbytes: bytes of the tensor.
            dtype: dtype of its elements.
            shape: its shape. Default: one dimension.

        Returns:
            Bytes by route: ``shared_bytes``, ``kernel_bytes``, ``memory_bytes``.

        Raises:
            OSError: the file cannot be read, or ends too early; or the disk is full.
            ValueError: shape and dtype do not match ``nbytes``.
            MemoryError: the tensor is larger than the swapper's ``memory``.
            RuntimeError: this thread has borrowed the tensor that this one replaces.
            ClosedError: the swapper was closed.

        Example:
            >>> nbytes = deepnvme.write(torch.arange(4.0), "moment.bin")
            >>> with deepnvme.Swapper(".", memory="1MB") as swapper, open("moment.bin", "rb") as file:
            ...     moved = swapper.import_("moment", file.fileno(), 0, nbytes, dtype=torch.float32)
            ...     swapper.read("moment", 8, torch.empty(2))
            tensor([2., 3.])
        """
        fd, offset, nbytes = whole(fd, "fd", 0, _FD_MAX), whole(offset, "offset"), whole(nbytes, "nbytes")
        size = shape_of(nbytes, checked_dtype(dtype), shape)
        return self._swapper.import_(checked_key(key), fd, offset, nbytes, label_of(dtype, size))

    def extents(self, key: str) -> list[tuple[str, int, int, int]]:
        """Write pending changes of a tensor, and return where it is on disk.

        The result is valid until the tensor is changed or deleted.

        Args:
            key: key of the tensor.

        Returns:
            Path, descriptor, offset and bytes of each extent, in order. The path of an unnamed file works while this
            process has it open. The descriptor belongs to the swapper.

        Raises:
            KeyError: the key does not exist.
            OSError: pending changes cannot be written.
            ClosedError: the swapper was closed.
        """
        return self._swapper.extents(checked_key(key))

    def export(self, key: str, fd: int, offset: int = 0) -> dict[str, int]:
        """Copy a tensor into an open file. Pending changes are written first.

        Nobody can change it during the copy. The file system shares whole blocks if it can (XFS, Btrfs; ``offset`` a
        multiple of its block size); otherwise the kernel copies.

        Args:
            key: key of the tensor.
            fd: descriptor of the file, open for writing.
            offset: byte offset in the file. Default 0.

        Returns:
            Bytes by route: ``shared_bytes``, ``kernel_bytes``, ``memory_bytes``.

        Raises:
            KeyError: the key does not exist.
            OSError: pending changes, or the copy, cannot be written. A part of the copy may be in the file.
            ClosedError: the swapper was closed.
        """
        return self._swapper.export(checked_key(key), whole(fd, "fd", 0, _FD_MAX), whole(offset, "offset"))

    def stats(self) -> SwapStats:
        """Return the counters so far, and how full the swapper is. They stay readable after :meth:`close`."""
        return SwapStats(**self._swapper.stats())

    def keys(self) -> list[str]:
        """List the keys, in no particular order."""
        return self._swapper.keys()

    def close(self) -> None:
        """Close the swapper. Its tensors are gone, and waiting callers get a ``ClosedError``.

        Later calls raise it as well, except :meth:`stats` and a second ``close``.
        """
        self._swapper.close()

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._swapper.contains(key)

    def __len__(self) -> int:
        return len(self._swapper.keys())

    def __repr__(self) -> str:
        try:
            stats = self.stats()
        except ClosedError:
            # After a fork.
            return "<deepnvme.Swapper of the parent process>"
        state = ", closed" if self.is_closed else ""
        return f"<deepnvme.Swapper, items={stats.items}, memory_bytes={stats.memory_bytes}{state}>"

    def _check_open(self) -> None:
        self._swapper.check_open()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a swapper can be neither copied nor pickled: it owns its files; make another one")


@atexit.register
def _close_all() -> None:
    for swapper in _OPEN.living():
        swapper.close()
