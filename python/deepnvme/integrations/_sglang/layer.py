"""One module's weights: moved into the file while it is built, shown to it while it computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from deepnvme.integrations._sglang.weight_file import TensorLayout, WeightFile, is_dense, plan_layout

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class _Weight:
    """A parameter, everywhere it stands in the module, and what stands there while it is away."""

    parameter: torch.nn.Parameter
    slots: list[tuple[dict[str, Any], str]]
    layout: TensorLayout
    placeholder: torch.nn.Parameter
    empty: torch.Tensor


class OffloadedLayer:
    """A module whose parameters are in a stretch of the file.

    Args:
        module: whose parameters.
        names: of those that may be taken, dotted. None: all.
        resident: ids of those that may not.
        file: where they go.
    """

    def __init__(self, module: torch.nn.Module, names: set[str] | None, resident: set[int], file: WeightFile) -> None:
        self.module = module
        self._names = names
        self._file = file
        self._start = self._reserved = self._nbytes = 0
        self._mapped: torch.Tensor | None = None
        self._weights: list[_Weight] = []
        taken = [parameter for parameter in self._parameters(resident) if is_dense(parameter.data)]
        self.device = taken[0].device if taken else torch.device("cpu")
        self.is_empty = not taken
        if taken:
            self._move(taken)

    def parameter_ids(self) -> list[int]:
        """Name the parameters that may be taken."""
        return [id(parameter) for parameter in self._parameters(set())]

    def pieces(self, path: str) -> list[tuple[str, int, int]]:
        """Say what a streamer reads for this module: its stretch, in one piece."""
        return [(path, self._start, self._nbytes)]

    def finish_loading(self, resident: set[int]) -> None:
        """Have the weights in the file as they are now, after loading, and hide them.

        Loading may have made others of them, of other shapes and types.
        """
        chosen = []
        is_stretch_needed = False
        for parameter in self._parameters(set()):
            is_away = parameter.device != self.device
            if id(parameter) in resident or not is_dense(parameter.data):
                if is_away:
                    parameter.data = parameter.data.to(self.device)
                # On the CPU it stays where it is, and so do other tensors that have its memory.
                is_stretch_needed = is_stretch_needed or not is_away
            elif is_away or self.device.type == "cpu":
                chosen.append(parameter)
        layouts, nbytes = plan_layout(chosen)
        if not self._is_in_place(chosen, layouts):
            self._write(chosen, layouts, nbytes, is_elsewhere=is_stretch_needed)
        self._nbytes = nbytes
        slots = self._slots()
        self._weights = [
            _Weight(
                parameter,
                slots[id(parameter)],
                layout,
                _placeholder(parameter),
                torch.empty(0, dtype=parameter.dtype, device=self.device),
            )
            for parameter, layout in zip(chosen, layouts, strict=True)
        ]
        self._mapped = None
        self.hide()

    def show(self, stretch: torch.Tensor) -> None:
        """Give the module its weights out of the bytes of its stretch."""
        # A tensor made in inference mode could not become a parameter's.
        with torch.inference_mode(mode=False):
            if stretch.device != self.device:
                stretch = stretch.to(self.device)
            for weight in self._weights:
                weight.parameter.data = weight.layout.of(stretch)
                for owner, name in weight.slots:
                    owner[name] = weight.parameter

    def hide(self) -> None:
        """Take the weights away: whoever computes with them nevertheless gets an error, not numbers."""
        for weight in self._weights:
            for owner, name in weight.slots:
                owner[name] = weight.placeholder
            weight.parameter.data = weight.empty

    def _parameters(self, resident: set[int]) -> Iterator[torch.nn.Parameter]:
        for name, parameter in self.module.named_parameters():
            if (self._names is None or name in self._names) and id(parameter) not in resident:
                yield parameter

    def _slots(self) -> dict[int, list[tuple[dict[str, Any], str]]]:
        """Find every layout where a parameter stands."""
        slots: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for owner in self.module.modules():
            for name, parameter in owner._parameters.items():  # noqa: SLF001
                if parameter is not None:
                    slots.setdefault(id(parameter), []).append((owner._parameters, name))  # noqa: SLF001
        return slots

    def _move(self, taken: list[torch.nn.Parameter]) -> None:
        layouts, self._nbytes = plan_layout(taken)
        self._reserved = self._nbytes
        self._start = self._file.reserve(self._nbytes)
        self._mapped = stretch = self._file.mapped(self._start, self._nbytes)
        for parameter, layout in zip(taken, layouts, strict=True):
            target = layout.of(stretch)
            target.copy_(parameter.data)
            parameter.data = target

    def _is_in_place(self, chosen: list[torch.nn.Parameter], layouts: list[TensorLayout]) -> bool:
        if self._mapped is None:
            return False
        base = self._mapped.data_ptr()
        return all(
            parameter.data_ptr() == base + layout.offset for parameter, layout in zip(chosen, layouts, strict=True)
        )

    def _write(
        self, chosen: list[torch.nn.Parameter], layouts: list[TensorLayout], nbytes: int, *, is_elsewhere: bool
    ) -> None:
        """Lay the stretch out anew, by way of memory: what is to go may lie where other things are to come."""
        stretch = torch.zeros(nbytes, dtype=torch.uint8)
        for parameter, layout in zip(chosen, layouts, strict=True):
            layout.of(stretch).copy_(parameter.data)
        if is_elsewhere or nbytes > self._reserved:
            self._start, self._reserved = self._file.reserve(nbytes), nbytes
        self._file.write(stretch, self._start).wait()


def _placeholder(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Make what stands for a weight that is away: of the same shape and type, without bytes, on no device."""
    data = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    placeholder = torch.nn.Parameter(data, requires_grad=False)
    # Models load weights through this, if it is there; a copy onto what has no bytes would be lost without a word.
    vars(placeholder)["weight_loader"] = _refuse
    return placeholder


def _refuse(*_: object, **__: object) -> NoReturn:
    msg = "the weights of this module stream from disk and cannot be changed; start again with the new ones"
    raise RuntimeError(msg)
