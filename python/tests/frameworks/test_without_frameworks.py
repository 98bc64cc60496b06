"""Integrations without their libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")

import torch

from deepnvme._checkpoint.save import SaveOptions
from deepnvme.integrations._background_save import BackgroundFileSaver

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path


def test_lightning_is_missing(python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    python("""
        import sys
        sys.modules.update({"lightning": None, "lightning_fabric": None})
        try:
            import deepnvme.integrations.lightning
        except ImportError as error:
            assert "pip install lightning" in str(error), error
        else:
            raise SystemExit("it was found somewhere")
    """)


def test_transformers_is_not_imported_early(python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    python("""
        import sys
        import deepnvme.integrations.transformers as integration
        with integration.enabled():
            assert not {"torch", "transformers"} & set(sys.modules)
    """)


def test_actions_of_a_failed_save_are_dropped(tmp_path: Path) -> None:
    saver = BackgroundFileSaver(SaveOptions(None, "none"))
    (tmp_path / "taken").mkdir()
    done: list[str] = []
    saver.save({"a": torch.ones(3)}, tmp_path / "taken")
    # The save has failed, and no call has raised its error yet.
    saver.wait_over()
    saver.after_save(lambda: done.append("after the failure"))
    with pytest.raises(OSError, match="taken"):
        saver.wait()
    saver.after_save(lambda: done.append("at once"))
    assert done == ["at once"]
    saver.close()
