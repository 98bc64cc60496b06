"""``deepnvme.stream``: run a model whose weights stay on disk."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from deepnvme._deepnvme import StripeSet
from deepnvme._deepnvme import trace as trace_default_engine
from deepnvme._modules.partition import has_forward
from deepnvme._stream import huggingface, throughput
from deepnvme._stream.calling_threads import RunningCalls
from deepnvme._stream.layer_cache import LayerCache, load_resident
from deepnvme._stream.model_files import open_for_module
from deepnvme._stream.parameter_binding import ChangedBuffers, OriginalWeights, refuse_loading
from deepnvme._stream.planner import Plan, PlanInput, plan_within
from deepnvme._stream.row_cache import GatheredRows, RowCache, UsedLookups
from deepnvme._stream.stats import StepRecorder
from deepnvme._stream.weight_origin import WeightFiles, find_origins, named_tensors, replace_traced
from deepnvme._utils.closing import ClosesAtEnd
from deepnvme._utils.devices import check_device, parsed_device
from deepnvme._utils.public import check_choice, check_engine, first_of, parse_bytes, public, whole
from deepnvme._utils.tensors import checked_dtype
from deepnvme.errors import ClosedError, InvalidArgumentError, UnsupportedError

# Larger than any real request, and small enough that products do not overflow.
_TOKENS_MAX = 1 << 31
_PREFETCH_LAYERS_MAX = 1 << 20
# Short names of dtypes, as those of `deepnvme pack`. The names of torch are accepted as well.
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from os import PathLike

    from torch.utils.hooks import RemovableHandle

    from deepnvme._deepnvme import Engine, Trace
    from deepnvme._modules.partition import Partition
    from deepnvme._stream.stats import StreamStats
    from deepnvme._stream.weight_origin import Origin


@public
class Streaming(ClosesAtEnd):
    """Control and observe a streamed model. Available as ``model.streaming``.

    A ``with`` block closes it at its end.

    Attributes:
        memory_bytes: memory for weights, in bytes, as given.
        model_bytes: bytes of all weights of the model.
        resident_bytes: bytes of the small weights that are read once and kept in addition to the layers.
        device: the device that computes.
        steps: the recorder of the model's calls. ``steps.last`` has the last 10,000: ``seconds``, ``tokens_per_s``,
            ``disk_gb_per_s``, ``overlap`` and ``roofline_fraction`` of each.
        layer_cache: the layers in memory; ``None`` if the model has no weights but small ones and rows, or is closed.
        row_cache: the rows and experts in memory; ``None`` if no weight is read by rows or experts.

    Example:
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
        >>> size = deepnvme.save(model.state_dict(), "weights.safetensors")
        >>> model = deepnvme.stream(model, weights="weights.safetensors", memory="4MB")
        >>> with torch.no_grad():
        ...     output = model(torch.randn(2, 512))
        >>> model.streaming.stats().steps
        1
    """

    def __init__(  # noqa: PLR0917
        self,
        model: nn.Module,
        origin_of: Mapping[str, Origin],
        sources: list[str | StripeSet],
        memory: int,
        prefetch_layers: int | None,
        device: torch.device,
        engine: Engine | None,
    ) -> None:
        self._engine = engine
        self._model = weakref.ref(model)
        self.memory_bytes = memory
        self.device = device
        self._calls = RunningCalls(_name_of(model))
        origin_of = {name: origin.for_device(device) for name, origin in origin_of.items()}
        replace_traced(model, self._calls)
        tensors = [*named_tensors(model)]
        sizes = {id(tensor): origin_of[name].memory_nbytes for name, tensor in tensors if name in origin_of}
        file_bytes = {index: _file_bytes(source) for index, source in enumerate(sources)}
        self._on_host = is_on_host(device)
        planned = plan_within(PlanInput(model, sizes, origin_of, file_bytes, self._on_host, prefetch_layers), memory)
        found = planned.partition
        self.model_bytes = sum({id(tensor): sizes[id(tensor)] for _, tensor in tensors if id(tensor) in sizes}.values())
        self.resident_bytes = planned.resident_bytes
        self.row_cache: RowCache | GatheredRows | None = None
        self.layer_cache: LayerCache | None = None
        # Set when the model is closed.
        self._final_counters: dict[str, float] | None = None
        self._recorded: Callable[[], object] | None = None
        self._changed = ChangedBuffers()
        self._load_hooks: list[RemovableHandle] = []
        # Names that `load_state_dict` refuses, by module.
        self._refused: dict[nn.Module, list[str]] = {}
        self._originals = OriginalWeights(found.weights(), self._calls)
        # Set early: if an interrupt arrives before the `try`, the caller can still close the model.
        model.streaming = self  # type: ignore[assignment]
        try:
            self._load_hooks += refuse_loading(found.weights(), self._refused)
            files = WeightFiles(origin_of, sources, engine)
            load_resident(found.resident, files, device, self._changed)
            if found.lookups:
                self.row_cache = self._row_cache(found, files, planned)
            if found.groups:
                self.layer_cache = LayerCache(found.groups, files, planned.slots, device, self._calls, self._changed)
            self.steps = StepRecorder(self.counters)
            self._wrap(model, found)
        except BaseException:
            self._undo(model)
            raise

    def _row_cache(self, found: Partition, files: WeightFiles, planned: Plan) -> RowCache | GatheredRows:
        used = UsedLookups(found.lookups, files, self._calls, self._changed)
        if self._on_host:
            return RowCache(used, planned.row_cache_bytes)
        return GatheredRows(used, planned.gathered_bytes, self.device)

    def _undo(self, model: nn.Module) -> None:
        """Close a model whose streaming did not begin, and leave no trace."""
        self._originals.returns_meta = True
        self.close()
        if getattr(model, "streaming", None) is self:
            del model.streaming

    def _wrap(self, model: nn.Module, found: Partition) -> None:
        """Count the calls of the model, and of its parts that contain streamed modules."""
        streamed = found.modules()
        for module in model.modules():
            is_inside = any(child in streamed for child in module.modules() if child is not module)
            if module is not model and module not in streamed and is_inside and has_forward(module):
                self._calls.wrap(module)
        if has_forward(model):
            self._calls.wrap(model, self.steps.record)
        if callable(getattr(model, "generate", None)):
            # Else the tokens after a close would come from the weights that the model had before.
            self._calls.wrap(model, method="generate")

    def _start(self, trace: str | PathLike[str] | None) -> None:
        """Start loading weights, and record a timeline if requested."""
        if trace is not None:
            recording = self.trace(trace)
            recording.__enter__()
            # Also ends the recording of a model that is never closed, or that still runs when the program ends.
            self._recorded = weakref.finalize(self, recording.__exit__, None, None, None)
        if self.layer_cache is not None:
            self.layer_cache.warm_up()

    def _check_open(self) -> None:
        self._calls.check()

    def __repr__(self) -> str:
        model = self._model()
        name = "model that is gone" if model is None else _name_of(model)
        state = ", closed" if self.is_closed else ""
        return (
            f"<deepnvme.Streaming of {name}, model_bytes={self.model_bytes}, memory_bytes={self.memory_bytes}, "
            f"device={str(self.device)!r}{state}>"
        )

    def __reduce__(self) -> Any:
        if self._calls.is_restored:
            raise TypeError(
                "model.streaming can be neither copied nor pickled; the model can, after del model.streaming"
            )
        raise TypeError(
            "the weights of this model are on disk, so it can be neither copied nor pickled; stream it a second time"
        )

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._calls.is_closed

    @property
    def is_restored(self) -> bool:
        """Whether the model is closed, no call runs, and the modules have their previous weights again, if any."""
        return self._calls.is_restored

    @property
    def compressed_cache_bytes(self) -> int:
        """Bytes of the compressed-weight cache, part of ``memory_bytes``."""
        layer_cache = self.layer_cache
        return layer_cache.compressed_cache_bytes if layer_cache is not None else 0

    def counters(self) -> dict[str, float]:
        """Return the sums of all reads and waits so far, by name."""
        # Read before the final ones: `close` sets those first.
        parts = (self.layer_cache, self.row_cache)
        if self._final_counters is not None:
            return dict(self._final_counters)
        total: dict[str, float] = {}
        for part in parts:
            for name, value in (part.stats() if part is not None else {}).items():
                total[name] = total.get(name, 0) + value
        return total

    def stats(self) -> StreamStats:
        """Return the counters of all steps so far."""
        return self.steps.stats()

    def best_batch(self, prompt_tokens: int, new_tokens: int, memory: str | int | None = None) -> int:
        """Find the largest batch whose KV cache and activations fit. The model must be one of transformers.

        Larger batches use each byte read more often.

        Args:
            prompt_tokens: tokens of the longest prompt.
            new_tokens: tokens to generate for each prompt.
            memory: bytes for the KV cache and activations, or text such as ``"4GB"``. Default: half of the free memory
                of the model's device.

        Returns:
            The batch size in sequences, from 1 to 1024; 1 even if a single sequence does not fit.

        Raises:
            ValueError: the model is not one of transformers.
            ClosedError: it was closed.

        """
        return throughput.best_batch(
            self._open_model(),
            whole(prompt_tokens, "prompt_tokens", 1, _TOKENS_MAX),
            whole(new_tokens, "new_tokens", 1, _TOKENS_MAX),
            None if memory is None else parse_bytes(memory),
        )

    def generate(
        self,
        tokenizer: Any,
        prompts: Sequence[str],
        *,
        batch: int | None = None,
        max_new_tokens: int = 128,
        **options: Any,
    ) -> Iterator[tuple[int, str]]:
        """Generate text for many prompts in large batches, longest prompts first.

        Args:
            tokenizer: the model's tokenizer. Its padding side is set to left.
            prompts: a list of str.
            batch: prompts per batch. Default: :meth:`best_batch`.
            max_new_tokens: limit for each prompt.
            **options: passed to ``model.generate``.

        Yields:
            The index of a prompt and the generated text, batch by batch.

        Raises:
            ValueError: a prompt has no tokens, or a number is out of range.
            ClosedError: the model was closed.
        """
        batch = None if batch is None else whole(batch, "batch", 1, _TOKENS_MAX)
        max_new_tokens = whole(max_new_tokens, "max_new_tokens", 1, _TOKENS_MAX)
        options = {"batch": batch, "max_new_tokens": max_new_tokens, **options}
        yield from throughput.generate_all(self._open_model, tokenizer, prompts, **options)

    def _open_model(self) -> nn.Module:
        self._calls.check()
        model = self._model()
        if model is None:
            raise ClosedError("the model was garbage-collected; keep a reference to it")
        return model

    def trace(self, path: str | PathLike[str]) -> Trace:
        """Record a timeline of a ``with`` block: reads, copies, computation, and waits for weights.

        Args:
            path: ``*.html`` for a page in the browser, ``*.json`` for Perfetto.

        Returns:
            A :class:`Trace`, which records while its ``with`` block runs.
        """
        return self._engine.trace(path) if self._engine else trace_default_engine(path)

    def close(self) -> None:
        """Free the memory and restore the model.

        A module that was passed to :func:`stream` gets its original weights back, with the changes that it made to
        buffers and small weights. A model from a folder or the meta device has no original weights: using it raises
        :class:`ClosedError`. The counters stay readable. The timeline requested from :func:`stream` is written.

        Calls that run in other threads raise :class:`ClosedError` at their next layer. ``close`` waits for the layers
        that run now. Inside a call of the model it does not wait: the last call to end restores the model.
        """
        self._calls.stop()
        layer_cache = self.layer_cache
        if layer_cache is not None:
            layer_cache.stop()
        self._calls.close(self._restore)
        if self._recorded is not None:
            self._recorded()

    def _restore(self) -> None:
        try:
            self._final_counters = self.counters()
        except ClosedError:
            # In a forked child the streamers belong to the parent.
            self._final_counters = {}
        # Layers first, so that a copy of one with its own weights contains no wrapper. The model last, so that no call
        # of it finds some weights restored and others not.
        self._calls.unwrap(keep=self._model())
        self._originals.restore(self._changed)
        for hook in self._load_hooks:
            hook.remove()
        for names in self._refused.values():
            names.clear()
        self._calls.unwrap()
        for part in (self.layer_cache, self.row_cache):
            if part is not None:
                part.clear()
        self.layer_cache = self.row_cache = None
        self._originals.clear()
        self._changed = ChangedBuffers()


@public
def stream(
    model: str | PathLike[str] | nn.Module,
    *,
    memory: str | int,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    weights: str | PathLike[str] | StripeSet | None = None,
    prefetch_layers: int | None = None,
    model_class: type | None = None,
    verify: Literal["off", "sample", "full"] = "sample",
    engine: Engine | None = None,
    trace: str | PathLike[str] | None = None,
    **options: Any,
) -> Any:
    """Make a model whose weights stay on disk and pass through bounded memory while it runs.

    For a Hugging Face folder this returns a ``PreTrainedModel`` that works as usual: ``generate()``, pipelines,
    ``model(**inputs)``. The safetensors files are used where they are: nothing is converted or copied beforehand.
    Results equal those of the model in memory bit for bit, with few exceptions, which the page "Memory
    models" lists. Streaming is for inference: ``backward()`` through the weights raises.

    Args:
        model: a folder with ``config.json`` and weights, a module, or the name of a model of the Hugging Face Hub
            (``"org/name"``) that is in the local cache already. Nothing is downloaded.
        memory: bytes for weights, or text such as ``"4GB"`` or ``"512MiB"``. With ``device="cuda"``, it is memory of
            the GPU. Activations and the KV cache need memory in addition.
        device: the device to compute on. Default ``"cpu"``.
        dtype: dtype of the weights in memory, such as ``torch.bfloat16`` or ``"bf16"``; bf16, fp16 and fp32 are cast
            to each other on load. Default ``"auto"``: the dtype of the model's config, or of the files. Only for a
            folder: a module has the dtypes of its files.
        weights: the file or folder with the state dict. A module needs it. Default: the model's folder.
        prefetch_layers: number of layers to read ahead. Default: 2, or 3 if weights are cast, unpacked or dequantised,
            as far as memory allows.
        model_class: a class of transformers that overrides the one in ``config.json``. Only for a folder.
        verify: how much to compare with the files' checksums before the model is returned. ``"sample"`` (default):
            names, types, shapes and a 32nd of the weights. ``"full"``: every byte, which reads the files once.
            ``"off"``: nothing. Files without checksums can be streamed, but not with ``"full"``. Later reads are not
            compared.
        engine: the engine that reads the files. Default: the default engine.
        trace: record a timeline until the model is closed or the program ends: ``*.html`` for a page in the browser,
            ``*.json`` for Perfetto. ``model.streaming.trace`` records a part of it.
        **options: passed to ``from_pretrained``, such as ``attn_implementation``. Only for a folder.

    Returns:
        The model: from a folder, in evaluation mode; a module, in the mode that it had. ``model.streaming`` is its
        :class:`Streaming`, with ``stats()`` and ``close()``.

    Raises:
        MemoryError: the largest layer needs more memory; the message states how much is enough.
        deepnvme.errors.UnsupportedError: the model cannot be streamed, or a module comes without ``weights``.
        deepnvme.errors.DeviceError: ``device`` names a GPU that torch cannot use here.
        deepnvme.errors.NotFoundError: the folder does not exist or has no weights.
        deepnvme.errors.ChecksumError: the bytes differ from those that were saved.
        deepnvme.errors.CorruptFileError: a file is truncated or damaged, or lacks a tensor that its index lists.
        ValueError: an argument is invalid or only for a folder, or ``verify="full"`` finds files without checksums.

    Example:
        With a module; ``deepnvme.stream("llama-3-70b", memory="16GB")`` does the same for a folder.

        >>> model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
        >>> size = deepnvme.save(model.state_dict(), "weights.safetensors")
        >>> model = deepnvme.stream(model, weights="weights.safetensors", memory="4MB")
        >>> with torch.no_grad():
        ...     model(torch.randn(2, 512)).shape
        torch.Size([2, 512])
    """
    check_choice(verify, "verify", ("off", "sample", "full"))
    check_engine(engine)
    _check_type(model)
    dtype = _parse_dtype(dtype)
    nbytes = parse_bytes(memory)
    if prefetch_layers is not None:
        prefetch_layers = whole(prefetch_layers, "prefetch_layers", 0, _PREFETCH_LAYERS_MAX)
    place = _checked_device(device)
    if isinstance(model, nn.Module):
        earlier = getattr(model, "streaming", None)
        if isinstance(earlier, Streaming) and not earlier.is_restored:
            raise UnsupportedError("this model is streamed already; call model.streaming.close() first")
        given = {"dtype": dtype != "auto", "model_class": model_class is not None, **dict.fromkeys(options, True)}
        _refuse_folder_arguments([name for name, is_given in given.items() if is_given])
        built, files = open_for_module(model, weights, engine, verify)
    else:
        folder, files = huggingface.open_folder(model, options, weights, engine, verify)
        built = huggingface.build_model(folder, files, dtype, model_class, dict(options))
    origin_of = find_origins(built, files)
    try:
        streaming = Streaming(built, origin_of, files.sources, nbytes, prefetch_layers, place, engine)
    except FileNotFoundError:
        files.check_unchanged()
        raise
    try:
        # The files were opened by name and may have been replaced since. From here on the streamer watches them.
        files.check_unchanged()
        streaming._start(trace)  # noqa: SLF001
    except BaseException:
        streaming._undo(built)  # noqa: SLF001
        raise
    return built


def _name_of(model: nn.Module) -> str:
    """Name a model in errors: its class, and the folder of one of transformers."""
    path = getattr(model, "name_or_path", None)
    return f"{type(model).__name__} ({path})" if isinstance(path, str) and path else type(model).__name__


def is_on_host(device: torch.device) -> bool:
    """Whether rows can be used where they are read."""
    return device.type == "cpu"


def _file_bytes(source: str | StripeSet) -> int:
    if isinstance(source, StripeSet):
        # The parts of a set together are as long as the set. Rounded up to whole pages, a read must not pass the end.
        return sum(os.stat(part).st_size for part in source.paths)  # noqa: PTH116
    return os.stat(source).st_size  # noqa: PTH116


def _check_type(model: object) -> None:
    """Refuse what is neither a folder nor a module."""
    if not isinstance(model, str | bytes | os.PathLike | nn.Module):
        raise TypeError(f"model is {type(model).__name__}; it must be a folder, or a torch.nn.Module")


def _refuse_folder_arguments(names: Sequence[str]) -> None:
    """Refuse arguments that say how to build the model of a folder."""
    if names:
        msg = f"{first_of(names)}: only for a model folder; a module is used as it is, with the dtypes of its files"
        raise InvalidArgumentError(msg)


def _parse_dtype(dtype: object) -> Any:
    """Return ``"auto"`` or the dtype that an argument names."""
    if not isinstance(dtype, str):
        return checked_dtype(dtype)
    found = _DTYPES.get(dtype, getattr(torch, dtype, None))
    if dtype == "auto" or isinstance(found, torch.dtype):
        return found or dtype
    words = ", ".join(map(repr, ("auto", *_DTYPES)))
    raise InvalidArgumentError(f"dtype is {dtype!r}; it must be one of {words}, or a torch.dtype")


def _checked_device(device: str | torch.device) -> torch.device:
    """Return a device to which weights can be streamed."""
    place = parsed_device(device)
    if place.type == "cuda" and getattr(torch.version, "hip", None):
        raise UnsupportedError("streaming to AMD GPUs is not supported yet; use device='cpu'")
    if place.type not in {"cpu", "cuda"}:
        raise UnsupportedError(f"weights can be streamed to the CPU and to CUDA devices, not to {place}")
    check_device(place)
    return torch.device("cuda", torch.cuda.current_device()) if place == torch.device("cuda") else place
