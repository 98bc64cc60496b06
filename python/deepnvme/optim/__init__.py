"""torch's optimizers, with the step made by one pass over memory.

    optimizer = deepnvme.optim.AdamW(model.parameters(), lr=3e-4)

:class:`Adam`, :class:`AdamW`, :class:`SGD` and :class:`Adagrad` are torch's own classes but for their ``step``:
parameter groups, schedulers, closures, and state dicts are torch's, and can be exchanged with torch's in the middle of
a training, in both directions. Their fp32 steps give the bits of torch's with ``foreach=False, fused=False``.
torch has no :class:`Lion`. With ``fused=True`` they take exact square roots, as torch's fused steps do; where MKL's are
others, as on AMD processors, that is nearly twice as fast.

Parameters of bf16 and fp16 have fp32 master weights and moments beside them; ``stochastic_rounding=True`` rounds them
at random. With a ``GradScaler`` gradients are unscaled within the step (``.grad`` stays scaled). ``max_norm`` clips by
the norm of all gradients, within the step, too. Sparse gradients, complex parameters and parameters on a GPU are
refused.

``swap_dir="/mnt/nvme", memory="4GB"`` has the state on disk: moments, and the fp32 master weights of bf16 and fp16
parameters. A step reads it group by group, changes it, and writes it back behind the next; no more than ``memory``
bytes of it are in memory. ``swap_gradients=True`` has gradients on disk, too, from the moment when they are there.
``state_dict()`` reads all state; ``save_state(path)`` and ``load_state(path)`` do without memory. Where the disk fails
in the middle of a step, :class:`deepnvme.errors.StepStoppedError` says so, and ``step()`` goes on where it stopped.
``optimizer.swapping`` tells what it has cost.

``moments="bf16"`` or ``"8bit"`` makes moments a half or a quarter as large, in memory and on disk.

Example:
    >>> model = torch.nn.Linear(512, 512)
    >>> optimizer = deepnvme.optim.AdamW(model.parameters(), lr=3e-4, swap_dir=".", memory="1MB")
    >>> for step in range(3):
    ...     optimizer.zero_grad()
    ...     model(torch.randn(8, 512)).square().mean().backward()
    ...     optimizer.step()
    >>> optimizer.swapping.stored_bytes >= 2 * 4 * 512 * 513
    True
"""

from deepnvme.optim._algorithms import SGD, Adagrad, Adam, AdamW, Lion

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion"]
