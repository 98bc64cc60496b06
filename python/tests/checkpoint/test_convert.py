"""``deepnvme convert`` gives the same tensors in the other format, bit for bit, or says what cannot be converted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import deepnvme

SCHEMA = json.loads((Path(__file__).parents[3] / "docs" / "reference" / "schema" / "convert.json").read_text())


def convert(source: Path, target: Path, *, status: int = 0) -> tuple[dict[str, Any], str]:
    """Convert a file. Returns the JSON output and standard error."""
    command: list[str | Path] = [sys.executable, "-m", "deepnvme", "convert", source, target, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    if status:
        assert done.stdout == ""
        return {}, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    jsonschema.validate(found, SCHEMA)
    return found, done.stderr


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].contiguous().view(-1).view(torch.uint8).equal(tensor.contiguous().view(-1).view(torch.uint8))


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    big = randn(700, 1100)
    return {
        "half": randn(3, 5).bfloat16(), "whole": randn(1000, 300), "transposed": big.t(), "part": big[3:600, ::3],
        "row": big[5], "number": torch.tensor(3.5), "empty": torch.empty(0, 7), "expanded": randn(1, 4).expand(5, 4),
        "ints": torch.arange(12).view(3, 4), "flags": randn(9) > 0, "tied": big, "wide": randn(5).to(torch.complex64),
        "eight": randn(16).to(torch.float8_e4m3fn), "unsigned": torch.arange(5).to(torch.uint16),
    }  # fmt: skip


@pytest.mark.parametrize("writer", ["torch", "deepnvme"])
def test_an_archive_becomes_safetensors(tmp_path: Path, tensors: dict[str, torch.Tensor], writer: str) -> None:
    source, target = tmp_path / "a.pt", tmp_path / "b.safetensors"
    (torch.save if writer == "torch" else deepnvme.save)(tensors, source)
    found, _ = convert(source, target)
    assert (found["tensors"], found["left_out"], found["file_bytes"]) == (14, [], target.stat().st_size)
    assert_same(load_file(target), tensors)
    with safe_open(target, "pt") as file:
        assert file.metadata()["format"] == "pt"
    assert deepnvme.load(target, verify="full").keys() == tensors.keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "b.safetensors"]


@pytest.mark.parametrize("writer", ["safetensors", "deepnvme"])
def test_safetensors_become_an_archive(tmp_path: Path, tensors: dict[str, torch.Tensor], writer: str) -> None:
    source, target = tmp_path / "a.safetensors", tmp_path / "b.pt"
    own = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    if writer == "deepnvme":
        deepnvme.save(own, source, metadata={"who": "me"})
    else:
        save_file(own, source)
    convert(source, target)
    for mmap in (False, True):
        assert_same(torch.load(target, weights_only=True, mmap=mmap), own)
    assert_same(deepnvme.load(target, verify="full"), own)
    back = tmp_path / "c.safetensors"
    convert(target, back)
    assert_same(load_file(back), own)


def test_shards_become_one_file(tmp_path: Path) -> None:
    state = {f"layer.{index}.weight": torch.randn(200, 300) for index in range(7)}
    deepnvme.save(state, tmp_path / "model.safetensors", max_shard_bytes=500_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    convert(tmp_path, tmp_path / "one.pt")
    assert_same(torch.load(tmp_path / "one.pt", weights_only=True), state)


def test_an_index_names_the_files_to_convert(tmp_path: Path) -> None:
    state = {f"layer.{index}": torch.randn(200, 300) for index in range(4)}
    deepnvme.save(state, tmp_path / "model.safetensors", max_shard_bytes=500_000)
    index = tmp_path / "model.safetensors.index.json"
    wire = json.loads(index.read_text())
    del wire["weight_map"]["layer.2"]
    index.write_text(json.dumps(wire))
    assert 'remove "deepnvme.checksum" and' in convert(index, tmp_path / "some.pt", status=1)[1]
    del wire["metadata"]["deepnvme.checksum"], wire["metadata"]["deepnvme.files"]
    index.write_text(json.dumps(wire))
    convert(index, tmp_path / "some.pt")
    del state["layer.2"]
    assert_same(torch.load(tmp_path / "some.pt", weights_only=True), state)
    wire["weight_map"]["layer.9"] = wire["weight_map"]["layer.1"]
    index.write_text(json.dumps(wire))
    assert "layer.9" in convert(index, tmp_path / "more.pt", status=1)[1]
    assert not (tmp_path / "more.pt").exists()


def test_a_source_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"weight": torch.randn(100), "step": 7}, path)
    before = path.read_bytes()
    (tmp_path / "link.pt").symlink_to(path)
    (tmp_path / "hard.pt").hardlink_to(path)
    for target in (path, tmp_path / "link.pt", tmp_path / "hard.pt", tmp_path / ".." / tmp_path.name / "x.pt"):
        _, said = convert(path, target, status=1)
        assert "name another file" in said
        assert str(target) in said
        assert path.read_bytes() == before
    deepnvme.save({"a": torch.randn(1000), "b": torch.randn(1000)}, tmp_path / "m.safetensors", max_shard_bytes=4000)
    index = tmp_path / "m.safetensors.index.json"
    shard = next(tmp_path.glob("m-*.safetensors"))
    (tmp_path / "index.pt").symlink_to(index)
    (tmp_path / "hard index.pt").hardlink_to(index)
    for source in (index, tmp_path / "m.safetensors"):
        for target in (index, shard, tmp_path / "index.pt", tmp_path / "hard index.pt"):
            _, said = convert(source, target, status=1)
            assert "name another file" in said or "the name of a list of files" in said
    assert set(deepnvme.load(index, verify="full")) == {"a", "b"}


def test_non_tensors_are_named(tmp_path: Path) -> None:
    model = torch.nn.Linear(30, 40)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 30)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7, "name": "run",
             "nested": OrderedDict(list=[torch.ones(2), None, 1.5])}  # fmt: skip
    torch.save(state, tmp_path / "a.pt")
    found, _ = convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    left_out = dict(found["left_out"])
    assert left_out["step"] == "int"
    assert left_out["name"] == "str"
    assert left_out["nested.list.1"] == "None"
    assert left_out["optimizer.param_groups.0.lr"] == "float"
    loaded = load_file(tmp_path / "b.safetensors")
    assert loaded["model.weight"].equal(model.weight)
    assert loaded["optimizer.state.0.exp_avg"].equal(state["optimizer"]["state"][0]["exp_avg"])  # type: ignore[index]
    text = subprocess.run([sys.executable, "-m", "deepnvme", "convert", tmp_path / "a.pt", tmp_path / "c.safetensors"],
                          capture_output=True, text=True, check=True).stdout  # fmt: skip
    assert text.splitlines()[0].startswith(f"{tmp_path / 'c.safetensors'}: 9 tensors, ")
    assert text.splitlines()[-1].startswith("and ")


def test_tensors_of_an_archive_share_memory_in_the_next_one(tmp_path: Path) -> None:
    base = torch.randn(1000, 1000)
    torch.save({"a": base, "b": base[10:20].t()}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.pt")
    assert (tmp_path / "b.pt").stat().st_size < 4_100_000
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert loaded["b"].equal(base[10:20].t())
    loaded["a"][10, 0] = 7
    assert loaded["b"][0, 0] == 7


@pytest.mark.parametrize("kind", ["whole", "view"])
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_damaged_file_is_not_made_good(tmp_path: Path, kind: str, suffix: str) -> None:
    source, target = tmp_path / f"a.{suffix}", tmp_path / f"b.{'safetensors' if suffix == 'pt' else 'pt'}"
    base = torch.randn(900, 900)
    deepnvme.save({"a": base if kind == "whole" or suffix == "safetensors" else base.t()}, source)
    target.write_text("the old one")
    data = bytearray(source.read_bytes())
    data[len(data) // 2] ^= 4
    source.write_bytes(data)
    _, err = convert(source, target, status=1)
    assert "are not those that were saved" in err
    assert str(source) in err
    assert target.read_text() == "the old one"
    assert len(list(tmp_path.iterdir())) == 2


def test_nobody_sees_more_of_the_result_than_of_the_source(tmp_path: Path) -> None:
    deepnvme.save({"a": torch.arange(5)}, tmp_path / "old.pt")
    (tmp_path / "old.pt").chmod(0o600)
    convert(tmp_path / "old.pt", tmp_path / "new.safetensors")
    assert (tmp_path / "new.safetensors").stat().st_mode & 0o777 == 0o600
    # A replaced file keeps its permissions.
    (tmp_path / "new.safetensors").chmod(0o644)
    convert(tmp_path / "old.pt", tmp_path / "new.safetensors")
    assert (tmp_path / "new.safetensors").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("kind", ["sparse", "csr", "nested"])
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_a_tensor_made_of_tensors_is_refused(tmp_path: Path, kind: str, suffix: str) -> None:
    """As separate tensors, its values and indices would no longer mean it."""
    dense = torch.eye(3)
    made: dict[str, Callable[[], torch.Tensor]] = {
        "sparse": dense.to_sparse,
        "csr": dense.to_sparse_csr,
        "nested": lambda: torch.nested.nested_tensor([dense[0], dense[0, :2]]),
    }
    torch.save({"dense": dense, "odd": made[kind]()}, tmp_path / "from.pt")
    _, said = convert(tmp_path / "from.pt", tmp_path / f"to.{suffix}", status=1)
    assert f'"odd" is a {"nested" if kind == "nested" else "sparse"} tensor' in said
    assert str(tmp_path / "from.pt") in said
    assert not (tmp_path / f"to.{suffix}").exists()


def test_a_tensor_made_of_tensors_is_refused_wherever_it_is(tmp_path: Path) -> None:
    odd = torch.eye(3).to_sparse()
    states = ([*[None] * 20_000, odd], {"set": {odd}}, {"in": OrderedDict(a=[odd])})
    for state in states:
        torch.save(state, tmp_path / "from.pt")
        _, said = convert(tmp_path / "from.pt", tmp_path / "to.safetensors", status=1)
        assert "a sparse tensor, which cannot be converted" in said
        assert not (tmp_path / "to.safetensors").exists()


def test_a_pickled_module_is_refused(tmp_path: Path) -> None:
    for state in (torch.nn.Sequential(torch.nn.Linear(2, 3)), {"model": torch.nn.BatchNorm1d(3), "step": 1}):
        torch.save(state, tmp_path / "from.pt")
        said = convert(tmp_path / "from.pt", tmp_path / "to.safetensors", status=1)[1]
        assert "from.pt: convert: this is a pickled module" in said
        assert "save its state_dict()" in said
        assert not (tmp_path / "to.safetensors").exists()
    # Such names alone are those of tensors.
    torch.save({"_parameters": {"weight": torch.ones(2)}, "step": 1}, tmp_path / "from.pt")
    convert(tmp_path / "from.pt", tmp_path / "to.safetensors")


def test_inputs_that_cannot_be_converted(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no tensors here")
    assert "neither a torch archive nor a safetensors" in convert(tmp_path / "text", tmp_path / "b.pt", status=1)[1]
    assert "none.pt" in convert(tmp_path / "none.pt", tmp_path / "b.pt", status=1)[1]
    torch.save({"a": torch.randn(4).to(torch.complex32), "b": torch.randn(3)}, tmp_path / "a.pt")
    assert "complex32" in convert(tmp_path / "a.pt", tmp_path / "b.safetensors", status=1)[1]
    torch.save({"a": {"b": torch.ones(1)}, "a.b": torch.ones(2)}, tmp_path / "twice.pt")
    assert "'a.b'" in convert(tmp_path / "twice.pt", tmp_path / "b.safetensors", status=1)[1].replace('"', "'")
    assert not (tmp_path / "b.safetensors").exists()
    assert not (tmp_path / "b.pt").exists()


@pytest.mark.parametrize("pair", [("a.pt", "b.safetensors"), ("a.safetensors", "b.pt")])
def test_the_model_is_never_in_memory(tmp_path: Path, pair: tuple[str, str]) -> None:
    source, target = tmp_path / pair[0], tmp_path / pair[1]
    # 480 MB in tensors of at most 48 MB.
    deepnvme.save({f"t{index}": torch.randn(12_000_000) for index in range(10)}, source)
    program = (
        "import resource, subprocess, sys;"
        "subprocess.run(sys.argv[1:], check=True);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command: list[str | Path] = [sys.executable, "-m", "deepnvme", "convert", source, target]
    done = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, check=True)
    assert int(done.stdout.splitlines()[-1]) << 10 < 200_000_000


def test_a_name_that_an_archive_cannot_have_replaces_nothing(tmp_path: Path) -> None:
    deepnvme.save({"n" * 4097: torch.ones(3)}, tmp_path / "long.safetensors")
    deepnvme.save({"old": torch.ones(3)}, tmp_path / "there.pt")
    with pytest.raises(deepnvme.errors.UnsupportedError, match="more than 4096 bytes"):
        deepnvme.convert(tmp_path / "long.safetensors", tmp_path / "there.pt")
    assert list(deepnvme.load(tmp_path / "there.pt")) == ["old"]
    deepnvme.save({"n" * 4096: torch.ones(3)}, tmp_path / "fits.safetensors")
    deepnvme.convert(tmp_path / "fits.safetensors", tmp_path / "new.pt")
    assert list(deepnvme.load(tmp_path / "new.pt")) == ["n" * 4096]


@pytest.mark.parametrize("dims", [8, 25, 60])
def test_many_dimensions(tmp_path: Path, dims: int) -> None:
    tensor = torch.arange(2.0).reshape([1] * (dims - 1) + [2])
    deepnvme.save({"a": tensor}, tmp_path / "a.safetensors")
    deepnvme.convert(tmp_path / "a.safetensors", tmp_path / "a.pt")
    assert torch.equal(deepnvme.load(tmp_path / "a.pt")["a"], tensor)
