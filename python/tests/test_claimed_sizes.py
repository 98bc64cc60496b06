"""Sizes that an argument claims are not believed: wrong arguments and missing memory are exceptions."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import deepnvme

CALLS = ("read_batch", "write_batch", "start_read_batch", "start_write_batch")


class Liar:
    """Says that it has more items than any memory has room for."""

    def __len__(self) -> int:
        return (1 << 62) - 1

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def test_a_wrong_length_hint_is_ignored() -> None:
    engine = deepnvme.default_engine()
    for call in CALLS:
        done = getattr(engine, call)(Liar())
        assert (done.result() if call.startswith("start_") else done) == 0


def test_one_tensor_is_no_list_of_items() -> None:
    torch = pytest.importorskip("torch")
    huge = torch.zeros(1).expand(1 << 40)
    for call in CALLS:
        with pytest.raises(TypeError, match=r"\(path, offset, tensor\), not Tensor"):
            getattr(deepnvme.default_engine(), call)(huge)


@pytest.mark.parametrize("items", [b"12345", bytearray(8), "weights.bin", {"weights.bin": 1}, 7, None])
def test_other_things_are_no_list_of_items(items: Any) -> None:
    for call in CALLS:
        with pytest.raises(TypeError, match=r"\(path, offset, tensor\)"):
            getattr(deepnvme.default_engine(), call)(items)


def test_memory_that_is_not_there_is_an_error(python: Callable[..., Any]) -> None:
    python("""
    import os, resource
    import deepnvme
    with open("file", "wb") as file:
        file.truncate(1 << 43)
    file = deepnvme.open("file", "rb")
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, resource.RLIM_INFINITY))
    try:
        file.read(1 << 42)
    except MemoryError:
        os._exit(0)
    os._exit(1)
    """)


BATCH = """
    import resource, sys, deepnvme
    buffer = bytearray(600)
    deepnvme.write(buffer, "a.bin")
    deepnvme.read(buffer, "a.bin")
    items = [("a.bin", 0, buffer)] * 200_000
    size = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (size + (20 << 20),) * 2)
    for call in (deepnvme.read_batch, deepnvme.write_batch, deepnvme.start_read_batch, deepnvme.start_write_batch):
        for given in (items, iter(items)):
            try:
                call(given)
            except MemoryError as error:
                assert "no memory for a batch" in str(error), error
            else:
                raise SystemExit("a batch for which there is no memory was taken")
    assert deepnvme.read(buffer, "a.bin") == 600
"""


def test_a_batch_for_which_there_is_no_memory_is_an_exception(python: Callable[..., Any]) -> None:
    python(BATCH)
