"""Gradients with activations on disk are those of training in memory."""

from __future__ import annotations

import gc
import threading
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import deepnvme
from deepnvme.errors import ClosedError
from process_memory import memory_bytes, restart_peak

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# Less than what the models below save.
MEMORY = 1 << 20


@pytest.fixture
def activations(tmp_path: Path) -> Iterator[deepnvme.ActivationOffload]:
    made = deepnvme.offload_activations(tmp_path, memory=MEMORY, bytes_min=4096)
    yield made
    made.close()


class Attention(nn.Module):
    """A layer with views of one storage, an expanded mask, a transposed input, and a result that is saved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(hidden)).chunk(3, -1)
        mask = torch.ones(hidden.shape[1], device=hidden.device).expand(hidden.shape[1], -1)
        weights = torch.softmax((query @ key.mT) * mask / 8, -1)
        added: torch.Tensor = self.out(torch.exp(weights @ value) * torch.sigmoid(hidden))
        return hidden + added


def attention() -> tuple[nn.Sequential, torch.Tensor]:
    return nn.Sequential(*[Attention(64) for _ in range(4)]), torch.randn(8, 32, 64)


def convolution() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.0)] * 3
    return nn.Sequential(*layers).to(memory_format=torch.channels_last), torch.randn(8, 4, 32, 32)


def recurrent() -> tuple[nn.Module, torch.Tensor]:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(32, 64, num_layers=2, batch_first=True)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.rnn(hidden)[0]
            return result

    return Last(), torch.randn(16, 24, 32)


MODELS = [attention, convolution, recurrent]


def gradients(model: nn.Module, batch: torch.Tensor, call: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
    model.zero_grad()
    leaf = batch.clone().requires_grad_()
    loss = (call or model)(leaf).square().mean()
    loss.backward()
    return [leaf.grad, *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("make", MODELS)
def test_gradients_are_the_same(make: Any, activations: deepnvme.ActivationOffload) -> None:
    torch.manual_seed(0)
    model, batch = make()
    for step in range(3):
        expected = gradients(model, batch + step)
        with activations:
            assert_same(gradients(model, batch + step), expected)
    stats = activations.stats()
    assert stats.tensors > 0
    assert stats.pending_tensors == 0
    assert stats.swap.bytes_written > 0
    assert stats.swap.resident_bytes_peak <= MEMORY


@pytest.mark.parametrize("make", MODELS)
def test_the_backward_pass_may_follow_the_block(make: Any, activations: deepnvme.ActivationOffload) -> None:
    torch.manual_seed(1)
    model, batch = make()
    expected = gradients(model, batch)

    def call(leaf: torch.Tensor) -> torch.Tensor:
        with activations:
            result: torch.Tensor = model(leaf)
        return result

    assert_same(gradients(model, batch, call), expected)
    assert activations.stats().pending_tensors == 0


def test_wrapped_blocks(activations: deepnvme.ActivationOffload) -> None:
    model, batch = attention()
    expected = gradients(model, batch)
    names = [set(vars(block)) for block in model]
    for block in model:
        assert activations.wrap(block) is block
    assert_same(gradients(model, batch), expected)
    moved = activations.stats().tensors
    assert moved > 0
    activations.close()
    assert [set(vars(block)) for block in model] == names
    assert_same(gradients(model, batch), expected)
    assert activations.stats().tensors == moved


def test_weights_stay_in_memory(tmp_path: Path, activations: deepnvme.ActivationOffload) -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    leaf = torch.randn(2, 128, requires_grad=True)
    with activations:
        model(leaf).sum().backward()
    # The weight that gets no gradient is not known to be one.
    assert activations.stats().tensors == 1
    frozen = deepnvme.offload_activations(tmp_path, memory=MEMORY, bytes_min=4096, model=model)
    with frozen:
        model(leaf).sum().backward()
    assert frozen.stats().tensors == 0
    frozen.close()


def test_a_storage_is_stored_once(activations: deepnvme.ActivationOffload) -> None:
    leaf = torch.randn(64, 64, requires_grad=True)
    hidden = leaf * 2
    with activations:
        results = [hidden.sin(), hidden.t().cos(), hidden[8:].tan(), (hidden * hidden), hidden.chunk(4)[1].exp()]
        loss = sum(result.sum() for result in results[:4])
    stats = activations.stats()
    # `tan` and `exp` save their results, which are others.
    assert (stats.tensors, stats.shared_tensors) == (6, 3)
    loss.backward()  # type: ignore[union-attr]
    again = leaf.detach().clone().requires_grad_()
    doubled = again * 2
    (doubled.sin().sum() + doubled.t().cos().sum() + doubled[8:].tan().sum() + (doubled * doubled).sum()).backward()  # type: ignore[no-untyped-call]
    assert torch.equal(leaf.grad, again.grad)  # type: ignore[arg-type]


def test_parts_that_count_their_changes_apart(activations: deepnvme.ActivationOffload) -> None:
    """As in the cells of torch's recurrent layers."""
    leaf = torch.rand(64, 3 * 64, requires_grad=True)
    other = leaf.detach().clone().requires_grad_()

    def cell(leaf: torch.Tensor) -> torch.Tensor:
        first, second, third = (leaf * 1).unsafe_chunk(3, 1)
        return first.add_(1).sigmoid_() * second.add_(2).sigmoid_() * third.add_(3).tanh_()

    with activations:
        result = cell(leaf).sum()
    result.backward()  # type: ignore[no-untyped-call]
    cell(other).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(leaf.grad, other.grad)  # type: ignore[arg-type]


def test_a_result_is_stored_once(activations: deepnvme.ActivationOffload) -> None:
    """Both the operation that made it and the next one save it."""
    leaf = torch.rand(64, 64, requires_grad=True)
    with activations:
        result = torch.softmax(leaf, -1).square().sum()
    assert (activations.stats().tensors, activations.stats().shared_tensors) == (2, 1)
    result.backward()  # type: ignore[no-untyped-call]


def test_a_small_view_of_a_large_storage_is_stored_alone(activations: deepnvme.ActivationOffload) -> None:
    large = (torch.randn(64, 4096, requires_grad=True)) * 1
    with activations:
        part = large[3:5].sin()
    assert activations.stats().stored_bytes == 2 * 4096 * 4
    part.sum().backward()  # type: ignore[no-untyped-call]


def test_a_change_in_place_gives_the_old_values(activations: deepnvme.ActivationOffload) -> None:
    """torch raises an error here. The copy was made before the change, so the gradient is that of the operation."""
    leaf = torch.rand(64, 64, requires_grad=True)
    with activations:
        result = leaf.exp()
        expected = result.detach().clone()
        result.mul_(3)
        later = result.exp()
    later.sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    assert torch.allclose(leaf.grad, expected * 3 * later.detach())


def test_a_changed_tensor_that_stayed_in_memory_is_an_error(activations: deepnvme.ActivationOffload) -> None:
    leaf = torch.rand(4, requires_grad=True)
    with activations:
        result = leaf.exp()
        result.mul_(3)
    assert activations.stats().tensors == 0
    with pytest.raises(RuntimeError, match="was changed in place"):
        result.sum().backward()  # type: ignore[no-untyped-call]


def test_a_storage_whose_values_have_changed_is_stored_again(activations: deepnvme.ActivationOffload) -> None:
    scale = torch.rand(64, 64)
    leaf = torch.rand(64, 64, requires_grad=True)
    with activations:
        first = (leaf * scale).sum()
        old = scale.clone()
        scale.add_(1)
        second = (leaf * scale).sum()
    assert activations.stats().shared_tensors == 0
    (first + second).backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, old + scale)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks(activations: deepnvme.ActivationOffload, *, reentrant: bool) -> None:
    model, batch = attention()
    expected = gradients(model, batch)

    def call(leaf: torch.Tensor) -> torch.Tensor:
        with activations:
            for block in model:
                leaf = checkpoint(block, leaf, use_reentrant=reentrant)
        return leaf

    assert_same(gradients(model, batch, call), expected)
    assert activations.stats().tensors == 3, "the inputs of the blocks, but the first, which is a leaf"
    assert activations.stats().pending_tensors == 0


def test_graphs_that_are_kept_and_second_derivatives(activations: deepnvme.ActivationOffload) -> None:
    leaf = torch.rand(64, 64, requires_grad=True)
    with activations:
        loss = (leaf.exp() * leaf.sin()).sum()
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    first = leaf.grad.clone()  # type: ignore[union-attr]
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    assert torch.equal(leaf.grad, 2 * first)  # type: ignore[arg-type]
    with activations:
        (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sum(), leaf)
    expected = 2 * leaf.exp() * leaf.cos()
    assert torch.allclose(second, expected, atol=1e-5)
    del loss, gradient
    gc.collect()
    assert activations.stats().pending_tensors == 0


def test_nothing_is_left_without_a_backward_pass(activations: deepnvme.ActivationOffload) -> None:
    model, batch = attention()
    gc.disable()
    try:
        with activations:
            result = model(batch.requires_grad_())
        assert activations.stats().pending_tensors > 0
        del result
        assert activations.stats().pending_tensors == 0, "no cycle keeps them"
    finally:
        gc.enable()

    def fails() -> None:
        with activations:
            model(batch)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    gc.collect()
    assert activations.stats().pending_tensors == 0
    assert activations.stats().swap.items == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_closed_activations(tmp_path: Path) -> None:
    activations = deepnvme.offload_activations(tmp_path, memory=MEMORY, bytes_min=4096)
    leaf = torch.rand(64, 64, requires_grad=True)
    with activations:
        loss = leaf.exp().sum()
    activations.close()
    activations.close()
    with pytest.raises(ClosedError):
        loss.backward()  # type: ignore[no-untyped-call]
    with pytest.raises(ClosedError), activations:
        pass
    with pytest.raises(ClosedError):
        activations.wrap(nn.Linear(2, 2))
    assert activations.stats().tensors == 1
    assert "closed" in repr(activations)
    assert not any(tmp_path.iterdir())
    with pytest.raises(TypeError, match="cannot be pickled"):
        activations.__reduce__()


def test_a_tensor_larger_than_the_memory_stays(activations: deepnvme.ActivationOffload) -> None:
    leaf = torch.rand(MEMORY // 2, requires_grad=True)
    with activations, pytest.warns(UserWarning, match="stay in memory, since they cannot be moved") as told:
        loss = leaf.exp().sin().sum()
    assert len(told) == 1
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(leaf.grad, leaf.exp().cos() * leaf.exp())  # type: ignore[arg-type]


def test_threads_have_blocks_of_their_own(activations: deepnvme.ActivationOffload) -> None:
    torch.manual_seed(2)
    models = [attention() for _ in range(4)]
    expected = [gradients(model, batch) for model, batch in models]
    found: list[Any] = [None] * 4

    def train(index: int) -> None:
        with warnings.catch_warnings(), activations:
            found[index] = gradients(*models[index])

    threads = [threading.Thread(target=train, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    assert activations.stats().pending_tensors == 0


def test_with_parameters_on_disk(tmp_path: Path, activations: deepnvme.ActivationOffload) -> None:
    model, batch = attention()
    expected = gradients(model, batch)
    with deepnvme.offload_parameters(model, memory="256KiB", swap_dir=tmp_path), activations:
        assert_same(gradients(model, batch), expected)
        moved = activations.stats()
    assert moved.tensors > 0
    assert moved.pending_tensors == 0


def test_other_hooks_see_what_stays(activations: deepnvme.ActivationOffload) -> None:
    seen: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.shape)
        return tensor.detach()

    leaf = torch.rand(64, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), activations:
        loss = (leaf.exp()[0, 0] * 3).exp()
    assert seen == [torch.Size([])]
    loss.backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_dtypes(activations: deepnvme.ActivationOffload, dtype: torch.dtype) -> None:
    leaf = torch.randn(64, 65, dtype=dtype, requires_grad=True)
    other = leaf.detach().clone().requires_grad_()
    with activations:
        loss = (leaf[:, 1:] * leaf[:, :-1]).t().exp().abs().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    (other[:, 1:] * other[:, :-1]).t().exp().abs().sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(leaf.grad, other.grad)  # type: ignore[arg-type]
    assert activations.stats().tensors > 0


def test_masks_and_dropout(activations: deepnvme.ActivationOffload) -> None:
    leaf = torch.randn(128, 128, requires_grad=True)
    with activations:
        torch.manual_seed(3)
        loss = functional.dropout(torch.where(leaf > 0, leaf, leaf.sin()), 0.5).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    found, leaf.grad = leaf.grad, None
    torch.manual_seed(3)
    functional.dropout(torch.where(leaf > 0, leaf, leaf.sin()), 0.5).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(found, leaf.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"memory": "much"}, "it must be a size"), ({"bytes_min": "x"}, "bytes_min"), ({"memory": 0}, "memory")],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        deepnvme.offload_activations(tmp_path, **{"memory": "1MB", **arguments})
    assert not any(tmp_path.iterdir())


def test_compiled_models(activations: deepnvme.ActivationOffload) -> None:
    model, batch = attention()
    expected = gradients(model, batch)
    compiled: Any = torch.compile(model, backend="aot_eager")
    with activations:
        found = gradients(model, batch, compiled)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert activations.stats().pending_tensors == 0


def test_autocast(activations: deepnvme.ActivationOffload) -> None:
    model, batch = attention()
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(model, batch)
        with activations:
            assert_same(gradients(model, batch), expected)
    assert activations.stats().tensors > 0


def test_memory_stays_within_its_bound(tmp_path: Path) -> None:
    # Beyond 32 MiB, the C library returns freed memory to the system at once.
    memory, layers, leaf = 160 << 20, 12, torch.randn(34, 1 << 18, requires_grad=True)
    with deepnvme.offload_activations(tmp_path, memory=memory) as activations:
        before = restart_peak()
        result = leaf
        for _ in range(layers):
            result = result.tanh()
        result.sum().backward()  # type: ignore[no-untyped-call]
        grown = memory_bytes("VmHWM") - before
        stats = activations.stats()
    assert stats.stored_bytes == layers * leaf.nbytes > 2 * memory
    # The gradient, and up to five tensors of a layer: its input and result, the read one, and two gradients.
    assert grown < memory + 6 * leaf.nbytes + (16 << 20), grown
    assert grown < stats.stored_bytes


def test_checksums(tmp_path: Path) -> None:
    model, batch = attention()
    expected = gradients(model, batch)
    with deepnvme.offload_activations(tmp_path, memory=MEMORY, bytes_min=4096, checksums=True):
        assert_same(gradients(model, batch), expected)
