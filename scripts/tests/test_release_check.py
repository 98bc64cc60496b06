"""Tests of how steps end, and of the summary."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import release_check
import release_steps
import release_systems
from release_steps import Failed, Release, Skipped


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps, one for each way to end."""

    def skip(_: Release) -> str:
        raise Skipped("no tool")

    def fail(_: Release) -> str:
        raise Failed("a fault")

    table = {"good": (lambda _: "a note", "work"), "lacking": (skip, "try"), "bad": (fail, "break")}
    monkeypatch.setattr(release_check, "STEPS", table)
    monkeypatch.setattr(Release, "begin", lambda *_: None)


@pytest.mark.usefixtures("steps")
def test_each_step_says_how_it_ended(capsys: pytest.CaptureFixture[str]) -> None:
    assert release_check.main(["good", "lacking", "bad"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["good: work", "    done (0 s): a note"]
    assert lines[3] == "    skipped (0 s): no tool"
    assert lines[-3:] == ["skipped: lacking", "failed: bad", "release-check: 1 done, 1 skipped, 1 failed"]


@pytest.mark.usefixtures("steps")
def test_a_skipped_step_fails_only_if_asked() -> None:
    assert release_check.main(["good", "lacking"]) == 0
    assert release_check.main(["--strict", "good", "lacking"]) == 1
    assert release_check.main(["--strict", "good"]) == 0


def test_an_unknown_step_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as ended:
        release_check.main(["nonsense"])
    assert ended.value.code == 2


def test_the_workflow_names_existing_steps() -> None:
    workflow = Path(release_steps.ROOT, ".github", "workflows", "release.yml").read_text()
    commands = [line.split("release_check.py")[1] for line in workflow.splitlines() if "release_check.py" in line]
    words = {word for command in commands for word in command.split()}
    names = {word for word in words if not word.startswith(("-", '"', "$"))}
    assert names == set(release_check.STEPS)


def test_every_file_is_built_before_all_files_are_checked() -> None:
    names = list(release_check.STEPS)
    built = max(map(names.index, ("wheel", "aarch64-wheel", "sdist")))
    assert built < min(map(names.index, ("symbols", "abi3", "metadata", "contents")))


def test_a_failed_command_shows_the_end_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_steps, "ROOT", tmp_path)
    release = Release(folder=tmp_path / "work")
    release.begin("step")
    with pytest.raises(Failed, match=r"ended with 3; the end of work/step.log:\n.*\nlast words$"):
        release.run([sys.executable, "-c", "print('last words'); raise SystemExit(3)"], cwd=tmp_path)
    assert release_steps.last_line(release, [sys.executable, "-c", "print(1); print(2)"], cwd=tmp_path) == "2"


def test_a_step_without_its_file_names_the_step_that_builds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_steps, "ROOT", tmp_path)
    release = Release(folder=tmp_path)
    with pytest.raises(Skipped, match="the step `aarch64-wheel` builds it"):
        release.wheel("aarch64")
    with pytest.raises(Skipped, match="the step `sdist` builds it"):
        release.sdist()


def test_only_an_interpreter_of_that_version_counts() -> None:
    number = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert release_steps.is_python(sys.executable, number)
    assert not release_steps.is_python(sys.executable, "3.9")
    assert not release_steps.is_python("/nowhere/python", number)


def test_this_tree_has_one_version() -> None:
    number, date = release_steps.release_version()
    assert number.count(".") == 2
    assert date == "unreleased" or len(date) == 10


def test_the_emulated_tests_exist() -> None:
    tests = release_steps.ROOT / "python" / "tests"
    assert [name for name in release_steps.EMULATED_TESTS if not (tests / f"test_{name}.py").exists()] == []


@pytest.fixture
def lacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Release:
    """A release with a wheel for aarch64, on a machine without docker."""
    release = Release(folder=tmp_path)
    release.dist.mkdir()
    (release.dist / "a_aarch64.whl").touch()
    release.begin("aarch64-tests")
    monkeypatch.setattr(release_steps, "ROOT", tmp_path)
    monkeypatch.setattr(release_systems, "docker_obstacle", lambda _: "no docker")
    monkeypatch.setattr(release_systems, "chroot_obstacle", lambda: None)
    monkeypatch.setattr(release_systems, "unpack", lambda _: [])
    return release


def test_without_docker_the_step_names_other_missing_tools(lacking: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_systems, "chroot_obstacle", lambda: "debootstrap not installed")
    with pytest.raises(Skipped, match="no docker; without it: debootstrap not installed"):
        release_steps.aarch64_tests(lacking)
    monkeypatch.setattr(release_systems, "chroot_obstacle", lambda: None)
    monkeypatch.setattr(release_systems, "fetch", lambda _: ["false"])
    with pytest.raises(Skipped, match="debootstrap could not fetch"):
        release_steps.aarch64_tests(lacking)
    monkeypatch.setattr(release_systems, "fetch", lambda folder: ["mkdir", folder])
    monkeypatch.setattr(release_systems, "in_chroot", lambda *_: ["false"])
    with pytest.raises(Skipped, match=r"Linux 6\.7"):
        release_steps.aarch64_tests(lacking)


def test_without_docker_the_tests_run_in_a_folder(lacking: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_systems, "fetch", lambda folder: ["mkdir", folder])
    monkeypatch.setattr(release_systems, "in_chroot", lambda *arguments: ["echo", arguments[0].name, arguments[-1]])
    monkeypatch.setattr(release_steps, "EMULATED_PACKAGES", ("--help",))
    told = release_steps.aarch64_tests(lacking)
    assert told.startswith("aarch64 ")
    assert "--find-links /packages /dist/a_aarch64.whl" in told
    assert "python/tests/test_file.py" in told


def test_a_machine_without_its_programs_has_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert release_systems.chroot_obstacle() == f"{', '.join(release_systems.PROGRAMS)} not installed"
    assert release_systems.docker_obstacle("linux/amd64") == "docker is not installed"
