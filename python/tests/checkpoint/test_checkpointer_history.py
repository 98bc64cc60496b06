"""One history for each folder: files that it does not list stay, and readers see what others save."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import deepnvme
from deepnvme import errors
from programs import program

from .runs import save_all, state_of
from .states import assert_same

pytestmark = pytest.mark.filterwarnings("error")


def test_checkpoints_that_were_copied_here_stay(tmp_path: Path) -> None:
    save_all(tmp_path / "old", 10, 20, 30)
    folder = tmp_path / "c"
    folder.mkdir()
    copied = {}
    for path in (tmp_path / "old").glob("step-*"):
        copied[path.name] = path.read_bytes()
        (folder / path.name).write_bytes(copied[path.name])
    with (
        pytest.warns(UserWarning, match=r"step-00000010\.pt, step-00000020\.pt, step-00000030\.pt"),
        deepnvme.Checkpointer(folder, keep=1) as checkpointer,
    ):
        for step in (31, 30, 32):
            checkpointer.save(step, state_of(step))
    assert [entry.path.name for entry in checkpointer.checkpoints] == ["step-00000032.pt"]
    assert {path.name for path in folder.iterdir()} == {*copied, "manifest.json", "step-00000032.pt"}
    assert all((folder / name).read_bytes() == text for name, text in copied.items())


def test_without_its_manifest_the_folder_lists_its_checkpoints(tmp_path: Path) -> None:
    save_all(tmp_path / "c", *range(10, 110, 10))
    (tmp_path / "c" / "manifest.json").unlink()
    says = r"available steps: none; not in the manifest: step-00000010\.pt, .*, step-00000080\.pt and 2 more;"
    with deepnvme.Checkpointer(tmp_path / "c") as checkpointer, pytest.raises(errors.NotFoundError, match=says):
        checkpointer.restore()


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    for path in (tmp_path / "link", tmp_path / "link" / "deeper"):
        with pytest.raises(errors.NotFoundError, match=r"link: make folder: it is a symbolic link that leads nowhere"):
            deepnvme.Checkpointer(path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(errors.Error, match="Too many levels of symbolic links") as caught:
        deepnvme.Checkpointer(tmp_path / "loop")
    assert caught.value.errno == errno.ELOOP


def test_a_step_whose_name_is_taken_gets_another(tmp_path: Path) -> None:
    (tmp_path / "step-00000007.pt").write_text("mine")
    with pytest.warns(UserWarning, match=r"step-00000007\.pt"), deepnvme.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(7, state_of(7))
        assert [entry.path.name for entry in checkpointer.checkpoints] == ["step-00000007-1.pt"]
        assert_same(checkpointer.restore(7, verify="full"), state_of(7))
    assert (tmp_path / "step-00000007.pt").read_text() == "mine"


@pytest.mark.parametrize("keep", [1, 3, None])
def test_training_goes_on_from_an_earlier_step(tmp_path: Path, keep: int | None) -> None:
    steps = [10, 20, 30, 11, 12, 13, 12]
    with deepnvme.Checkpointer(tmp_path, keep=keep) as checkpointer:
        for index, step in enumerate(steps):
            if index == 3 and keep != 1:
                checkpointer.restore(10)
            checkpointer.save(step, state_of(100 * index + step))
            saved = [*dict.fromkeys(reversed(steps[: index + 1]))][:keep][::-1]
            for seen in (checkpointer, deepnvme.Checkpointer(tmp_path)):
                assert [entry.step for entry in seen.checkpoints] == saved
                assert (latest := seen.latest()) is not None and latest.step == step
                assert_same(seen.restore(verify="full"), state_of(100 * index + step))


def test_the_manifest_does_not_grow(tmp_path: Path) -> None:
    sizes = []
    checkpointer = deepnvme.Checkpointer(tmp_path, keep=1)
    for _ in range(12):
        checkpointer.save(1, state_of(1))
        checkpointer.close()
        sizes.append((tmp_path / "manifest.json").stat().st_size)
    assert max(sizes) < 2 * sizes[1], sizes


def test_a_foreign_file_in_the_place_of_a_checkpoint_stays(tmp_path: Path) -> None:
    with deepnvme.Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, state_of(1))
        (tmp_path / "step-00000001.pt").write_text("mine now")
        with pytest.warns(UserWarning, match=r"step-00000001\.pt.*is kept") as caught:
            checkpointer.save(2, state_of(2))
        assert caught[-1].filename == __file__
        checkpointer.save(3, state_of(3))
    assert (tmp_path / "step-00000001.pt").read_text() == "mine now"
    assert [entry.step for entry in checkpointer.checkpoints] == [3]


def test_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9"))
    save_all(folder, 1, 2)
    with deepnvme.Checkpointer(folder, keep=1) as checkpointer:
        checkpointer.save(3, state_of(3))
        assert_same(checkpointer.restore(), state_of(3))
    assert {path.name for path in folder.iterdir()} == {"manifest.json", "step-00000003.pt"}


# Names of checkpoints, lists, parts, shards, temporaries and locks, also of older versions.
FOREIGN = [
    *(f"step-{step:08}{end}" for step in (1, 2, 3, 77) for end in ("-1.pt", ".pt.part-00-of-02", ".safetensors",
      ".pt.stripes.json", ".pt.stripes.json.99.tmp", ".safetensors.part-00-of-02")),
    *(f".step-{step:08}.pt.deepnvme-tmp-{end}" for step in (1, 2, 77) for end in ("1-0", "99999-5", "0" * 32,
      "1f-0-0123456789abcdef", "1f-17f3a2b1c4d5e6f7-0123456789abcdef")),
    ".manifest.json.deepnvme-tmp-1-0", ".manifest.json.deepnvme-tmp-1f-0-0123456789abcdef", "manifest.json.1.tmp",
    ".deepnvme-lock", "step-00000088.pt", "step-00000089.safetensors", "deepnvme.json",
    "shard-00000-01234567.safetensors",
    "model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors", "..deepnvme-tmp-1-0",
]  # fmt: skip
FOREIGN_FOLDERS = ["step-00000090", "step-00000004", ".step-00000005.deepnvme-tmp-1-0",
                   ".step-00000006.deepnvme-tmp-1f-0-0123456789abcdef"]  # fmt: skip

TRAINER = """
import sys, torch, warnings, deepnvme
warnings.simplefilter("ignore")
checkpointer = deepnvme.Checkpointer(sys.argv[1], keep=2, async_=True, durability="data")
latest = checkpointer.latest()
step = latest.step if latest else 0
while True:
    step += 1
    checkpointer.save(step, {"a": torch.full((300_000,), float(step)), "step": step})
    print(step, flush=True)
"""


def foreign_in(folder: Path) -> dict[str, bytes]:
    """Fill a folder with foreign files."""
    folder.mkdir()
    contents = {}
    for name in FOREIGN:
        contents[name] = f"foreign {name}".encode()
    for name in FOREIGN_FOLDERS:
        (folder / name).mkdir()
        contents[f"{name}/deepnvme.json"] = b"{}"
        contents[f"{name}/shard-00000-01234567.safetensors"] = b"foreign"
    for name, text in contents.items():
        (folder / name).write_bytes(text)
    return contents


def test_foreign_files_of_every_name_keep_every_byte(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    contents = foreign_in(folder)
    rng = random.Random(20261123)

    def check() -> None:
        for name, text in contents.items():
            assert (folder / name).read_bytes() == text, name

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for suffix in ("pt", "safetensors"):
            with deepnvme.Checkpointer(folder, keep=2, format=suffix) as checkpointer:
                for step in (1, 2, 3, 3, 4, 5, 6, 77):
                    state = {"a": torch.full((3000,), float(step))}
                    checkpointer.save(step, state)
                    assert_same(checkpointer.restore(step, verify="full"), state)
            check()
        last = -1
        for _ in range(8):
            with program(TRAINER, folder) as trainer:
                said = int(trainer.stdout.readline())
                time.sleep(rng.random() * 0.1)
                trainer.kill()
                said = max([said, *(int(line) for line in trainer.stdout.read().split())])
            check()
            checkpointer = deepnvme.Checkpointer(folder)
            latest = checkpointer.latest()
            assert latest is not None
            assert max(last, said - 2) <= latest.step <= said + 1
            last = latest.step
            assert checkpointer.restore(verify="full")["a"][0] == last
            check()
        with deepnvme.Checkpointer(folder, keep=1) as checkpointer:
            checkpointer.save(last + 1, state_of(last + 1))
        check()
    ours = {"manifest.json", checkpointer.checkpoints[0].path.name}
    assert {path.name for path in folder.iterdir()} == {*FOREIGN, *FOREIGN_FOLDERS, *ours}


def test_a_reader_finds_a_checkpoint_while_another_process_saves(tmp_path: Path) -> None:
    save_all(tmp_path, 0)
    over = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        checkpointer = deepnvme.Checkpointer(tmp_path)
        with suppress(BaseException):
            while not over.is_set():
                try:
                    found = checkpointer.restore(verify="full")
                    assert_same(found, state_of(found["step"]))
                    assert deepnvme.Checkpointer(tmp_path).latest() is not None
                except BaseException as error:  # noqa: PERF203
                    failures.append(error)
                    raise

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        with deepnvme.Checkpointer(tmp_path, keep=1, durability="none") as checkpointer:
            for step in range(1, 25):
                checkpointer.save(step, state_of(step))
    finally:
        over.set()
        for reader in readers:
            reader.join()
    assert not failures


def test_a_reader_sees_later_saves(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    reader = deepnvme.Checkpointer(folder)
    assert reader.latest() is None
    with deepnvme.Checkpointer(folder, keep=1) as writer:
        for step in (1, 2):
            writer.save(step, {"a": torch.full((3,), float(step))})
            assert [entry.step for entry in reader.checkpoints] == [step]
            found = reader.latest()
            assert found is not None
            assert found.step == step
            assert reader.restore()["a"].eq(step).all()
            assert reader.restore(step)["a"].eq(step).all()


def test_a_listed_checkpoint_that_is_away_is_said_and_stays_when_it_is_back(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    save_all(folder, 0, 1, 2, 3)
    away = {step: folder / f"step-{step:08}.pt" for step in (2, 3)}
    for step, path in away.items():
        path.rename(tmp_path / str(step))
    with pytest.warns(UserWarning, match=r"are missing: step-00000002\.pt, step-00000003\.pt;"):
        checkpointer = deepnvme.Checkpointer(folder, keep=5)
    assert [entry.step for entry in checkpointer.checkpoints] == [0, 1]
    with pytest.raises(FileNotFoundError, match="the manifest lists step 2, and this file is missing") as caught:
        checkpointer.restore(2)
    assert caught.value.filename == str(away[2])
    assert checkpointer.restore()["step"] == 1
    checkpointer.save(4, state_of(4))
    checkpointer.close()
    # Forgotten, and not retired: files that come back are nobody's, and nobody removes them.
    for step, path in away.items():
        (tmp_path / str(step)).rename(path)
    with pytest.warns(UserWarning, match="not in the manifest"), deepnvme.Checkpointer(folder, keep=2) as checkpointer:
        checkpointer.save(5, state_of(5))
        assert [entry.step for entry in checkpointer.checkpoints] == [4, 5]
    for step, path in away.items():
        assert_same(deepnvme.load(path, verify="full"), state_of(step))


def test_one_that_is_back_before_the_next_save_counts(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    save_all(folder, 0, 1)
    path = folder / "step-00000001.pt"
    path.rename(tmp_path / "away")
    with pytest.warns(UserWarning, match="put them back"):
        checkpointer = deepnvme.Checkpointer(folder, keep=None)
    (tmp_path / "away").rename(path)
    assert checkpointer.restore()["step"] == 1
    checkpointer.save(2, state_of(2))
    assert [entry.step for entry in checkpointer.checkpoints] == [0, 1, 2]
    checkpointer.close()


def test_a_manifest_that_somebody_puts_there_meanwhile_stays(tmp_path: Path) -> None:
    save_all(tmp_path / "other", 7)
    folder = tmp_path / "c"
    checkpointer = deepnvme.Checkpointer(folder, keep=2)
    checkpointer.save(1, state_of(1))
    foreign = (tmp_path / "other" / "manifest.json").read_bytes()
    (folder / "manifest.json").write_bytes(foreign)
    with pytest.raises(errors.Error, match=r"manifest\.json.*changed while this Checkpointer had the folder"):
        checkpointer.save(2, state_of(2))
    with pytest.raises(errors.Error, match="changed while"):
        checkpointer.save(3, state_of(3))
    assert (folder / "manifest.json").read_bytes() == foreign
    checkpointer.close()
    assert_same(deepnvme.load(folder / "step-00000001.pt"), state_of(1))


def test_latest_and_restore_agree_when_the_newest_file_is_gone(tmp_path: Path) -> None:
    with deepnvme.Checkpointer(tmp_path / "c", keep=2) as checkpointer:
        checkpointer.save(1, state_of(1))
        checkpointer.save(2, state_of(2))
        (tmp_path / "c" / "step-00000002.pt").unlink()
        with pytest.warns(UserWarning, match=r"are missing: step-00000002\.pt;"):
            found = checkpointer.latest()
        assert found is not None
        assert found.step == 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_same(checkpointer.restore(), state_of(1))


def test_a_mistyped_folder_is_not_made_before_the_first_save(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "typo"
    checkpointer = deepnvme.Checkpointer(folder)
    assert checkpointer.checkpoints == []
    assert checkpointer.latest() is None
    with pytest.raises(errors.NotFoundError, match="no such folder") as error:
        checkpointer.restore()
    assert error.value.filename == str(folder)
    checkpointer.close()
    assert not (tmp_path / "deep").exists()
    with deepnvme.Checkpointer(folder) as checkpointer:
        checkpointer.save(1, state_of(1))
    assert_same(deepnvme.Checkpointer(folder).restore(), state_of(1))
