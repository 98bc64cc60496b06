"""Integrations without their libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

pytest.importorskip("torch")


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
