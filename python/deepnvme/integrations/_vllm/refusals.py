"""Settings of vLLM that cannot be combined with tables on disk."""

from __future__ import annotations

from vllm.config import get_current_vllm_config

from deepnvme.errors import UnsupportedError


def check_config(name: str) -> None:
    """Refuse settings under which a table would change, or be adapted.

    Args:
        name: name of the table.

    Raises:
        UnsupportedError: LoRA or sleep mode is enabled.
    """
    config = get_current_vllm_config()
    enabled = []
    if config.lora_config is not None:
        enabled.append("LoRA (--enable-lora)")
    if config.model_config is not None and config.model_config.enable_sleep_mode:
        enabled.append("sleep mode (--enable-sleep-mode)")
    if enabled:
        msg = f"{name} is on disk (DEEPNVME_TABLES), which cannot be combined with {' and '.join(enabled)}; disable one"
        raise UnsupportedError(msg)
