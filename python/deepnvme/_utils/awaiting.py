"""``await pending``: connects a request to asyncio. Imported when a request is first awaited."""

import asyncio
import os

from deepnvme._deepnvme import Transfer


async def completion(pending: Transfer) -> int:
    """Wait for a request without blocking the loop. Returns the bytes moved, or raises its error.

    Cancelling the awaiting task does not cancel the request. It continues, and may be awaited again.
    """
    if not pending.done():
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        # Each waiter needs its own eventfd: a loop has one callback per descriptor.
        eventfd = pending._completion_fd()  # noqa: SLF001
        try:
            loop.add_reader(eventfd, _wake, done)
            try:
                await done
            finally:
                loop.remove_reader(eventfd)
        finally:
            os.close(eventfd)
    return pending.result()


def _wake(done: "asyncio.Future[None]") -> None:
    """Resume the waiter, unless it was cancelled."""
    if not done.done():
        done.set_result(None)
