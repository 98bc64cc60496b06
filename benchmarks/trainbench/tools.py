"""All tools of the rows ``step-*``, by name."""

from __future__ import annotations

from trainbench.deepspeed_swap import Partitioned, Pipelined
from trainbench.steppers import Deepnvme, Fused, Stepper
from trainbench.tensornvme_swap import TensorNvme

ALL: dict[str, type[Stepper]] = {one.name: one for one in (Deepnvme, Fused, Pipelined, Partitioned, TensorNvme)}
