"""Faults that only the fake driver can produce. Not collected on a real GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme

from .test_transfer import bits, values


def test_an_amd_gpu_is_not_known_yet(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.0")
    with pytest.raises(TypeError, match=r"AMD GPU, which deepnvme does not know yet.*tensor\.cpu\(\)"):
        deepnvme.write(gpu.tensor(values((10,), torch.uint8)), tmp_path / "a")


def test_a_driver_that_refuses(gpu: Any, engine: deepnvme.Engine, tmp_path: Path) -> None:
    path = tmp_path / "tensor.bin"
    tensor = gpu.tensor(values((100_000,), torch.uint8))
    gpu.driver.fail("cuMemcpyDtoHAsync_v2", 2, 700)
    with pytest.raises(deepnvme.errors.DeviceError, match=r"cuMemcpyDtoHAsync.*ILLEGAL_ADDRESS.*700") as failure:
        engine.write(tensor, path)
    assert failure.value.filename == str(path)
    assert failure.value.offset is not None
    assert engine.write(tensor, path) == 100_000
    assert path.read_bytes() == bits(gpu.to_host(tensor))


def test_cufile_that_does_not_start(gpu: Any, tmp_path: Path) -> None:
    host = values((300_000,), torch.uint8)
    gpu.driver.fail("cuFileDriverOpen", 0, 5001)
    with deepnvme.Engine(gds="required") as engine:
        with pytest.raises(deepnvme.errors.UnsupportedError, match=r"5001.*GPUDirect Storage is required"):
            engine.write(gpu.tensor(host), tmp_path / "a")
        assert engine.write(host, tmp_path / "a") == host.nbytes


def test_a_file_that_cufile_would_copy_through_the_host(gpu: Any, tmp_path: Path) -> None:
    host = values((300_000,), torch.uint8)
    gpu.driver.fail("cuFileHandleRegister@unsupported", 0, 1)
    with deepnvme.Engine(gds="preferred") as engine:
        for name in ("copied", "direct"):
            engine.write(gpu.tensor(host), tmp_path / name)
            assert (tmp_path / name).read_bytes() == bits(host)
            if name == "copied":
                assert engine.stats().bytes_gds == 0
        stats = engine.stats()
    assert "not supported by this file or its file system (5008)" in (stats.gds_reason or "")
    assert 0 < stats.bytes_gds <= host.nbytes, "the other file"


def test_the_report_asks_cufile(gpu: Any, tmp_path: Path) -> None:
    def gds() -> Any:
        return deepnvme.report(tmp_path)["folders"][0]["gds"]

    assert gds() == {"mode": "direct", "reason": None, "reads": {"nvidia_fs": 1, "peer_to_peer": 0, "posix": 0}}
    gpu.driver.fail("cuFileHandleRegister@unsupported", 0, 1)
    refused = gds()
    assert (refused["mode"], refused["reads"]) == ("compatibility", None)
    assert "(5008)" in refused["reason"]
    assert list(tmp_path.iterdir()) == []
