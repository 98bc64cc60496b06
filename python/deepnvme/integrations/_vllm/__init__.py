"""vLLM's embedding classes with their tables on disk. ``tables`` installs them; the other modules import vLLM."""
