"""``close`` from another thread, or from inside a call: only ``ClosedError`` comes out, and no mixture of weights."""

from __future__ import annotations

import copy
import io
import pickle
import random
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import deepnvme
from deepnvme._modules.weight_classes import Placeholder
from deepnvme.errors import ClosedError

from . import plain_module
from .small_models import SmallModels, tokens, weights_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_grad")

THREADS = 3
MODELS = 10


def call_once(model: Any, question: Any, errors: list[BaseException]) -> None:
    """Call a model in a thread, which has gradients of its own to switch off. Keeps the error."""
    try:
        with torch.no_grad():
            model(question)
    except BaseException as error:
        errors.append(error)


def close_during(model: Any, call: Callable[[], Any], pick: random.Random) -> tuple[list[Any], list[BaseException]]:
    """Close a model while threads call it again and again. Returns their results, and their errors."""
    results: list[Any] = []
    errors: list[BaseException] = []
    has_ended = threading.Event()

    def work() -> None:
        try:
            with torch.no_grad():
                while not has_ended.is_set():
                    results.append(call())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    time.sleep(pick.uniform(0.001, 0.03))
    model.streaming.close()
    # Calls of a module with weights of its own succeed again.
    time.sleep(0.002)
    has_ended.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a call waits for something that never comes"
    return results, errors


@pytest.mark.parametrize("name", ["llama_midsize", "mixtral_midsize", "t5"])
def test_threads_in_a_model_of_a_folder(models: SmallModels, name: str) -> None:
    folder, question = models.folder(name), tokens(1, 24)
    inputs = {"decoder_input_ids": tokens(1, 3)} if name == "t5" else {}
    expected = models.model(name)(question, **inputs).logits
    for seed in range(MODELS):
        pick = random.Random(seed)
        memory = weights_bytes(folder) if name == "t5" else weights_bytes(folder) // pick.choice([2, 3])
        model = deepnvme.stream(folder, memory=memory)
        calls: list[Callable[[], Any]] = [
            lambda model=model: model(question, **inputs).logits,  # type: ignore[misc]
            lambda model=model: model.generate(question, max_new_tokens=3, do_sample=False),  # type: ignore[misc]
        ]
        results, errors = close_during(model, pick.choice(calls), pick)
        assert all(torch.equal(one, expected) for one in results if one.is_floating_point()), seed
        assert [type(error) for error in errors] == [ClosedError] * THREADS, (seed, errors)
        for error in errors:
            assert model.name_or_path in str(error)
            assert "stream" in str(error)
        with pytest.raises(ClosedError, match="stream it again"):
            model(question, **inputs)


@pytest.mark.parametrize("memory", [90_000, plain_module.MEMORY, 10_000_000])
def test_threads_in_a_module_with_weights_of_its_own(saved: plain_module.Saved, memory: int) -> None:
    torch.manual_seed(7)
    module: Any = plain_module.Plain().eval()
    own = module(saved.question)
    before = {name: tensor.data_ptr() for name, tensor in module.state_dict(keep_vars=True).items()}
    for seed in range(MODELS):
        model: Any = deepnvme.stream(module, weights=saved.path, memory=memory)
        results, errors = close_during(model, lambda: module(saved.question), random.Random(seed))
        assert all(torch.equal(one, saved.answer) or torch.equal(one, own) for one in results), f"{seed}: a mixture"
        assert all(type(error) is ClosedError for error in errors), (seed, errors)
        assert all("Plain" in str(error) for error in errors)
        assert {name: tensor.data_ptr() for name, tensor in module.state_dict(keep_vars=True).items()} == before
        assert torch.equal(module(saved.question), own)
        assert not any("forward" in vars(each) for each in module.modules())


def uses_of(model: Any, question: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Return uses of a model that touch its weights other than by calling it."""
    return {
        "copy": lambda: copy.deepcopy(model),
        "layer": lambda: copy.deepcopy(model.model.layers[1]),
        "pickle": lambda: pickle.dumps(model),
        "save": lambda: torch.save(model.state_dict(), io.BytesIO()),
        "cast": lambda: model.to(torch.float64),
        "sums": lambda: [parameter.sum() for parameter in model.parameters()],
        "head": lambda: nn.functional.linear(torch.zeros(1, 64), model.lm_head.weight),
        "stack": lambda: torch.stack([model.model.layers[0].mlp.up_proj.weight] * 2),
        "rows": lambda: model.model.embed_tokens(question),
        "embedding": lambda: nn.functional.embedding(question, model.model.embed_tokens.weight),
    }


@pytest.mark.parametrize("use", uses_of(None, torch.empty(0)))
def test_weights_of_a_model_that_was_closed(models: SmallModels, use: str) -> None:
    model = deepnvme.stream(models.folder("llama"), memory=300_000)
    model(tokens(1, 3))
    # Taken before, and used afterwards.
    kept = [*model.parameters()]
    model.streaming.close()
    with pytest.raises(ClosedError, match=r"LlamaForCausalLM.* was closed.* stream it again"):
        uses_of(model, tokens(1, 3))[use]()
    on_disk = [parameter for parameter in kept if isinstance(parameter, Placeholder)]
    assert on_disk
    for parameter in on_disk:
        with pytest.raises(ClosedError, match="on disk"):
            parameter.sum()
    assert [*model.state_dict()] == [*models.model("llama").state_dict()]
    assert model.to("cpu") is model
    with pytest.raises(RuntimeError, match=r"while its weights were on disk|was closed"):
        model.load_state_dict(models.model("llama").state_dict())


@pytest.mark.parametrize("use", ["copy", "layer", "pickle", "save", "cast", "sums", "head", "embedding"])
def test_other_uses_while_a_model_is_closed(models: SmallModels, use: str) -> None:
    folder, question = models.folder("llama"), tokens(1, 3)
    rows = nn.functional.embedding(question, models.model("llama").model.embed_tokens.weight)
    for seed in range(MODELS):
        model = deepnvme.stream(folder, memory=300_000)
        has_closed = threading.Event()
        strange: list[BaseException] = []

        def work(call: Callable[[], Any], has_closed: threading.Event, strange: list[BaseException]) -> None:
            while not has_closed.is_set():
                try:
                    found = call()
                except BaseException as error:
                    # Before the close, the weights are on disk.
                    is_open = type(error) in {RuntimeError, TypeError} and "on disk" in str(error)
                    if type(error) is not ClosedError and not is_open:
                        strange.append(error)
                    continue
                # Rows are looked up wherever that happens.
                if use != "embedding" or not torch.equal(found, rows):
                    strange.append(AssertionError(f"{use} gave {found}"))

        call = uses_of(model, question)[use]
        threads = [threading.Thread(target=work, args=(call, has_closed, strange)) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(random.Random(seed).uniform(0.001, 0.01))
        model.streaming.close()
        has_closed.set()
        for thread in threads:
            thread.join(30)
        assert not strange, (seed, strange)


def test_close_waits_for_the_layer_that_runs(saved: plain_module.Saved) -> None:
    torch.manual_seed(7)
    module: Any = plain_module.Plain().eval()
    own = module(saved.question)
    model: Any = deepnvme.stream(module, weights=saved.path, memory=plain_module.MEMORY)
    inside, go_on = threading.Event(), threading.Event()
    linear = nn.Linear.forward
    errors: list[BaseException] = []

    class Slow(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert go_on.wait(30)
            return linear(self, hidden)

    model.streaming.close()
    model.layers[3].__class__ = Slow
    model = deepnvme.stream(module, weights=saved.path, memory=plain_module.MEMORY)

    caller = threading.Thread(target=call_once, args=(model, saved.question, errors))
    caller.start()
    assert inside.wait(30)
    closers = [threading.Thread(target=model.streaming.close) for _ in range(2)]
    for closer in closers:
        closer.start()
    closers[0].join(0.1)
    assert closers[0].is_alive()
    assert model.streaming.is_closed
    # A call that begins meanwhile is refused, and the model cannot be streamed again yet.
    with pytest.raises(ClosedError):
        model(saved.question)
    with pytest.raises(deepnvme.errors.UnsupportedError, match="streamed already"):
        deepnvme.stream(module, weights=saved.path, memory=plain_module.MEMORY)
    go_on.set()
    for thread in (caller, *closers):
        thread.join(30)
        assert not thread.is_alive()
    assert [type(error) for error in errors] == [ClosedError]
    assert torch.equal(module(saved.question), own)


@pytest.mark.parametrize("layer", ["embed", "layers.2", "head"])
def test_a_call_that_closes_its_own_model(saved: plain_module.Saved, layer: str) -> None:
    torch.manual_seed(7)
    module: Any = plain_module.Plain().eval()
    own = module(saved.question)
    model: Any = deepnvme.stream(module, weights=saved.path, memory=plain_module.MEMORY)
    handle = module.get_submodule(layer).register_forward_hook(lambda *_: model.streaming.close())
    if layer == "head":
        # Nothing that it needs comes after the last layer.
        assert torch.equal(model(saved.question), saved.answer)
    else:
        with pytest.raises(ClosedError, match="Plain"):
            model(saved.question)
    handle.remove()
    assert torch.equal(module(saved.question), own), "it has its own weights again when the call has ended"
    assert deepnvme.stream(module, weights=saved.path, memory=plain_module.MEMORY) is module
    assert torch.equal(module(saved.question), saved.answer)
    module.streaming.close()


def test_calls_that_close_from_within_do_not_wait_for_each_other(saved: plain_module.Saved) -> None:
    model = saved.stream()
    both = threading.Barrier(2, timeout=30)

    def hook(*_: object) -> None:
        both.wait()
        model.streaming.close()

    model.layers[2].register_forward_pre_hook(hook)
    errors: list[BaseException] = []

    threads = [threading.Thread(target=call_once, args=(model, saved.question, errors)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert [type(error) for error in errors] == [ClosedError] * 2
    assert all(parameter.is_meta for parameter in model.parameters())


def test_counters_while_a_model_is_closed(saved: plain_module.Saved) -> None:
    for _ in range(MODELS):
        model = saved.stream()
        model(saved.question)
        least = model.streaming.stats().bytes_read
        has_closed = threading.Event()
        wrong: list[Any] = []

        def look(model: Any, has_closed: threading.Event, wrong: list[Any], least: int) -> None:
            try:
                while not has_closed.is_set():
                    if model.streaming.stats().bytes_read < least:
                        wrong.append(model.streaming.stats())
                    assert model.streaming.compressed_cache_bytes == 0
            except BaseException as error:
                wrong.append(error)

        thread = threading.Thread(target=look, args=(model, has_closed, wrong, least))
        thread.start()
        time.sleep(0.002)
        model.streaming.close()
        has_closed.set()
        thread.join(30)
        assert not wrong


def test_generations_of_many_prompts_end_at_a_close(models: SmallModels, streamed: Callable[..., Any]) -> None:
    transformers = pytest.importorskip("transformers")
    model = streamed(models.folder("llama"), memory=300_000)

    class Tokenizer:
        """Makes the same tokens of any text."""

        pad_token_id = 0

        def __call__(self, prompts: list[str], **options: object) -> Any:
            ids = [[5, 6, 7] for _ in prompts]
            return transformers.BatchEncoding({"input_ids": torch.tensor(ids) if options else ids})

        def batch_decode(self, ids: torch.Tensor, **_: object) -> list[str]:
            return ["" for _ in ids]

    texts = model.streaming.generate(Tokenizer(), ["a", "b", "c"], batch=1, max_new_tokens=2)
    next(texts)
    model.streaming.close()
    with pytest.raises(ClosedError, match="stream it again"):
        next(texts)


def test_a_closed_model_streams_from_other_files(models: SmallModels, tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    model = deepnvme.stream(models.folder("llama"), memory=300_000)
    model.streaming.close()
    torch.manual_seed(3)
    other = transformers.LlamaForCausalLM(models.model("llama").config).eval()
    # Several files, so that nothing is where it was.
    other.save_pretrained(tmp_path, max_shard_size=100_000)
    model = deepnvme.stream(model, weights=tmp_path, memory=300_000)
    assert torch.equal(model(tokens(1, 5)).logits, other(tokens(1, 5)).logits)
    model.streaming.close()


def test_a_closed_module_is_copied(saved: plain_module.Saved) -> None:
    module: Any = plain_module.Plain().eval()
    own = module(saved.question)
    model: Any = deepnvme.stream(module, weights=saved.path, memory=plain_module.MEMORY)
    with pytest.raises((RuntimeError, TypeError), match="on disk"):
        copy.deepcopy(model)
    model.streaming.close()
    with pytest.raises(TypeError, match=r"del model\.streaming"):
        copy.deepcopy(model)
    del model.streaming
    assert torch.equal(copy.deepcopy(model)(saved.question), own)


@pytest.fixture
def closed(saved: plain_module.Saved) -> Any:
    """A module that was on the meta device, streamed, called and closed."""
    model = saved.stream()
    assert torch.equal(model(saved.question), saved.answer)
    model.streaming.close()
    return model


META_USES: dict[str, Callable[[Any], Any]] = {
    "layer": lambda model: model.layers[3](torch.ones(2, plain_module.WIDTH)),
    "without a bias": lambda model: model.head(torch.ones(2, plain_module.WIDTH)),
    "linear": lambda model: nn.functional.linear(torch.ones(plain_module.WIDTH), model.head.weight),
    "matmul": lambda model: torch.ones(2, plain_module.WIDTH) @ model.layers[0].weight,
    "embedding": lambda model: model.embed(torch.zeros(2, dtype=torch.int64)),
    "resident": lambda model: torch.ones(plain_module.WIDTH) * model.scale,
    "buffer": lambda model: torch.ones(plain_module.WIDTH) * model.shift,
    "data": lambda model: torch.ones(2, plain_module.WIDTH) @ model.layers[0].weight.data,
    "copy": copy.deepcopy,
    "cast": lambda model: model.double(),
    "save": lambda model: torch.save(model.state_dict(), io.BytesIO()),
    "safetensors": lambda model: deepnvme.save(model.state_dict(), "never.safetensors"),
    "pickle": lambda model: pickle.dumps(model.state_dict()),
}


@pytest.mark.parametrize("use", META_USES)
def test_weights_of_a_closed_module_that_was_on_the_meta_device(
    closed: Any, use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    del closed.streaming
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients), pytest.raises(ClosedError, match=r"on disk: Plain was closed"):
            META_USES[use](closed)


def test_a_closed_module_that_was_on_the_meta_device_raises_in_calls(closed: Any, saved: plain_module.Saved) -> None:
    with pytest.raises(ClosedError, match=r"Plain was closed .* stream it again"):
        closed(saved.question)
    with pytest.raises(RuntimeError, match="Plain was closed"), pytest.warns(UserWarning, match="assign=True"):
        closed.load_state_dict(plain_module.Plain().state_dict())


def test_shapes_of_a_closed_module_that_was_on_the_meta_device(closed: Any) -> None:
    plain = plain_module.Plain()
    state = closed.state_dict()
    assert [*state] == [*plain.state_dict()]
    for name, tensor in plain.state_dict().items():
        found = state[name]
        assert (found.shape, found.dtype, found.numel()) == (tensor.shape, tensor.dtype, tensor.numel())
        assert (found.is_meta, found.stride()) == (True, tensor.stride())
    assert closed.head.weight is closed.embed.weight
    assert all(isinstance(each, nn.Parameter) and each.requires_grad for each in closed.parameters())
    assert closed.to("meta") is closed
    assert [*dict(closed.named_parameters())] == [*dict(plain.named_parameters())]


def load_into_new_memory(model: Any, state: dict[str, torch.Tensor]) -> None:
    model.to_empty(device="cpu")
    model.load_state_dict(state)


def test_an_open_module_gets_no_new_memory(saved: plain_module.Saved) -> None:
    model = saved.stream()
    with model.streaming:
        with pytest.raises(RuntimeError, match="on disk: a streamed model can be neither cast nor moved"):
            model.to_empty(device="cpu")
        assert torch.equal(model(saved.question), saved.answer)


REMEDIES: dict[str, Callable[[Any, dict[str, torch.Tensor]], object]] = {
    "assigned": lambda model, state: model.load_state_dict(state, assign=True),
    "in new memory": load_into_new_memory,
}


@pytest.mark.parametrize("remedy", REMEDIES)
def test_a_closed_module_that_was_on_the_meta_device_gets_weights(
    closed: Any, saved: plain_module.Saved, remedy: str
) -> None:
    torch.manual_seed(8)
    other = plain_module.Plain().eval()
    REMEDIES[remedy](closed, other.state_dict())
    assert torch.equal(closed(saved.question), other(saved.question))


def test_a_closed_module_returns_to_the_meta_device(closed: Any, saved: plain_module.Saved) -> None:
    closed.to_empty(device="meta")
    assert {type(parameter) for parameter in closed.parameters()} == {nn.Parameter}
    # torch shares nothing after `to_empty`.
    closed.head.weight = closed.embed.weight
    for _ in range(2):
        model = deepnvme.stream(closed, weights=saved.path, memory=plain_module.MEMORY)
        assert torch.equal(model(saved.question), saved.answer)
        # The second time, it begins with the placeholders of the first.
        model.streaming.close()
        assert all(isinstance(tensor, Placeholder) for tensor in [*closed.parameters(), *closed.buffers()])
        with pytest.raises(ClosedError, match="Plain was closed"):
            closed(saved.question)


def test_a_closed_module_gets_back_the_weights_that_had_values(saved: plain_module.Saved) -> None:
    with torch.device("meta"):
        module: Any = plain_module.Plain().eval()
    own = nn.Linear(plain_module.WIDTH, plain_module.WIDTH)
    module.layers[2] = own
    before = own.weight
    model: Any = deepnvme.stream(module, weights=saved.path, memory=plain_module.MEMORY)
    model.streaming.close()
    assert own.weight is before
    assert own(torch.ones(1, plain_module.WIDTH)).isfinite().all()
    with pytest.raises(ClosedError):
        module.layers[3](torch.ones(1, plain_module.WIDTH))


def test_a_failed_start_leaves_the_meta_device_as_it_was(
    saved: plain_module.Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device("meta"):
        module: Any = plain_module.Plain().eval()
    before = dict(module.named_parameters())

    def fail(_nbytes: int) -> torch.Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr("deepnvme._stream.layer_cache.pinned_empty", fail)
    with pytest.raises(KeyboardInterrupt):
        deepnvme.stream(module, weights=saved.path, memory=plain_module.MEMORY)
    assert all(parameter is before[name] for name, parameter in module.named_parameters())


def test_a_failed_start_leaves_the_module_as_it_was(saved: plain_module.Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = plain_module.Plain().eval()
    own = module(saved.question)

    def fail(_nbytes: int) -> torch.Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("deepnvme._stream.layer_cache.pinned_empty", fail)
        with pytest.raises(KeyboardInterrupt):
            deepnvme.stream(module, weights=saved.path, memory=plain_module.MEMORY)
    assert torch.equal(module(saved.question), own)
    assert not any("forward" in vars(each) for each in module.modules())
