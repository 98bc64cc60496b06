"""A folder that cannot be listed, or whose close reports that: a typed error names it, and nothing is removed."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from call_filter import IMPOSSIBLE
from failing_folders import CALLS

Run = Callable[..., Any]

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux", reason="the numbers are those of x86-64"
)

SETUP = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent / "shared")!r})
import errno, failing_folders, json, os, signal, torch, deepnvme
from pathlib import Path
from deepnvme.errors import Error
"""
RUN = """
folder = Path("run")
with deepnvme.Checkpointer(folder) as checkpointer:
    for step in (1, 2):
        checkpointer.save(step, {"a": torch.arange(10)})
"""
MODEL = """
folder = Path("model")
folder.mkdir()
for shard in "ab":
    deepnvme.save({shard: torch.ones(10)}, folder / f"model-{shard}.safetensors")
index = {"metadata": {}, "weight_map": {shard: f"model-{shard}.safetensors" for shard in "ab"}}
(folder / "model.safetensors.index.json").write_text(json.dumps(index))
"""
LEFT_SWAP = """
folder = Path("swap")
child = os.fork()
if child == 0:
    swapper = deepnvme.Swapper(folder, memory="1MB", named=True)
    swapper.put("a", torch.ones(10))
    swapper.flush()
    os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(child, 0)
assert any(name.startswith(".deepnvme-swap") for name in os.listdir(folder))
"""
# Name, preparation, and the call that has to fail.
REFUSED = {
    "a-new-checkpointer": (RUN, "deepnvme.Checkpointer(folder).save(3, {'a': torch.ones(3)})"),
    "verify-a-run": (RUN, "deepnvme.verify(folder)"),
    "verify-a-model": (MODEL, "deepnvme.verify(folder)"),
    "pack-a-model": (MODEL, "deepnvme.pack(folder, 'packed', dtype='int8')"),
    "pack-into-a-folder": (
        MODEL + "target = folder\nfolder = Path('packed')\nfolder.mkdir()\n",
        "deepnvme.pack(target, folder, dtype='int8')",
    ),
}
# These need no list, or only clean up with it.
UNHARMED = {
    "load-a-model": (MODEL, "assert sorted(deepnvme.load(folder)) == ['a', 'b']"),
    "inspect-a-model": (MODEL, "assert len(deepnvme.inspect(folder)['files']) == 2"),
    "restore": (RUN, "assert deepnvme.Checkpointer(folder).restore()['a'].equal(torch.arange(10))"),
    "a-swapper-removes-nothing": (
        LEFT_SWAP,
        "with deepnvme.Swapper(folder, memory='1MB') as swapper:\n    swapper.put('a', torch.ones(10))",
    ),
    "a-named-swapper-removes-nothing": (
        LEFT_SWAP,
        "with deepnvme.Swapper(folder, memory='1MB', named=True) as swapper:\n    swapper.put('a', torch.ones(10))",
    ),
    "a-save-removes-nothing": (
        MODEL + "(folder / '.model-a.safetensors.1').write_text('x')\n",
        "deepnvme.save({'a': torch.ones(3)}, folder / 'other.safetensors')\nos.unlink(folder / 'other.safetensors')",
    ),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", REFUSED)
def test_the_error_names_the_folder(python_fork: Run, tmp_path: Path, call: str, name: str) -> None:
    prepared, refused = REFUSED[name]
    program = f"""
try:
    {refused}
except Error as error:
    assert error.errno == errno.EIO, repr(error)
    assert str(folder) in str(error) and os.path.samefile(error.filename, folder), repr(error)
else:
    raise SystemExit("no error was raised")
"""
    check(python_fork, tmp_path, prepared, call, program)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", UNHARMED)
def test_a_call_that_needs_no_list_works_and_removes_nothing(
    python_fork: Run, tmp_path: Path, call: str, name: str
) -> None:
    prepared, unharmed = UNHARMED[name]
    check(python_fork, tmp_path, prepared, call, unharmed)


def check(python_fork: Run, tmp_path: Path, prepared: str, call: str, program: str) -> None:
    """Run a program while a call on its folder fails. The folder has to stay as it was."""
    noted = "(folder.parent / 'before').write_text(json.dumps([str(folder), sorted(os.listdir(folder))]))\n"
    failing = f"failing_folders.fail({call!r}, folder, errno.EIO)\n"
    try:
        python_fork(f"{SETUP}{prepared}{noted}{failing}{program}\nos._exit(0)")
    except AssertionError as error:
        if str(error).startswith(f"status {IMPOSSIBLE}:"):
            pytest.skip("this kernel takes no filter that asks")
        raise
    folder, names = json.loads((tmp_path / "before").read_text())
    assert sorted(path.name for path in (tmp_path / folder).iterdir()) == names
