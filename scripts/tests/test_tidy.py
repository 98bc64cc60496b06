"""Each rule of the tidy check, with an example that it must refuse and one that it must accept."""

from __future__ import annotations

from typing import Any

import pytest

import tidy


def package(name: str, *dependencies: tuple[str, str | None]) -> dict[str, Any]:
    described = [{"name": f"deepnvme-{to}", "kind": kind, "path": f"/{to}"} for to, kind in dependencies]
    return {"name": f"deepnvme-{name}", "dependencies": [*described, {"name": "libc", "kind": None}]}


@pytest.mark.parametrize(
    "allowed",
    [
        package("io", ("mem", None), ("cuda", None), ("testkit", "dev")),
        package("python", ("io", None), ("mem", None), ("stream", None)),
        package("stream", ("checkpoint", None), ("format", None), ("io", "dev")),
        package("testkit", ("io", None), ("mem", None)),
        package("cuda", ("fake-driver", "dev")),
        package("cli", ("perf", None)),
    ],
)
def test_allowed_dependencies(allowed: dict[str, Any]) -> None:
    assert list(tidy.check_dependencies([allowed])) == []


def test_only_a_build_for_the_simulation_depends_on_its_runtime() -> None:
    described = package("io", ("simulation-runtime", None))
    assert len(list(tidy.check_dependencies([described]))) == 1
    described["dependencies"][0]["target"] = "cfg(simulated)"
    assert list(tidy.check_dependencies([described])) == []


@pytest.mark.parametrize(
    "refused",
    [
        package("mem", ("io", None)),
        package("mem", ("format", None)),
        package("checkpoint", ("mem", None)),
        package("optim", ("io", None)),
        package("io", ("testkit", None)),
        package("io", ("testkit", "build")),
        package("format", ("io", "dev")),
        package("cuda", ("fake-driver", None)),
        package("fake-driver", ("mem", None)),
        package("perf", ("cli", None)),
        package("cli", ("mem", None)),
        package("newcomer"),
    ],
)
def test_refused_dependencies(refused: dict[str, Any]) -> None:
    assert len(list(tidy.check_dependencies([refused]))) == 1


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("crates/deepnvme-mem/src/pool.rs", True),
        ("crates/deepnvme-io/src/backend/uring/ring.rs", True),
        ("crates/deepnvme-io/tests/seccomp.rs", True),
        ("python/src/memory/mod.rs", True),
        ("python/src/engine.rs", False),
        ("crates/deepnvme-io/src/gpu/cuda.rs", True),
        ("crates/deepnvme-io/src/engine/mod.rs", False),
        ("crates/deepnvme-testkit/src/lib.rs", False),
        ("crates/deepnvme-testkit/fake_driver/src/memory.rs", True),
        ("crates/deepnvme-testkit/fake_driver/tests/driver.rs", True),
    ],
)
def test_unsafe_code_in_certain_folders(path: str, allowed: bool) -> None:
    code = "// SAFETY: the pointer is ours.\nunsafe { read(pointer) };\n"
    assert (list(tidy.check_unsafe(path, code)) == []) is allowed


@pytest.mark.parametrize(
    ("code", "accepted"),
    [
        ("let x = unsafe { read() };", False),
        ("// SAFETY: far away.\n\nlet x = unsafe { read() };", False),
        ("// SAFETY: ours.\nlet x =\n    unsafe { read() };", True),
        ("/// # Safety\n/// The caller owns it.\npub unsafe fn take() {}", True),
        ("// SAFETY: guaranteed by the caller.\nunsafe { read() };", False),
        ("// SAFETY: it is aligned. The rest is\n// as above.\nunsafe { read() };", False),
        ("// SAFETY: aligned, as the caller of `take` ensures.\nunsafe { read() };", True),
        ("unsafe impl Send for X {}", False),
        ("#[unsafe(no_mangle)]", False),
        ('unsafe extern "C" {', False),
        ('pub unsafe extern "C" fn free(x: *mut u8) {}', False),
        ('type Deleter = unsafe extern "C" fn(*mut u8);', True),
        ("#![forbid(unsafe_code)]", True),
        ("// nothing unsafe { here }", True),
        ('let text = "unsafe { }";', True),
    ],
)
def test_unsafe_says_why(code: str, accepted: bool) -> None:
    assert (list(tidy.check_unsafe("crates/deepnvme-mem/src/x.rs", code)) == []) is accepted


@pytest.mark.parametrize(
    ("path", "code", "accepted"),
    [
        ("crates/deepnvme-io/src/x.rs", "std::thread::spawn(work);", False),
        ("crates/deepnvme-io/src/x.rs", "start_thread(|| Ok(thread::spawn(work)));", False),
        ("python/src/x.rs", "scope.spawn(work);", False),
        ("crates/deepnvme-swap/src/x.rs", "Builder::new().spawn(move || work())?;", False),
        ("crates/deepnvme-swap/src/x.rs", "start_thread(|| Builder::new().spawn(work))?;", True),
        ("crates/deepnvme-swap/src/x.rs", "let x = start_thread(|| {\n    builder.spawn(work)\n})?;", True),
        ("crates/deepnvme-perf/src/x.rs", 'Command::new("fio").spawn()?;', True),
        ("crates/deepnvme-io/src/x.rs", "#[cfg(all(test, not(loom)))]\nthread::spawn(work);", True),
        ("crates/deepnvme-io/src/x/tests.rs", "thread::spawn(work);", True),
        ("crates/deepnvme-io/tests/x.rs", "thread::spawn(work);", True),
        ("crates/deepnvme-optim/src/thread_pool.rs", "pool.scope(|scope| scope.spawn(work));", True),
    ],
)
def test_threads_are_started_in_one_place(path: str, code: str, accepted: bool) -> None:
    assert (list(tidy.check_threads(path, code)) == []) is accepted


def test_module_docs() -> None:
    assert list(tidy.check_file("a/b.rs", "#![cfg(loom)]\n\n//! The map.\n")) == []
    assert len(list(tidy.check_file("a/b.rs", "use std::io;\n//! Too late.\n"))) == 1
    assert len(list(tidy.check_file("a/b.rs", ""))) == 1


def test_paths_in_json() -> None:
    derived = "//! a\n#[derive(Clone, Serialize)]\npub struct A {\n    /// b\n%s    pub b: Option<PathBuf>,\n}\n"
    [finding] = tidy.check_file("crates/x/src/a.rs", derived % "")
    assert finding.startswith("crates/x/src/a.rs:5: ")
    assert list(tidy.check_file("crates/x/src/a.rs", derived % '    #[serde(serialize_with = "c")]\n')) == []
    assert list(tidy.check_file("crates/x/src/a.rs", (derived % "").replace("Serialize", "Debug"))) == []
    assert list(tidy.check_file(tidy.EXACT_PATHS[0], derived % "")) == []


def test_workspace_lints() -> None:
    assert list(tidy.check_file("crates/x/Cargo.toml", "[lints]\nworkspace = true\n")) == []
    assert len(list(tidy.check_file("crates/x/Cargo.toml", "[package]\nname = 'x'\n"))) == 1


def test_length() -> None:
    assert list(tidy.check_length("a.rs", "\n" * 500)) == []
    assert list(tidy.check_length("a.md", "\n" * 2000)) == []
    assert [line.endswith("(failure)") for line in tidy.check_length("a.py", "\n" * 501)] == [False]
    assert [line.endswith("(failure)") for line in tidy.check_length("a.py", "\n" * 701)] == [True]


@pytest.mark.parametrize(
    ("folder", "private"),
    [("home/ann", True), ("Users/ann", True), ("root/x", True), ("tmp/w/x", True), ("tmp/bench/x", False)],
)
def test_private_paths(folder: str, private: bool) -> None:
    assert (len(list(tidy.check_private_paths("x.py", f'open("/{folder}/file")'))) == 1) is private
    assert list(tidy.check_private_paths("x.py", f"see ./{folder}/file and a/{folder}/")) == []


def test_links() -> None:
    assert list(tidy.check_links("x.md", "[us](scripts/tidy.py), [web](https://example.org/x), [here](#part)")) == []
    assert len(list(tidy.check_links("x.md", "[gone](scripts/nowhere.py#L1) and [us](pyproject.toml)"))) == 1
