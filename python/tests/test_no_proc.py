"""A container without /proc: files are reopened by their names, and memory is estimated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys, torch, deepnvme
assert not os.path.exists("/proc/self")
os.chdir(sys.argv[1])
tensor = torch.randn(1000, 1001)
back = torch.empty_like(tensor)
os.makedirs("disk")
for backend in ("auto", "threads"):
    engine = deepnvme.Engine(backend=backend)
    for offset in (0, 3, 512):
        engine.write(tensor, "plain", offset=offset)
        engine.read(back.zero_(), "plain", offset=offset)
        assert torch.equal(back, tensor)
for name in ("x.pt", "x.safetensors", deepnvme.StripeSet(["disk/one", "disk/two"])):
    for _ in range(2):
        deepnvme.save({"a": tensor}, name)
        assert torch.equal(deepnvme.load(name, verify="full")["a"], tensor)
deepnvme.save({"a": tensor, "b": tensor + 1}, "sharded.safetensors", max_shard_bytes=5_000_000)
assert torch.equal(deepnvme.load("sharded.safetensors")["b"], tensor + 1)
with deepnvme.open("stream", "wb") as file:
    file.write(b"abc" * 100_000)
with deepnvme.open("stream", "rb") as file:
    assert file.read() == b"abc" * 100_000
for step in range(2):
    with deepnvme.Checkpointer("run", keep=1, async_=True) as checkpointer:
        checkpointer.save(step, {"a": tensor})
    assert torch.equal(deepnvme.Checkpointer("run").restore()["a"], tensor)
with deepnvme.Swapper("disk", memory="8MB") as swapper:
    swapper.put("a", tensor)
    with swapper.borrow("a") as borrowed:
        assert torch.equal(borrowed, tensor)
left = [name for folder in (".", "run", "disk") for name in os.listdir(folder) if "tmp" in name]
assert not left, left
"""
UNSHARED = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]


@pytest.mark.skipif(
    subprocess.run([*UNSHARED, "true"], capture_output=True, check=False).returncode != 0,
    reason="mounts need a namespace of their own",
)
def test_everything_works_without_proc(tmp_path: Path) -> None:
    subprocess.run([*UNSHARED, sys.executable, "-c", PROGRAM, tmp_path], check=True, timeout=120)
