"""If there is no memory for a file's objects, the error says so and names the file. The process continues."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

import deepnvme

from .test_hostile import archive

CHILD = """
import json, os, resource, sys
import torch, deepnvme
from deepnvme import errors
from deepnvme.integrations.dcp import DeepnvmeReader

pickle, tensors, header, listed, steps, dcp = sys.argv[1:]
small = torch.ones(4)
deepnvme.save({"a": small}, pickle + ".small.pt")
ways = {
    pickle: lambda: deepnvme.load(pickle),
    tensors: lambda: deepnvme.load(tensors),
    header: lambda: deepnvme.load(header, device="meta"),
    listed: lambda: deepnvme.load(listed),
    steps: lambda: deepnvme.Checkpointer(steps),
    dcp: lambda: DeepnvmeReader(dcp).read_metadata(),
}
deepnvme.load(pickle + ".small.pt", lazy=True)["a"].sum()
for name, way in ways.items():
    refused = 0
    for room in (8, 16, 32, 64, 128):
        pages = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (room << 20), resource.RLIM_INFINITY))
        try:
            way()
        except errors.OutOfMemoryError as error:
            refused += 1
            assert name in str(error), error
        except errors.CorruptFileError as error:
            assert name in str(error), error
        except FileNotFoundError:
            # The list names missing files.
            assert name == listed
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert torch.equal(deepnvme.load(pickle + ".small.pt")["a"], small)
    print(os.path.basename(name), refused, flush=True)
"""


def test_memory_that_is_refused_is_an_error_of_the_file(tmp_path: Path) -> None:
    pickle = archive(tmp_path / "objects.pt", b"\x80\x02](" + b"]" * 3_000_000 + b"e.")
    tensors = tmp_path / "tensors.pt"
    deepnvme.save({"a": torch.randn(40 << 20)}, tensors)
    header = tmp_path / "header.safetensors"
    deepnvme.save({f"layers.{index}": torch.empty(0) for index in range(50_000)}, header)
    names = ", ".join(f'"t{index}": "x.safetensors"' for index in range(200_000))
    listed = tmp_path / "listed.safetensors.index.json"
    listed.write_text(f'{{"weight_map": {{{names}}}}}')
    steps, dcp = tmp_path / "steps", tmp_path / "dcp"
    steps.mkdir()
    (steps / "manifest.json").write_text('{"version": 2, "checkpoints": [' + " " * (32 << 20))
    dcp.mkdir()
    (dcp / "deepnvme.json").write_text('{"version": 1, "entries": {' + " " * (32 << 20))
    command: list[str | Path] = [sys.executable, "-c", CHILD, pickle, tensors, header, listed, steps, dcp]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    refused = dict(line.split() for line in done.stdout.splitlines())
    # Each of them was refused at least once, and none ended the process.
    assert len(refused) == 6
    assert "0" not in refused.values(), refused
