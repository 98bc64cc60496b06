"""The weights of one layer: moved to the file while it is built, and shown to it while it computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from deepnvme.integrations._sglang.weight_file import TensorLayout, WeightFile, is_dense, plan_layout

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class _Weight:
    """A parameter, its places in the module, and its placeholder there."""

    parameter: torch.nn.Parameter
    slots: list[tuple[dict[str, Any], str]]
    layout: TensorLayout
    placeholder: torch.nn.Parameter
    empty: torch.Tensor


class OffloadedLayer:
    """A module whose parameters are in an extent of the file.

    Args:
        module: the module.
        names: dotted names of the parameters that may be moved. None: all.
        resident: ids of the parameters that may not.
        file: the file to move them to.
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
        """Return the ids of the parameters that may be moved."""
        return [id(parameter) for parameter in self._parameters(set())]

    def pieces(self, path: str) -> list[tuple[str, int, int]]:
        """Return the byte ranges to read for this module: its extent."""
        return [(path, self._start, self._nbytes)]

    def finish_loading(self, resident: set[int]) -> None:
        """Write the loaded weights to the file, and hide them.

        Loading may have replaced them by tensors of other shapes and dtypes.
        """
        chosen = []
        is_stretch_needed = False
        for parameter in self._parameters(set()):
            is_away = parameter.device != self.device
            if id(parameter) in resident or not is_dense(parameter.data):
                if is_away:
                    parameter.data = parameter.data.to(self.device)
                # A CPU parameter stays where it is, and so do other tensors that share its memory.
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
        """Give the module its weights, as views of its extent's bytes."""
        # An inference tensor cannot become a parameter's data.
        with torch.inference_mode(mode=False):
            if stretch.device != self.device:
                stretch = stretch.to(self.device)
            for weight in self._weights:
                weight.parameter.data = weight.layout.of(stretch)
                for owner, name in weight.slots:
                    owner[name] = weight.parameter

    def hide(self) -> None:
        """Take the weights away. Computing without them raises an error instead of returning wrong numbers."""
        for weight in self._weights:
            for owner, name in weight.slots:
                owner[name] = weight.placeholder
            weight.parameter.data = weight.empty

    def _parameters(self, resident: set[int]) -> Iterator[torch.nn.Parameter]:
        for name, parameter in self.module.named_parameters():
            if (self._names is None or name in self._names) and id(parameter) not in resident:
                yield parameter

    def _slots(self) -> dict[int, list[tuple[dict[str, Any], str]]]:
        """Find every place that refers to a parameter."""
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
        """Rewrite the extent through memory: old and new positions of weights may overlap."""
        stretch = torch.zeros(nbytes, dtype=torch.uint8)
        for parameter, layout in zip(chosen, layouts, strict=True):
            layout.of(stretch).copy_(parameter.data)
        if is_elsewhere or nbytes > self._reserved:
            self._start, self._reserved = self._file.reserve(nbytes), nbytes
        self._file.write(stretch, self._start).wait()


def _placeholder(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Make a placeholder for a hidden weight: a meta tensor of the same shape and dtype."""
    data = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    placeholder = torch.nn.Parameter(data, requires_grad=False)
    # Models load weights through this attribute. A copy into a meta tensor would be lost silently.
    vars(placeholder)["weight_loader"] = _refuse
    return placeholder


def _refuse(*_: object, **__: object) -> NoReturn:
    msg = "the weights of this module stream from disk and cannot be changed; restart with the new weights"
    raise RuntimeError(msg)
