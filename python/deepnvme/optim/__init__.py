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

:mod:`deepnvme.optim._store` says where state can lie.
"""

from deepnvme.optim._rules import SGD, Adagrad, Adam, AdamW, Lion

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion"]
