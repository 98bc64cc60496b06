"""The offloader that ``deepnvme.integrations.sglang`` gives SGLang."""
