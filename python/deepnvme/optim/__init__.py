"""torch's optimizers with a faster step, and with state on disk.

    optimizer = deepnvme.optim.AdamW(model.parameters(), lr=3e-4)

:class:`Adam`, :class:`AdamW`, :class:`SGD` and :class:`Adagrad` derive from torch's classes. Their ``step`` is one pass
over memory. Param groups, schedulers, closures and state dicts work as in torch. State dicts can be
exchanged with torch's optimizers at any time, in both directions. fp32 steps are bit-identical to torch's with
``foreach=False, fused=False``. :class:`Lion` has no counterpart in torch. With ``fused=True`` steps use exact square
roots, as torch's fused steps do. That is 1.4 times as fast where MKL's square roots are not exact, as on AMD CPUs and
with AVX-512.

bf16 and fp16 parameters get fp32 master weights and moments. ``stochastic_rounding=True`` rounds the parameters
stochastically. With a ``GradScaler`` gradients are unscaled within the step, and ``.grad`` stays scaled. ``max_norm``
clips by the total norm within the step. The first ``step`` refuses sparse gradients, complex parameters,
GPU parameters, ``differentiable=True`` and ``capturable=True``.

``swap_dir="/mnt/nvme", memory="4GB"`` keeps the state on disk: moments, and the fp32 master weights of bf16 and fp16
parameters. A step reads it group by group, updates it, and writes it back in the background. At most ``memory`` bytes
of it are in memory, and up to 64 MiB more in the first step. ``swap_gradients=True`` also moves gradients to disk as
soon as they are computed.
``state_dict()`` reads all state into memory; ``save_state(path)`` and ``load_state(path)`` do not. If the disk fails
during a step, :class:`deepnvme.errors.StepStoppedError` is raised, and ``step()`` resumes where it stopped.
``optimizer.swap_stats()`` has the counters.

``moments="bf16"`` or ``"8bit"`` reduces moments to a half or a quarter, in memory and on disk.

Keyword arguments of every optimizer, in addition to torch's:

- ``threads``: threads of a step, 0 to 256. Default 0: one per CPU that the process may use.
- ``stochastic_rounding``: round bf16 and fp16 parameters stochastically. Default False.
- ``seed``: seed of the rounding noise. Default 0.
- ``max_norm``: clip gradients to this total norm within the step. Default ``None``: no clipping.
- ``error_if_nonfinite``: with ``max_norm``, raise if the norm is infinite or NaN. Default False.
- ``moments``: format of the moments: ``"fp32"`` (default), ``"bf16"`` or ``"8bit"``.
- ``swap_dir``: a folder, or one per drive, for state on disk. It is created if missing. Default: state in memory.
- ``memory``: bytes of state in memory at once, or text such as ``"4GB"``. Required with ``swap_dir``, and not allowed
  without it.
- ``swap_gradients``: with ``swap_dir``, move gradients to disk as well. Default False.
- ``checksums``: with ``swap_dir``, checksum everything that is written, and verify it when it is read. Default False.

Example:
    >>> model = torch.nn.Linear(512, 512)
    >>> optimizer = deepnvme.optim.AdamW(model.parameters(), lr=3e-4, swap_dir=".", memory="1MB")
    >>> for step in range(3):
    ...     optimizer.zero_grad()
    ...     model(torch.randn(8, 512)).square().mean().backward()
    ...     optimizer.step()
    >>> optimizer.swap_stats().stored_bytes >= 2 * 4 * 512 * 513
    True
"""

from deepnvme.optim._algorithms import SGD, Adagrad, Adam, AdamW, Lion

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion"]


def _add_keywords(*classes: type) -> None:
    """Add the keyword arguments of every optimizer to the help of each class."""
    listed = (__doc__ or "").partition("in addition to torch's:\n\n")[2].partition("\n\n")[0]
    arguments = "".join(f"        {line.removeprefix('- ').replace('``', '', 2)}\n" for line in listed.splitlines())
    for each in classes:
        # Python can be told to drop docstrings.
        each.__doc__ = each.__doc__ and each.__doc__.replace("\n    Raises:", f"{arguments}\n    Raises:", 1)


_add_keywords(SGD, Adagrad, Adam, AdamW, Lion)


def __dir__() -> list[str]:
    return sorted(__all__)
