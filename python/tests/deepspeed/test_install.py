"""`install` and `uninstall` on a real DeepSpeed, in separate processes without a compiler."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: pip install 'deepspeed>=0.19.8'",
)

# Common code of the programs below. A snapshot contains the modules, classes and tables of DeepSpeed by identity.
PRELUDE = """
    import multiprocessing.spawn
    import sys
    import types


    def forbid_compiling():
        import torch.utils.cpp_extension as extension
        def compile_op(*args, **keywords):
            raise AssertionError("an op was about to be compiled")
        for name in ("load", "load_inline", "_jit_compile", "_write_ninja_file_and_build_library"):
            setattr(extension, name, compile_op)


    def snapshot():
        found = {"meta_path": list(sys.meta_path), "spawn": multiprocessing.spawn.get_preparation_data}
        for name, module in list(sys.modules.items()):
            if not name.startswith(("deepspeed", "op_builder")) or not isinstance(module, types.ModuleType):
                continue
            for key, value in vars(module).items():
                found[name, key] = id(value)
                if isinstance(value, type) and value.__module__ == name:
                    found.update({(name, key, inner): id(item) for inner, item in vars(value).items()})
                if key in ("ALL_OPS", "installed_ops", "__compatible_ops__"):
                    found[name, key, "content"] = dict(value)
        return found


    def loaded():
        import deepspeed.ops.op_builder as builders
        names = ("AsyncIOBuilder", "PinMemoryBuilder", "UtilsBuilder", "GDSBuilder")
        return {name: getattr(builders, name)().load().__name__ for name in names}


    OURS = {
        "AsyncIOBuilder": "deepnvme.deepspeed.async_io",
        "PinMemoryBuilder": "deepnvme.deepspeed.pin_memory",
        "UtilsBuilder": "deepnvme.deepspeed.utils",
        "GDSBuilder": "deepnvme.deepspeed.gds",
    }
"""


# A PATH without compiler and ninja.
VARIABLES = {"DS_ACCELERATOR": "cpu", "PATH": "/nonexistent"}


def run_program(program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run it with a PATH without compiler and ninja."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PRELUDE) + textwrap.dedent(program), *arguments],
        env={**os.environ, **VARIABLES, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def forked_success(python_fork: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., str]:
    """Run a program that may begin with torch imported, but without DeepSpeed."""

    def run(program: str, *arguments: str) -> str:
        begin = 'import sys\nassert not any(name.startswith(("deepspeed", "deepnvme")) for name in sys.modules)\n'
        text = begin + textwrap.dedent(PRELUDE) + textwrap.dedent(program)
        return python_fork(text, *arguments, environment=VARIABLES).stdout

    return run


def expect_success(program: str, *arguments: str, **variables: str) -> str:
    done = run_program(program, *arguments, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_install_needs_neither_torch_nor_deepspeed() -> None:
    expect_success("""
        import deepnvme.deepspeed
        before = snapshot()
        deepnvme.deepspeed.install()
        deepnvme.deepspeed.install()
        assert deepnvme.deepspeed.AsyncIOBuilder().is_compatible()
        assert not {"torch", "deepspeed"} & set(sys.modules)
        assert snapshot() != before
        deepnvme.deepspeed.uninstall()
        assert snapshot() == before
        deepnvme.deepspeed.uninstall()
    """)


@needs_deepspeed
def test_before_the_import(forked_success: Callable[..., str]) -> None:
    forked_success("""
        import deepnvme.deepspeed
        deepnvme.deepspeed.install()
        import deepspeed
        forbid_compiling()
        assert loaded() == OURS, loaded()
        import deepspeed.io.fast_file_writer, deepspeed.runtime.model_checkpointing.writer_factory as factory
        assert deepspeed.io.fast_file_writer.UtilsBuilder is deepnvme.deepspeed.UtilsBuilder
        assert factory.AsyncIOBuilder().load() is deepnvme.deepspeed.AsyncIOBuilder().load()
        import deepspeed.ops
        answers = deepspeed.ops.__compatible_ops__
        assert answers["async_io"] and answers["pin_memory"] and answers["utils"], answers
        from deepspeed.accelerator import get_accelerator
        assert get_accelerator().create_op_builder("UtilsBuilder").load().__name__ == OURS["UtilsBuilder"]
        import torch
        has_gpu = torch.cuda.is_available()
        assert get_accelerator().get_op_builder("GDSBuilder")().is_compatible() is answers["gds"] is has_gpu
        assert get_accelerator().create_op_builder("CPUAdamBuilder").NAME == "cpu_adam"
        import deepspeed.nvme.validate_async_io

        deepnvme.deepspeed.uninstall()
        import deepspeed.ops.op_builder as builders
        assert builders.UtilsBuilder.__name__ == builders.GDSBuilder.__name__ == "NotImplementedBuilder"
        assert deepspeed.io.fast_file_writer.UtilsBuilder.__name__ == "NotImplementedBuilder"
        assert not any(
            getattr(value, "__module__", "").startswith("deepnvme")
            for builder in (builders.AsyncIOBuilder, builders.PinMemoryBuilder, type(get_accelerator()))
            for value in vars(builder).values()
        )
        from deepspeed.git_version_info import installed_ops
        assert not installed_ops["async_io"] and not {"gds", "utils"} & set(installed_ops)
        assert "__compatible_ops__" not in vars(deepspeed.ops)
        try:
            builders.AsyncIOBuilder().load()
        except (AssertionError, RuntimeError):
            pass
        else:
            raise SystemExit("DeepSpeed's own op came from nowhere")
    """)


@needs_deepspeed
def test_after_the_import_and_back_again(forked_success: Callable[..., str]) -> None:
    forked_success("""
        import deepspeed, deepspeed.io, deepspeed.nvme, deepspeed.env_report
        import deepspeed.runtime.model_checkpointing.writer_factory
        import deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper
        import deepnvme.deepspeed
        forbid_compiling()
        before = snapshot()
        for _ in range(3):
            deepnvme.deepspeed.install()
            deepnvme.deepspeed.install()
            assert loaded() == OURS, loaded()
            utils = deepspeed.io.fast_file_writer.UtilsBuilder().load()
            assert utils.__name__ == OURS["UtilsBuilder"]
            assert deepspeed.ops.__compatible_ops__["async_io"] is True
            deepnvme.deepspeed.uninstall()
            after = snapshot()
            assert after == before, {key for key in before if after.get(key) != before[key]} | (after.keys() - before)
    """)


@needs_deepspeed
@pytest.mark.parametrize("when", ["before", "after"])
def test_in_a_source_tree_the_builders_have_two_names(
    tmp_path: Path, when: str, forked_success: Callable[..., str]
) -> None:
    package = importlib.util.find_spec("deepspeed.ops.op_builder")
    assert package is not None
    assert package.submodule_search_locations is not None
    (tmp_path / "op_builder").symlink_to(package.submodule_search_locations[0], target_is_directory=True)
    forked_success(
        """
        sys.path.insert(0, sys.argv[2])
        import deepnvme.deepspeed
        if sys.argv[1] == "before":
            deepnvme.deepspeed.install()
        import deepspeed, op_builder, op_builder.cpu, deepspeed.ops.op_builder.cpu
        assert op_builder.cpu.AsyncIOBuilder is not deepspeed.ops.op_builder.cpu.AsyncIOBuilder
        forbid_compiling()
        before = snapshot()
        deepnvme.deepspeed.install()
        for builders in (op_builder.cpu, deepspeed.ops.op_builder.cpu):
            for name in ("AsyncIOBuilder", "PinMemoryBuilder"):
                assert getattr(builders, name)().is_compatible()
                assert getattr(builders, name)().load().__name__ == OURS[name]
        assert loaded() == OURS
        assert op_builder.UtilsBuilder().load().__name__ == OURS["UtilsBuilder"]
        deepnvme.deepspeed.uninstall()
        assert sys.argv[1] == "before" or snapshot() == before
        for builders in (op_builder.cpu, deepspeed.ops.op_builder.cpu):
            assert "deepnvme" not in builders.AsyncIOBuilder.load.__module__
        """,
        when,
        str(tmp_path),
    )


@needs_deepspeed
def test_answers_that_deepspeed_has_given_already(forked_success: Callable[..., str]) -> None:
    forked_success("""
        import deepspeed, deepspeed.ops
        deepspeed.ops.__compatible_ops__ = dict(deepspeed.ops.__compatible_ops__, async_io=False)
        before = dict(deepspeed.ops.__compatible_ops__)
        import deepnvme.deepspeed
        deepnvme.deepspeed.install()
        assert deepspeed.ops.__compatible_ops__["async_io"] and deepspeed.ops.__compatible_ops__["utils"]
        deepnvme.deepspeed.uninstall()
        assert deepspeed.ops.__compatible_ops__ == before
    """)


@needs_deepspeed
def test_report(forked_success: Callable[..., str]) -> None:
    output = forked_success("""
        import deepnvme.deepspeed
        deepnvme.deepspeed.install()
        from deepspeed.env_report import op_report
        op_report()
        print("AFTER")
        deepnvme.deepspeed.uninstall()
        op_report()
    """)
    installed, after = re.sub(r"\x1b\[\d+m", "", output).split("AFTER")

    def row(report: str, name: str) -> Any:
        found = re.search(rf"^{name} \.+ \[(\w+)\] \.+ \[(\w+)\]$", report, re.MULTILINE)
        return found and found.groups()

    assert [row(installed, name) for name in ("async_io", "pin_memory", "utils")] == [("YES", "OKAY")] * 3
    assert row(installed, "gds") == ("YES", "OKAY" if torch.cuda.is_available() else "NO")
    assert row(after, "async_io") == ("NO", "NO")
    assert row(after, "gds") is row(after, "utils") is None
    assert row(installed, "cpu_adam") == row(after, "cpu_adam")


CHILD = """
import deepspeed
from deepspeed.ops.op_builder import AsyncIOBuilder, UtilsBuilder


def work(name):
    import torch
    handle = AsyncIOBuilder().load().aio_handle()
    assert type(handle).__module__ == "deepnvme.deepspeed.async_io"
    tensor = torch.zeros(1000, dtype=torch.uint8)
    handle.sync_pread(tensor, name)
    return UtilsBuilder().load().cast_to_byte_tensor(tensor).sum().item()
"""


@needs_deepspeed
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_child_processes_inherit_it(tmp_path: Path, method: str) -> None:
    (tmp_path / "file").write_bytes(bytes([3]) * 1000)
    (tmp_path / "child_of_test.py").write_text(CHILD, encoding="utf-8")
    program = """
        import multiprocessing
        import deepnvme.deepspeed
        deepnvme.deepspeed.install()
        import child_of_test
        with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
            print(pool.map(child_of_test.work, [sys.argv[2]] * 4))
    """
    output = expect_success(program, method, str(tmp_path / "file"), PYTHONPATH=str(tmp_path))
    assert output == "[3000, 3000, 3000, 3000]\n"


@needs_deepspeed
def test_a_pth_line_reaches_every_process(tmp_path: Path) -> None:
    (tmp_path / "deepnvme-deepspeed.pth").write_text(
        "import deepnvme.deepspeed; deepnvme.deepspeed.install()\n", encoding="utf-8"
    )
    expect_success(
        """
        import site
        site.addsitedir(sys.argv[1])
        assert "torch" not in sys.modules
        import deepspeed
        assert loaded() == OURS
        """,
        str(tmp_path),
    )
