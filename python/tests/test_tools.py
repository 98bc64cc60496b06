"""``deepnvme.report``, ``deepnvme.bench`` and the command line of the wheel."""

from __future__ import annotations

import errno
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

import deepnvme

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEMAS = Path(__file__).parents[2] / "docs" / "reference" / "schema"


def schema(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((SCHEMAS / f"{name}.json").read_text())
    return loaded


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "deepnvme", *arguments], check=False, capture_output=True, text=True)


def command_without_torch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv[0] = 'deepnvme';"
        "from deepnvme.__main__ import main; sys.exit(main())"
    )
    run = [sys.executable, "-c", code, *arguments]
    return subprocess.run(run, cwd=folder, check=False, capture_output=True, text=True)


def test_a_report_is_a_dict_and_prints_as_lines(tmp_path: Path) -> None:
    report = deepnvme.report(tmp_path, "/no/such/folder")
    jsonschema.validate(dict(report), schema("report"))
    assert [place["path"] for place in report["folders"]] == [str(tmp_path), "/no/such/folder"]
    assert {"name": "Python", "version": sys.version.split()[0]} in report["packages"]
    chosen = [backend["name"] for backend in report["backends"] if backend["is_chosen"]]
    assert chosen == [deepnvme.default_engine().backend]
    assert "broken  /no/such/folder" in str(report)
    assert list(tmp_path.iterdir()) == []


def test_a_benchmark_is_a_dict_and_prints_as_a_table(tmp_path: Path) -> None:
    outcome = deepnvme.bench("write", tmp_path, size="3M", loops=2, warm_up=0, validate=True, durability="data")
    jsonschema.validate(dict(outcome), schema("bench"))
    assert outcome["workload"]["io_bytes"] == 3 << 20
    assert outcome["is_validated"]
    assert len(outcome["results"][0]["samples"]) == 2
    assert str(outcome).startswith("write 3 MiB, sequential, over laid-out files, pinned memory, data synced\n")
    assert list(tmp_path.iterdir()) == []


def test_every_argument_reaches_the_workload(tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    folders = [tmp_path / "a", tmp_path / os.fsdecode(b"b\xff")]
    for folder in folders:
        folder.mkdir()
    outcome = deepnvme.bench(
        "read",
        folders[0],
        os.fsencode(folders[1]),
        size=1 << 20,
        block_bytes="64K",
        queue_depth=3,
        workers=2,
        backend="threads",
        submit="single",
        direct="disabled",
        memory="plain",
        buffer="128K",
        random=True,
        cache="warm",
        stripe_bytes="64K",
        processes=2,
        loops=1,
        warm_up=0,
        plot=plot,
    )
    jsonschema.validate(dict(outcome), schema("bench"))
    workload = outcome["workload"]
    config = workload.pop("config")
    assert workload == {
        "direction": "read",
        "folders": [str(folders[0]), f"{tmp_path}/b\\xff"],
        "stripe_bytes": 64 << 10,
        "io_bytes": 1 << 20,
        "order": "random",
        "memory": "plain",
        "gpu": None,
        "buffer_bytes": 128 << 10,
        "cache": "warm",
        "durability": "none",
        "validate": False,
    }
    chosen = {"backend": "threads", "workers": 2, "queue_depth": 3, "block_bytes": 64 << 10, "submit": "single"}
    assert config | chosen | {"direct": "disabled"} == config
    assert outcome["processes"] == 2
    assert plot.read_text().startswith("<svg")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", os.fsdecode(b"b\xff"), "plot.svg"]


def test_wrong_arguments_and_refusals_are_exceptions(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="size is 0"):
        deepnvme.bench("read", tmp_path, size=0)
    with pytest.raises(ValueError, match="direction is 'append'; it must be 'read' or 'write'"):
        deepnvme.bench("append", tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="never touched"):
        deepnvme.bench("read", __file__)
    with pytest.raises(deepnvme.Error, match="cannot make a file"):
        deepnvme.bench("read", "/proc/sys", size="1M")
    with pytest.raises(deepnvme.Error, match="a folder that exists"):
        deepnvme.bench("read", tmp_path, "--gpu")
    assert Path(__file__).exists()


@pytest.mark.parametrize("command", [deepnvme.tune, functools.partial(deepnvme.bench, "read")])
def test_a_missing_folder_is_a_typed_error(tmp_path: Path, command: Callable[..., object]) -> None:
    missing = tmp_path / "none"
    with pytest.raises(deepnvme.errors.NotFoundError, match=r"Errno 2.*name a folder that exists") as error:
        command(missing)
    assert (error.value.errno, error.value.filename) == (errno.ENOENT, str(missing))


def test_an_output_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    began = time.monotonic()
    for name in ("map.svg", "out.toml"):
        output = tmp_path / "none" / name
        arguments: dict[str, Any] = {"plot" if name == "map.svg" else "output": output}
        with pytest.raises(deepnvme.errors.NotFoundError) as error:
            deepnvme.tune(tmp_path, budget=60, **({"output": tmp_path / "other.toml"} | arguments))
        assert error.value.filename == str(output)
    with pytest.raises(deepnvme.errors.NotFoundError):
        deepnvme.bench("read", tmp_path, plot=tmp_path / "none" / "map.svg")
    assert time.monotonic() - began < 30
    assert not [*tmp_path.iterdir()]


def test_the_command_is_the_same_from_both_entry_points(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("deepnvme")
    done = subprocess.run([script, "report", "--json", tmp_path], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    first, second = json.loads(done.stdout), json.loads(command("report", "--json", str(tmp_path)).stdout)
    for part in ("gpu", "packages", "ops"):
        assert first[part] == second[part]
    assert [backend["works"] for backend in first["backends"]] == [backend["works"] for backend in second["backends"]]


def test_exit_statuses(tmp_path: Path) -> None:
    assert command("--version").stdout == f"deepnvme {deepnvme.__version__}\n"
    wrong = command("bench", "read", str(tmp_path), "--lopps", "1")
    assert wrong.returncode == 2
    assert "--loops" in wrong.stderr
    assert command("bench", "write", "/proc/sys").returncode == 1


def test_the_command_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['deepnvme', 'bench', 'write', sys.argv[1], '--size', '1M', '--loops', '1'];"
        "from deepnvme.__main__ import main; assert main() == 0; assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo"],
        ["stream-bench", "."],
        ["generate", "--model=org/model", "--memory=1GB", "--prompt=x"],
        ["rows", "inspect", "model.safetensors"],
    ],
)
def test_a_command_that_needs_torch_says_so(tmp_path: Path, arguments: list[str]) -> None:
    told = command_without_torch(tmp_path, *arguments)
    assert (told.returncode, told.stdout) == (1, "")
    assert told.stderr.startswith("deepnvme: ")
    assert told.stderr.endswith(f"; install it: {sys.executable} -m pip install torch transformers\n")
    assert told.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["generate", "--model=org/model", "--memory=1XB", "--prompt=x"], "is not a size"),
        (["generate", "--model=.", "--memory=1GB", "--prompt=x"], "has no config.json"),
        (["stream-bench", "none"], "none is not a folder"),
        (["stream-bench", ".", "--model-size=big"], "is not a size"),
        (["rows", "bench", "rows.safetensors", "--memory=big"], "is not a size"),
        (["rows", "pack", "model.safetensors", "rows.safetensors"], "--tensor"),
    ],
)
def test_a_mistake_is_found_before_torch_is_imported(tmp_path: Path, arguments: list[str], text: str) -> None:
    told = command_without_torch(tmp_path, *arguments)
    assert (told.returncode, told.stdout) == (2, "")
    assert text in told.stderr


@pytest.mark.parametrize("name", ["save", "stream", "offload_parameters", "Swapper"])
def test_a_function_that_needs_torch_says_so(name: str) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import deepnvme\n"
        "try:\n    getattr(deepnvme, sys.argv[1])({}, 'x.pt')\nexcept ImportError as error:\n    print(error)"
    )
    told = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=True).stdout
    assert told == f"deepnvme.{name} needs torch, which is not installed; install it with `pip install torch`\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("processes", ["1", "2"])
def test_an_interrupted_benchmark_leaves_nothing(tmp_path: Path, number: signal.Signals, processes: str) -> None:
    arguments = ["bench", "write", str(tmp_path), "--size", "4M", "--loops", "1000", "--processes", processes]
    child = subprocess.Popen(
        [sys.executable, "-m", "deepnvme", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        began = time.monotonic()
        while len(list(tmp_path.iterdir())) < int(processes):
            assert time.monotonic() - began < 60, "no file came"
            time.sleep(0.005)
        time.sleep(0.1)
        child.send_signal(number)
        _, talk = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 1, talk
    assert "interrupted" in talk
    assert list(tmp_path.iterdir()) == []


INTERRUPTED = """
import os, signal, sys, threading
from deepnvme._deepnvme import _run_command

thread = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT))
thread.start()
status = _run_command(sys.argv[1:])
try:
    thread.join()
except KeyboardInterrupt:
    pass
print("status", status)
"""


def test_an_interrupted_command_says_so_or_ends_its_work(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    deepnvme.save({f"{index}.weight": torch.randn(500, 500) for index in range(4)}, tmp_path / "m.safetensors")
    for arguments in (["report", str(tmp_path)], ["pack", str(tmp_path / "m.safetensors"), "packed", "--dry-run"]):
        done = subprocess.run(
            [sys.executable, "-c", INTERRUPTED, *arguments], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        said = "deepnvme: interrupted; the temporary files have been removed" in done.stderr
        assert done.stdout.splitlines()[-1] == ("status 1" if said else "status 0"), done.stderr
    assert not (tmp_path / "packed").exists()


def test_errors_of_a_sweep_config_name_it(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text("")
    done = command("tune", str(tmp_path), "--sweep-config", str(tmp_path / "s.json"))
    assert done.returncode == 2
    assert f"{tmp_path / 's.json'}: the sweep config must be a JSON object of lists" in done.stderr


def test_a_file_of_the_kernel_is_explained() -> None:
    path = "/sys/kernel/mm/transparent_hugepage/enabled"
    if not os.path.exists(path):  # noqa: PTH110
        pytest.skip("no sysfs here")
    done = command("inspect", path)
    assert done.returncode == 1
    assert "copy files of /proc and /sys to a disk first" in done.stderr


def test_tuning_writes_settings_that_engines_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, output, plot = tmp_path / "data", tmp_path / "deepnvme.toml", tmp_path / "map.svg"
    folder.mkdir()
    found = deepnvme.tune(folder, budget=2, size="4M", output=output, plot=plot)
    jsonschema.validate(dict(found), schema("tune"))
    (place,) = found["results"]
    for direction in ("read", "write"):
        choice = place[direction]
        assert choice["gb_per_s"] > 0
        assert len(choice["tried"]) > 4
        assert choice["config"] in [trial["config"] for trial in choice["tried"]]
        engine = deepnvme.Engine.from_file(output, folder=folder / "below", direction=direction)
        assert engine.workers == choice["config"]["workers"]
        assert engine.block_bytes == choice["config"]["block_bytes"]
        assert engine.window == choice["config"]["window"]
        assert f"* {choice['gb_per_s']:>12.2f}"[:1] in str(found)
    monkeypatch.setenv("DEEPNVME_CONFIG", str(output))
    assert deepnvme.Engine.from_file().queue_depth == place["both"]["queue_depth"]
    block = json.loads(str(found).split("configuration:\n")[1].split("\n\n")[0])
    assert block["aio"]["queue_depth"] == place["both"]["queue_depth"]
    assert plot.read_text().startswith("<svg")
    assert list(folder.iterdir()) == []
    compared = command("tune", str(folder), "--size", "4M", "--compare", str(output))
    assert compared.returncode == 0
    assert compared.stdout.count("times as fast") == 2


def test_tuning_refuses_invalid_arguments(tmp_path: Path) -> None:
    (tmp_path / "precious.toml").write_text("[tool]\n")
    for arguments, message in (
        ({"read": False, "write": False}, "leave nothing to tune"),
        ({"budget": 0.1}, "at least 1s"),
        ({"output": tmp_path / "precious.toml"}, "does not contain deepnvme settings"),
        ({"plot": "map.png"}, ".svg or .html"),
    ):
        with pytest.raises(ValueError, match=message):
            deepnvme.tune(tmp_path, **({"output": tmp_path / "out.toml"} | arguments))
    with pytest.raises(deepnvme.Error, match=r"missing\.json"):
        deepnvme.tune(tmp_path, sweep_config=tmp_path / "missing.json", output=tmp_path / "out.toml")
    assert (tmp_path / "precious.toml").read_text() == "[tool]\n"


def test_an_interrupted_search_keeps_the_best_so_far(tmp_path: Path) -> None:
    folder, output = tmp_path / "data", tmp_path / "deepnvme.toml"
    folder.mkdir()
    arguments = ["tune", str(folder), "--size", "1M", "--budget", "10m", "--output", str(output)]
    child = subprocess.Popen(
        [sys.executable, "-m", "deepnvme", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        began = time.monotonic()
        while not list(folder.iterdir()):
            assert time.monotonic() - began < 60, "no file came"
            time.sleep(0.005)
        # Time enough for some trials of a megabyte, also on a busy machine.
        time.sleep(3)
        child.send_signal(signal.SIGINT)
        text, talk = child.communicate(timeout=60)
    finally:
        child.kill()
    assert "interrupted: the best so far" in text, talk
    assert child.returncode == 1
    assert deepnvme.Engine.from_file(output).workers >= 1
    assert list(folder.iterdir()) == []


def test_a_default_engine_takes_its_settings_from_the_environment(tmp_path: Path) -> None:
    settings = tmp_path / "deepnvme.toml"
    settings.write_text("[engine]\nworkers = 3\nqueue_depth = 5\n")
    code = "import deepnvme; e = deepnvme.default_engine(); print(e.workers, e.queue_depth)"
    environment = os.environ | {"DEEPNVME_CONFIG": str(settings)}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert done.stdout == "3 5\n"
    settings.write_text("[engine]\nworkers = 0\n")
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, env=environment)
    assert "workers is 0; it must be between 1 and 64" in done.stderr
    assert str(settings) in done.stderr


def test_settings_of_a_file_are_checked(tmp_path: Path) -> None:
    settings = tmp_path / "deepnvme.toml"
    settings.write_text("[engine]\nworker = 3\n")
    with pytest.raises(ValueError, match="worker"):
        deepnvme.Engine.from_file(settings)
    with pytest.raises(FileNotFoundError):
        deepnvme.Engine.from_file(tmp_path / "missing.toml")
    settings.write_text("")
    with pytest.raises(ValueError, match="'read' or 'write'"):
        deepnvme.Engine.from_file(settings, direction="both")  # type: ignore[arg-type]
