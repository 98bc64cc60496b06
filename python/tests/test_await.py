"""``await transfer``."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import deepnvme

RandomBytes = Callable[[int], bytes]

MANY = 24 << 20


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def check_descriptors_close(before: int) -> None:
    """Wait until no more descriptors are open than before. A worker closes its own shortly after it has reported."""
    deadline = time.monotonic() + 10
    while open_descriptors() > before:
        assert time.monotonic() < deadline, "descriptors leak"


def test_await_returns_the_bytes(tmp_path: Path, random_bytes: RandomBytes) -> None:
    data = random_bytes(500_000)

    async def main() -> bytearray:
        assert await deepnvme.start_write(data, tmp_path / "file") == 500_000
        target = bytearray(500_000)
        assert await deepnvme.start_read(target, tmp_path / "file") == 500_000
        return target

    assert asyncio.run(main()) == data


def test_the_loop_runs_meanwhile(slow_engine: deepnvme.Engine, tmp_path: Path) -> None:
    async def main() -> int:
        pending = slow_engine.start_write(bytes(MANY), tmp_path / "file")
        turns = 0

        async def count() -> None:
            nonlocal turns
            while not pending.done():
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        assert await pending == MANY
        await counting
        return turns

    assert asyncio.run(main()) > 10


def test_several_tasks_await_one_request(slow_engine: deepnvme.Engine, tmp_path: Path) -> None:
    before = open_descriptors()

    async def main() -> list[int]:
        pending = slow_engine.start_write(bytes(MANY), tmp_path / "file")

        async def wait() -> int:
            return await pending

        results = await asyncio.gather(*[wait() for _ in range(10)])
        return [*results, await pending]

    assert asyncio.run(main()) == [MANY] * 11
    check_descriptors_close(before)


def test_many_requests_gathered(tmp_path: Path, random_bytes: RandomBytes) -> None:
    parts = [random_bytes(10_000) for _ in range(100)]

    async def write(index: int) -> int:
        return await deepnvme.start_write(parts[index], tmp_path / "file", index * 10_000)

    async def main() -> None:
        assert await asyncio.gather(*map(write, range(100))) == [10_000] * 100

    asyncio.run(main())
    assert (tmp_path / "file").read_bytes() == b"".join(parts)


def test_await_of_a_finished_request(tmp_path: Path) -> None:
    pending = deepnvme.start_write(b"12345", tmp_path / "file")
    pending.result()

    async def main() -> int:
        return await pending

    assert asyncio.run(main()) == 5
    assert asyncio.run(main()) == 5, "and in another loop"


def test_await_raises_the_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")

    async def main() -> None:
        pending = deepnvme.start_read(bytearray(10), tmp_path / "file")
        for _ in range(2):
            with pytest.raises(deepnvme.EndOfFileError) as caught:
                await pending
            assert caught.value.bytes_done == 5

    asyncio.run(main())


def test_cancelling_the_task_leaves_the_request_alone(slow_engine: deepnvme.Engine, tmp_path: Path) -> None:
    before = open_descriptors()

    async def main() -> None:
        pending = slow_engine.start_write(bytes(MANY), tmp_path / "file")

        async def wait() -> int:
            return await pending

        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(), 0.001)
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not pending.done()
        assert await pending == MANY

    asyncio.run(main())
    check_descriptors_close(before)


def test_cancelling_the_request_wakes_the_task(slow_engine: deepnvme.Engine, tmp_path: Path) -> None:
    async def main() -> None:
        pending = slow_engine.start_write(bytes(MANY), tmp_path / "file")

        async def wait() -> int:
            return await pending

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        assert pending.cancel()
        with pytest.raises(deepnvme.errors.CancelledError):
            await task

    asyncio.run(main())
