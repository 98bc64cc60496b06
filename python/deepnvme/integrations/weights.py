"""The weights of a model, one after the other, at the speed of the drive, to fill a model that is already in memory.

A model server builds the modules first. Then it copies every weight of the files, or its rank's part of it, into them.
It needs each tensor only for a moment, so the weights need not all fit into memory a second time.

Example::

    from deepnvme.integrations.weights import iterate_weights

    for name, tensor in iterate_weights("path/to/model", prefetch_bytes="1GB"):
        parameters[name].copy_(tensor)
"""

from deepnvme._checkpoint.iterate import iterate_weights

# As for the functions of `deepnvme`: help texts name no private module.
iterate_weights.__module__ = __name__

__all__ = ["iterate_weights"]


def __dir__() -> list[str]:
    return sorted(__all__)
