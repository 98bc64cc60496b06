"""The offloader of SGLang: modules with weights in a file, without a model server."""

from __future__ import annotations

import io
import os
import random
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from deepnvme.errors import ClosedError
from deepnvme.integrations._sglang.layer import WeightFile, is_dense, plan_layout
from deepnvme.integrations._sglang.offloader import Offloader

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path


class Block(nn.Module):
    """A layer with a norm, three linear layers of which two share their weight, and a buffer."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.again = nn.Linear(2 * width, width, bias=False)
        self.again.weight = self.down.weight
        self.register_buffer("scale", torch.rand(width))

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.relu(self.up(self.norm(x)))
        return x + self.scale * (self.down(hidden) + self.again(hidden))


def build(count: int, seed: int = 2) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [Block() for _ in range(count)]


def run(layers: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("layers_in_memory", [1, 2, 3, 7])
def test_streamed_layers_compute_the_same(tmp_path: Path, layers_in_memory: int, mode: Any) -> None:
    stock = build(7)
    x = torch.randn(5, 48)
    with mode():
        expected = run(stock, x)
    layer_bytes = 64 << 10
    offloader = Offloader(str(tmp_path), memory=layers_in_memory * layer_bytes)
    layers = offloader.wrap_modules(iter(build(7)))
    # Like a loader: after the layers are wrapped, in any order, into the tensors of named_parameters.
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data.fill_(float("nan"))
    for layer, source in reversed(list(zip(layers, stock, strict=True))):
        theirs = dict(source.named_parameters())
        for name, parameter in layer.named_parameters():
            parameter.data.copy_(theirs[name])
    offloader.post_init()
    for _ in range(3):
        with mode():
            assert torch.equal(run(layers, x), expected)
    assert offloader.stats()["units"] == 7
    assert list(tmp_path.iterdir()) == []
    offloader.close()


def test_weights_replaced_during_loading_are_streamed(tmp_path: Path) -> None:
    stock, layers = build(4), build(4)
    offloader = Offloader(str(tmp_path))
    layers = offloader.wrap_modules(iter(layers))
    for layers_of in (stock, layers):
        for number, layer in enumerate(layers_of):
            block: Any = layer
            # Transposed, larger than before, of another dtype, and changed in place.
            block.up.weight = nn.Parameter(block.up.weight.data.t().contiguous().t(), requires_grad=False)
            block.extra = nn.Parameter(torch.arange(5000.0) * number, requires_grad=False)
            block.norm.weight = nn.Parameter(block.norm.weight.data.double().float() * 3, requires_grad=False)
            block.up.bias.data.add_(number)
    offloader.post_init()
    x = torch.randn(3, 48)
    with torch.no_grad():
        assert torch.equal(run(layers, x), run(stock, x))
        block = layers[2]
        extra, stride = offloader._run(2, lambda: (block.extra.clone(), block.up.weight.stride()))
        assert torch.equal(extra, torch.arange(5000.0) * 2)
        assert stride == (1, 96)


USES: dict[str, Callable[[Any], Any]] = {
    "linear": lambda block: nn.functional.linear(torch.ones(2, 48), block.up.weight),
    "one row": lambda block: nn.functional.linear(torch.ones(48), block.up.weight),
    "matmul": lambda block: torch.ones(2, 96) @ block.up.weight,
    "data": lambda block: torch.ones(2, 96) @ block.up.weight.data,
    "module": lambda block: block.down(torch.ones(2, 96)),
    "copy": lambda block: block.up.weight.copy_(torch.ones(96, 48)),
    "data_copy": lambda block: block.up.weight.data.copy_(torch.ones(96, 48)),
    "assignment": lambda block: setattr(block.up.weight, "data", torch.ones(96, 48)),
    "save": lambda block: torch.save(block.state_dict(), io.BytesIO()),
    "load": lambda block: block.up.weight.weight_loader(block.up.weight, torch.zeros(96, 48)),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("has_run", [False, True])
def test_absent_weights_are_errors_not_numbers(tmp_path: Path, use: str, has_run: bool) -> None:
    offloader = Offloader(str(tmp_path))
    layers = offloader.wrap_modules(iter(build(3)))
    offloader.post_init()
    block: Any = layers[1]
    with torch.no_grad():
        if has_run:
            run(layers, torch.randn(2, 48))
        expected = r"(weight|bias) of Block is on disk|stream from disk and cannot be changed"
        with pytest.raises(RuntimeError, match=expected):
            USES[use](block)
        offloader.close()
        if use != "load":
            with pytest.raises(ClosedError, match=rf"on disk: the offloader of {tmp_path} was closed"):
                USES[use](block)


def test_absent_weights_have_shapes(tmp_path: Path) -> None:
    offloader = Offloader(str(tmp_path))
    layers = offloader.wrap_modules(iter(build(2)))
    theirs: Any = layers[0]
    theirs.up.weight = nn.Parameter(theirs.up.weight.data.t().contiguous().t().bfloat16())
    offloader.post_init()
    for layer, stock in zip(layers, build(2), strict=True):
        assert [*layer.state_dict()] == [*stock.state_dict()]
        for name, parameter in layer.named_parameters():
            assert isinstance(parameter, nn.Parameter)
            assert parameter.is_meta
            assert parameter.shape == stock.get_parameter(name).shape
            assert parameter.numel() == stock.get_parameter(name).numel()
    assert (theirs.up.weight.dtype, theirs.up.weight.stride()) == (torch.bfloat16, (1, 96))
    assert theirs.again.weight is theirs.down.weight


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_is_refused(tmp_path: Path, assign: bool) -> None:
    offloader = Offloader(str(tmp_path), is_resident=lambda layer: {id(layer.get_parameter("up.bias"))})
    layers = offloader.wrap_modules(iter(build(2)))
    stock = build(2, seed=3)
    # Until it streams, this fills the file.
    for layer, theirs in zip(layers, stock, strict=True):
        layer.load_state_dict(theirs.state_dict())
    offloader.post_init()
    with pytest.raises(RuntimeError, match=r"weight is streamed from its file.*; restart with the new weights"):
        layers[0].load_state_dict(build(1)[0].state_dict(), assign=assign)
    with pytest.raises(RuntimeError, match=r"1\.down\.weight is streamed from its file"):
        nn.Sequential(*layers).load_state_dict({"1.down.weight": torch.zeros(48, 96)}, strict=False, assign=assign)
    # Those in memory can be loaded.
    layers[1].load_state_dict({"up.bias": torch.ones(96)}, strict=False)
    stock[0].load_state_dict({"up.bias": build(1)[0].state_dict()["up.bias"]}, strict=False)
    stock[1].load_state_dict({"up.bias": torch.ones(96)}, strict=False)
    with torch.no_grad():
        assert torch.equal(layers[1](torch.ones(1, 48)), stock[1](torch.ones(1, 48)))


@pytest.mark.parametrize("layers_in_memory", [1, 3])
def test_threads_take_turns(tmp_path: Path, layers_in_memory: int) -> None:
    stock = build(4)
    offloader = Offloader(str(tmp_path), memory=layers_in_memory * (64 << 10))
    layers = offloader.wrap_modules(iter(build(4)))
    offloader.post_init()
    wrong: list[object] = []

    def work(seed: int) -> None:
        pick, x = random.Random(seed), torch.randn(2, 48)
        try:
            with torch.no_grad():
                expected = [layer(x) for layer in stock]
                for _ in range(300):
                    index = pick.randrange(4)
                    if not torch.equal(layers[index](x), expected[index]):
                        wrong.append(index)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong


def test_too_little_memory_is_reported_each_time(tmp_path: Path) -> None:
    offloader = Offloader(str(tmp_path), memory=1)
    layers = offloader.wrap_modules(iter(build(2)))
    for start in (offloader.post_init, lambda: layers[0](torch.ones(1, 48))):
        with pytest.raises(ValueError, match="memory is 1 bytes, but the largest unit takes"):
            start()


def test_the_model_chooses_the_streamed_weights(tmp_path: Path) -> None:
    offloader = Offloader(str(tmp_path))
    layers = offloader.wrap_modules(
        iter(build(3)),
        submodule_accessor=lambda layer: layer.get_submodule("up"),
        whitelist_param_names_creator=lambda part: ["weight"],
    )
    offloader.post_init()
    for layer in layers:
        assert [name for name, parameter in layer.named_parameters() if parameter.is_meta] == ["up.weight"]
    with torch.no_grad():
        x = torch.randn(2, 48)
        assert torch.equal(run(layers, x), run(build(3), x))


def test_resident_weights_stay(tmp_path: Path) -> None:
    stock, layers = (share(build(3)) for _ in range(2))
    offloader = Offloader(str(tmp_path), is_resident=lambda layer: {id(layer.get_parameter("up.bias"))})
    layers = offloader.wrap_modules(iter(layers))
    # A tensor that shares a weight's memory. Nothing restores it if the weight moves.
    view: Any = layers[2].get_parameter("up.bias").data[5:9]
    offloader.post_init()
    for layer, there in zip(layers, ({"up.bias", "norm.weight"}, {"up.bias"}, {"up.bias", "norm.weight"}), strict=True):
        assert {name for name, parameter in layer.named_parameters() if not parameter.is_meta} == there
    with torch.no_grad():
        x = torch.randn(2, 48)
        for _ in range(2):
            assert torch.equal(run(layers, x), run(stock, x))
    assert torch.equal(view, stock[2].get_parameter("up.bias")[5:9])


def share(layers: list[nn.Module]) -> list[nn.Module]:
    """Make the first and the last layer share a weight."""
    first, last = layers[0].get_submodule("norm"), layers[-1].get_submodule("norm")
    torch.nn.init.uniform_(first.get_parameter("weight"))
    last.register_parameter("weight", first.get_parameter("weight"))
    return layers


def test_a_model_without_post_init_streams_from_its_first_step(tmp_path: Path) -> None:
    offloader = Offloader(str(tmp_path))
    layers = offloader.wrap_modules(iter(build(3)))
    with torch.no_grad():
        x = torch.randn(2, 48)
        assert torch.equal(run(layers, x), run(build(3), x))
    assert offloader.stats()["bytes_read"] > 0


def test_layers_out_of_order_and_modules_without_weights(tmp_path: Path) -> None:
    offloader = Offloader(str(tmp_path), memory=2 * (64 << 10))
    layers = offloader.wrap_modules(iter([nn.Identity(), *build(5), nn.ReLU()]))
    offloader.post_init()
    stock = build(5)
    with torch.no_grad():
        x = torch.randn(2, 48)
        for index in (4, 0, 0, 2, 3, 1, 4):
            assert torch.equal(layers[1 + index](x), stock[index](x))


def test_a_truncated_file_raises_and_other_offloaders_work(tmp_path: Path) -> None:
    offloader = Offloader(str(tmp_path), memory=64 << 10)
    layers = offloader.wrap_modules(iter(build(4)))
    offloader.post_init()
    x = torch.randn(2, 48)
    with torch.no_grad():
        layers[0](x)
        os.truncate(offloader._file.path, 4096)
        with pytest.raises(RuntimeError, match=f"{tmp_path}: the weights of Block, module 2, could not be read"):
            layers[2](x)
        other = Offloader(str(tmp_path))
        fresh = other.wrap_modules(iter(build(4)))
        assert torch.equal(run(fresh, x), run(build(4), x))


def test_a_closed_offloader_says_so(tmp_path: Path) -> None:
    for is_started in (True, False):
        offloader = Offloader(str(tmp_path), memory=64 << 10)
        layers = offloader.wrap_modules(iter(build(2)))
        if is_started:
            offloader.post_init()
        offloader.close()
        offloader.close()
        with torch.no_grad(), pytest.raises(ClosedError, match=rf"{tmp_path}: .*closed"):
            layers[0](torch.randn(2, 48))


def test_an_error_of_the_module_releases_its_memory(tmp_path: Path) -> None:
    offloader = Offloader(str(tmp_path), memory=64 << 10)
    layers = offloader.wrap_modules(iter(build(2)))
    with torch.no_grad():
        for _ in range(3):
            with pytest.raises(RuntimeError, match="shape"):
                layers[0](torch.randn(2, 47))
        x = torch.randn(2, 48)
        assert torch.equal(run(layers, x), run(build(2), x))
    block: Any = layers[0]
    assert block.up.weight.is_meta


def test_a_full_disk_is_reported_before_it_is_full(tmp_path: Path) -> None:
    file = WeightFile(str(tmp_path))
    with pytest.raises(OSError, match="there is no space for") as caught:
        file.reserve(1 << 60)
    assert caught.value.filename == str(tmp_path)
    assert file.reserve(10) == 0
    assert file.reserve(10) == 4096
    with pytest.raises(FileNotFoundError, match="nowhere"):
        WeightFile(str(tmp_path / "nowhere"))


def test_a_killed_process_leaves_no_file(
    tmp_path: Path, python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    program = f"""
        import os, signal, torch
        from deepnvme.integrations._sglang.offloader import Offloader
        offloader = Offloader({str(folder)!r})
        offloader.wrap_modules(torch.nn.Linear(64, 64) for _ in range(4))
        assert offloader._file.nbytes >= 4 * 64 * 64 * 4
        os.kill(os.getpid(), signal.SIGKILL)
    """
    python(program, status=-9)
    assert list(folder.iterdir()) == []


def test_memory_of_its_own_stays_within_the_budget(
    tmp_path: Path, python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    told = python(f"""
        import torch
        from deepnvme.integrations._sglang.offloader import Offloader

        def anonymous():
            text = open("/proc/self/status").read()
            return int(text.split("RssAnon:")[1].split()[0]) << 10

        def layers():
            for _ in range(16):
                yield torch.nn.Linear(2048, 2048, bias=False)

        with torch.no_grad():
            x = torch.randn(1, 2048)
            torch.nn.Linear(2048, 2048)(x)
            before = peak = anonymous()
            offloader = Offloader({str(tmp_path)!r}, memory=3 * (16 << 20))
            model = []
            for layer in offloader.wrap_modules(layers()):
                model.append(layer)
            peak = max(peak, anonymous())
            for layer in model:
                layer.weight.data.copy_(torch.randn(2048, 2048))
                peak = max(peak, anonymous())
            offloader.post_init()
            for _ in range(2):
                for layer in model:
                    x = layer(x)
                    peak = max(peak, anonymous())
        print(peak - before)
    """)
    # The budget, a layer being built, its random numbers, and the engine's bounce buffers. The model has 256 MiB.
    assert int(told.stdout) < (3 * 16 + 16 + 16 + 64) << 20


def test_tensors_that_are_dense() -> None:
    tensor = torch.randn(4, 6, 8)
    assert is_dense(tensor)
    assert is_dense(tensor.permute(2, 0, 1))
    assert is_dense(tensor[:, :, None])
    for other in (tensor[:, :3], tensor[..., ::2], tensor[:1].expand(4, 6, 8), torch.empty(0)):
        assert not is_dense(other)


@pytest.mark.parametrize("seed", range(10))
def test_tensors_keep_their_layout_in_the_file(seed: int) -> None:
    torch.manual_seed(seed)
    tensors = [
        torch.randint(-9, 9, (3, 5)).to(torch.int8),
        torch.randn(7, 2, 4).bfloat16().permute(1, 2, 0),
        torch.randn(1, 9).t(),
        torch.randn(()),
        torch.randn(17).double(),
    ]
    order = [tensors[index] for index in torch.randperm(5).tolist()]
    places, nbytes = plan_layout(order)
    stretch = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    for place, tensor in zip(places, order, strict=True):
        assert place.offset % 512 == 0
        place.view(stretch).copy_(tensor)
    for place, tensor in zip(places, order, strict=True):
        again = place.view(stretch)
        assert again.stride() == tensor.stride()
        assert torch.equal(again, tensor)
