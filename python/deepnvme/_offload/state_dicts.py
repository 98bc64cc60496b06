"""State dicts of a model whose parameters are on disk: filled with copies, loaded, and saved shard by shard."""

from __future__ import annotations

import functools
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from deepnvme._checkpoint.save import (
    NamedTensor,
    SaveOptions,
    checked_tensors,
    is_safetensors,
    plan_safetensors,
    save_shards,
)
from deepnvme._modules.calls import add_hook
from deepnvme._utils.public import to_path
from deepnvme._utils.tensors import mark_copies
from deepnvme._utils.terminal import ProgressArgument, progress_callback
from deepnvme.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch
    from torch import nn

    from deepnvme._deepnvme import _SavePlan
    from deepnvme._offload.groups import ParameterGroup
    from deepnvme._offload.residence import Residence


def fill_state_dicts(
    model: nn.Module,
    residence: Residence,
    group_of: Mapping[int, ParameterGroup],
    is_filling: Callable[[], bool],
    undo: list[Callable[[], object]],
) -> None:
    """Make ``state_dict`` of the model, and of each module in it, return copies of the parameters on disk.

    Args:
        model: the model.
        residence: holds the groups.
        group_of: the group of each parameter on disk, by its ``id``.
        is_filling: whether state dicts are filled now.
        undo: gets the functions that undo it.
    """
    copies = _Copies(residence)

    def fill(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        if not is_filling():
            return
        for name, parameter in module._parameters.items():  # noqa: SLF001
            group = group_of.get(id(parameter))
            if parameter is not None and group is not None and prefix + name in state:
                state[prefix + name] = copies.take(state, group, parameter)

    for module in model.modules():
        if any(id(parameter) in group_of for parameter in module._parameters.values()):  # noqa: SLF001
            # `register_state_dict_post_hook` marks the hook in the same way.
            hook = functools.partial(fill)
            hook._from_public_api = True  # type: ignore[attr-defined]  # noqa: SLF001
            # Hooks that were there before may rename, convert or compute with what they find.
            hooks: Any = module._state_dict_hooks  # noqa: SLF001
            add_hook(hooks, hook, undo, first=True)


@contextmanager
def load_hooks_done(model: nn.Module, state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a state as the hooks of ``load_state_dict`` leave it, such as those that rename old keys.

    They see the whole state, and do not run a second time in the block.
    """
    hooks: list[tuple[Any, Any]] = [(module, module._load_state_dict_pre_hooks) for module in model.modules()]  # noqa: SLF001
    if not any(found for _, found in hooks):
        yield state
        return
    values: dict[str, Any] = {}
    _visit(model, "", dict(state), values)
    try:
        for module, found in hooks:
            module._load_state_dict_pre_hooks = type(found)()  # noqa: SLF001
        yield values
    finally:
        for module, found in hooks:
            module._load_state_dict_pre_hooks = found  # noqa: SLF001


class ShardSaver:
    """Saves a state and copies its tensors one shard at a time.

    Args:
        state: names to tensors, some of which are on disk.
        copy: returns a tensor in memory with the values of one of these.
    """

    def __init__(self, state: Mapping[str, torch.Tensor], copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._state, self._copy = state, copy

    def save(
        self, path: str | os.PathLike[str], max_shard_bytes: int, options: SaveOptions, progress: ProgressArgument
    ) -> int:
        """Write all files. Return their total bytes."""
        if not is_safetensors(path):
            msg = f"{os.fspath(path)}: what is saved in pieces becomes safetensors files; end the name in .safetensors"
            raise InvalidArgumentError(msg)
        report = progress_callback(progress, "saving", path)

        def plan(shard: Path, part: list[NamedTensor]) -> _SavePlan:
            return plan_safetensors(shard, self._in_memory(part), options)

        return save_shards(to_path(path), checked_tensors(self._state), max_shard_bytes, plan, report)

    def _in_memory(self, part: list[NamedTensor]) -> list[NamedTensor]:
        # A tensor with two names is copied once.
        copies: dict[int, torch.Tensor] = {}
        for name, _ in part:
            tensor = self._state[name]
            if id(tensor) not in copies:
                copies[id(tensor)] = self._copy(tensor)
        return [(name, copies[id(self._state[name])]) for name, _ in part]


def _visit(module: nn.Module, prefix: str, state: dict[str, Any], values: dict[str, Any]) -> None:
    for hook in module._load_state_dict_pre_hooks.values():  # noqa: SLF001
        hook(state, prefix, {}, True, [], [], [])
    children = {f"{prefix}{name}.": child for name, child in module._modules.items() if child is not None}  # noqa: SLF001
    # Also those that the model does not know: the caller reports them.
    values.update((key, value) for key, value in state.items() if not key.startswith((*children,)))
    for below, child in children.items():
        _visit(child, below, {key: value for key, value in state.items() if key.startswith(below)}, values)


class _Copies:
    """Copies of parameters. A group is read once for the modules that share it, and a shared parameter copied once."""

    def __init__(self, residence: Residence) -> None:
        self._residence = residence
        # Copies that are in a state dict, by that dict, the parameter, and the version of its group.
        self._given: WeakValueDictionary[tuple[int, int, int], torch.Tensor] = WeakValueDictionary()
        # The other copies of the group that was read last.
        self._spare: dict[tuple[int, int, int], torch.Tensor] = {}

    def take(self, state: object, group: ParameterGroup, parameter: torch.Tensor) -> torch.Tensor:
        version = self._residence.version(group)
        key = (id(state), id(parameter), version)
        copy = self._given.get(key)
        if copy is None and key not in self._spare:
            with self._residence.held([group]):
                self._spare = {
                    (id(state), id(member.parameter), version): member.parameter.detach().clone()
                    for member in group.members
                }
            mark_copies(self._spare.values(), "offloading.load_state_dict(state)")
        if copy is None:
            copy = self._given[key] = self._spare.pop(key)
        return copy
