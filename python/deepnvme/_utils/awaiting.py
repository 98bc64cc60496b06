"""``await pending``: the bridge from a request to asyncio, imported when first awaited."""

import asyncio
import os

from deepnvme._deepnvme import Pending


async def completion(pending: Pending) -> int:
    """Wait for a request without blocking the loop; return the bytes moved, or raise its failure.

    Cancelling the task that awaits leaves the request alone: it goes on, and may be awaited again.
    """
    if not pending.done():
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        # Each waiter has an eventfd of its own, since a loop knows one callback per descriptor.
        eventfd = pending._completion_fd()  # noqa: SLF001
        try:
            loop.add_reader(eventfd, _wake, done)
            try:
                await done
            finally:
                loop.remove_reader(eventfd)
        finally:
            os.close(eventfd)
    return pending.wait()


def _wake(done: "asyncio.Future[None]") -> None:
    """Resume the waiter, unless it was cancelled in the meantime."""
    if not done.done():
        done.set_result(None)
