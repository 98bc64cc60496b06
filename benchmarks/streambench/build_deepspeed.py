"""``python -m streambench.build_deepspeed``: compile DeepSpeed's ops for one process, before anything is timed."""

import sys

from streambench.tools import prepare_deepspeed

if __name__ == "__main__":
    prepare_deepspeed()
    print("DeepSpeed's ops for one process are built", file=sys.stderr)
