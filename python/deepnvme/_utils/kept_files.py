"""Warnings of files that a save to a set would remove, and keeps: they are not the library's own, or were changed."""

from __future__ import annotations

import os
from pathlib import Path

from deepnvme._deepnvme import StripeSet
from deepnvme._utils.public import first_of, warn_caller
from deepnvme.errors import Error


def parts_listed(stripe_set: StripeSet) -> tuple[str, ...]:
    """Return the parts that the manifest of a set lists."""
    try:
        return StripeSet.from_manifest(stripe_set.manifest_path).paths
    except (OSError, ValueError, Error):
        return ()  # There is none, or the save refuses it.


def warn_of_kept_parts(stripe_set: StripeSet, before: tuple[str, ...]) -> None:
    """Warn of parts that the manifest listed before a save and that stay: ``write`` changed them in place."""
    now = {*parts_listed(stripe_set)}
    kept = [Path(part) for part in before if part not in now and os.path.lexists(part)]
    warn_of_kept(Path(stripe_set.manifest_path), kept)


def warn_of_kept(index: Path, kept: list[Path]) -> None:
    """Warn of files that the old ``index`` listed, if there are any."""
    if kept:
        text = "the old index listed files that are not its own, or were changed; they are kept:"
        warn_caller(f"{index}: {text} {first_of(kept)}")
