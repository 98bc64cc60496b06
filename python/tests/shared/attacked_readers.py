"""Torch archives of given records, and loads of distributed checkpoints, for the programs that attack readers."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

from deepnvme._checkpoint.dcp.reader import MissingNamesPlanner
from deepnvme._checkpoint.distributed.sharded import _errors_with_path
from deepnvme.integrations.dcp import DeepnvmeReader


def zipped(records: dict[str, bytes]) -> bytes:
    """Return a torch archive of these records."""
    # In memory: a file would be written to at every record.
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as file:
        for name, content in records.items():
            file.writestr(zipfile.ZipInfo(f"x/{name}"), content)
    return whole.getvalue()


def load_distributed(folder: Path, reader: DeepnvmeReader, state: dict[str, Any]) -> object:
    """Load as torch does, which would hide the errors in one of its own. None if the index lacks a tensor."""
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    planner = MissingNamesPlanner(str(folder))
    planner.set_up_planner(state, metadata, True)
    try:
        with _errors_with_path(folder):
            plan = planner.create_local_plan()
    except KeyError as error:
        assert str(folder) in str(error)
        return None
    reader.read_data(planner.finish_plan(plan), planner)
    return state
