"""Every place in the package that could run code out of data is listed here, with the reason why it may stay.

Python's sources are read as syntax trees, so that aliases and imports of single names count. The extension reaches
Python by the names in its string literals, so those are read.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

# The tests may run against an installed wheel; the text that they read is that of the tree.
ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "deepnvme"

# Modules whose functions make objects of bytes, by whatever name.
MODULES = {
    "pickle", "_pickle", "cPickle", "pickletools", "_compat_pickle", "copyreg", "marshal", "shelve", "dbm",
    "cloudpickle", "dill", "joblib", "jsonpickle", "code", "codeop", "runpy", "torch.package", "torch.utils.model_zoo",
    "torch._weights_only_unpickler", "multiprocessing.connection", "multiprocessing.managers", "multiprocessing.pool",
    "multiprocessing.queues", "multiprocessing.reduction", "multiprocessing.spawn", "torch.multiprocessing.reductions",
    "torch.distributed.checkpoint.filesystem", "torch.distributed.checkpoint.format_utils",
    "torch.distributed.checkpoint.state_dict_loader",
}  # fmt: skip
# Functions of modules that have others.
FUNCTIONS = {
    "eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec", "builtins.compile",
    "builtins.__import__", "torch.load", "torch.serialization.load", "torch.serialization._load",
    "torch.jit.load", "torch.hub", "torch.distributed.checkpoint.load", "torch.distributed.checkpoint.load_state_dict",
    "torch.storage._load_from_bytes", "numpy.load", "numpy.lib.npyio", "numpy.fromfile", "pandas.read_pickle",
    "yaml.load", "yaml.unsafe_load", "yaml.full_load", "ctypes.pythonapi",
}  # fmt: skip
# Names that have one meaning only, whatever stands in front of them: a module in a variable, an object.
METHODS = {
    "all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list", "send_object_list",
    "recv_object_list", "send_object", "recv_object", "_object_to_tensor", "_tensor_to_object", "Unpickler",
    "read_pickle", "unsafe_load", "exec_module", "_load_from_bytes", "_legacy_load", "_weights_only_unpickler",
    "FileSystemReader", "load_checkpoint_in_model", "load_checkpoint_and_dispatch", "ProcessPoolExecutor", "Pipe",
    "JoinableQueue",
}  # fmt: skip
# Names that unpickle in every module but these, whose objects stay in the process.
QUEUES = {"Queue", "SimpleQueue", "Pool", "Manager"}
THREAD_MODULES = {"queue", "asyncio", "_queue"}
# Arguments that make an unpickler of a reader. ``weights_only=True`` alone is harmless.
KEYWORDS = {"allow_pickle", "weights_only", "pickle_module"}
# Functions that give a module by its name.
LOOKUPS = {"importlib.import_module", "importlib.__import__", "__import__", "builtins.__import__", "sys.modules.get",
           "sys.modules.pop", "sys.modules.__getitem__"}  # fmt: skip

JOB = "ranks of one job trust each other: torch pickles what they say, and whoever can speak for a rank owns the job"
OPT_IN = "weights_only=False is the caller's word that the file is trusted; test_pickle_paths.py tests the default"
HOOK = "Python's own import of a module that the user imports"
INSTALLED = "a module of DeepSpeed's installation, which Python has imported before"
READER = "torch's loop with DeepnvmeReader as its reader: repickle_safely has checked all that it unpickles"
SPAWN = "a parent's own child: what it unpickles, its parent has sent"
WITHOUT_PICKLE = "allow_pickle=False: numpy refuses arrays of objects; rows/test_commands.py tries one"
# File, function, name: why.
ALLOWED = {
    ("_rows/commands.py", "_read_array", "numpy.load"): WITHOUT_PICKLE,
    ("_checkpoint/distributed/process_group.py", "RankGroup.all_gather", "torch.distributed.all_gather_object"): JOB,
    ("_checkpoint/distributed/process_group.py", "RankGroup.broadcast", "torch.distributed.broadcast_object_list"): JOB,
    ("_checkpoint/dcp/reader.py", "_is_called_by_load", "'torch.distributed.checkpoint.state_dict_loader'"): (
        "compared with the name of the calling module"
    ),
    ("_checkpoint/distributed/sharded.py", "restore", "torch.distributed.checkpoint.state_dict_loader.load"): READER,
    ("_checkpoint/distributed/sharded.py", "restore.fill", "torch.distributed.checkpoint.state_dict_loader.load"): (
        READER
    ),
    ("_checkpoint/safe_unpickler.py", "", "_compat_pickle"): "two tables of names",
    ("_demo/command.py", "compare_checkpoints", "'torch.load'"): "the name of a tool, in a table",
    ("_demo/command.py", "torch_load", "torch.load"): "the demo's own file, with weights_only=True",
    ("_checkpoint/safe_unpickler.py", "_python3_name", "_compat_pickle.IMPORT_MAPPING.get"): "a table of names",
    ("_checkpoint/safe_unpickler.py", "_python3_name", "_compat_pickle.NAME_MAPPING"): "a table of names",
    ("_checkpoint/pickler.py", "", "pickle"): "for a pickler, which reads no pickle",
    ("_checkpoint/pickler.py", "Pickler", "pickle.Pickler"): "a pickler reads no pickle",
    ("_checkpoint/pickler.py", "pickle_with_storages", "pickle.PicklingError"): "the class of an error",
    ("errors.py", "", "pickle"): "for the base class of an error",
    ("errors.py", "UnsafeFileError", "pickle.UnpicklingError"): "the base class of an error",
    ("_utils/patches.py", "ImportHook._watch", "exec_module"): HOOK,
    ("_utils/patches.py", "ImportHook._watch", "loader.exec_module"): HOOK,
    ("_utils/patches.py", "ImportHook._watch.exec_module", "loader.exec_module"): HOOK,
    ("deepspeed/_install.py", "", "multiprocessing.spawn"): SPAWN,
    ("deepspeed/_install.py", "_install_in_children", "multiprocessing.spawn"): SPAWN,
    ("deepspeed/_install.py", "_install_in_children", "multiprocessing.spawn.get_preparation_data"): SPAWN,
    (
        "deepspeed/_install.py",
        "_install_in_children.get_preparation_data",
        "multiprocessing.spawn.get_preparation_data",
    ): SPAWN,
    ("deepspeed/_workarounds.py", "_restore_asserts", "exec"): INSTALLED,
    ("deepspeed/_workarounds.py", "_restore_asserts", "compile"): INSTALLED,
    ("deepspeed/_workarounds.py", "_restore_asserts", "'exec'"): INSTALLED,
    ("integrations/_torch_load.py", "load_as_torch", "torch.load"): OPT_IN,
    ("integrations/_torch_load.py", "load_as_torch", "weights_only="): OPT_IN,
    ("integrations/deepspeed.py", "DeepnvmeCheckpointEngine.load", "weights_only="): OPT_IN,
    ("integrations/lightning.py", "DeepnvmeCheckpointIO.load_checkpoint", "weights_only="): OPT_IN,
    ("integrations/transformers.py", "_load_object", "weights_only="): OPT_IN,
    ("integrations/transformers.py", "_load_object", "'weights_only'"): OPT_IN,
    ("integrations/transformers.py", "_load_object", "torch.load"): (
        "a call that transformers makes of torch.load itself, with its arguments, where it has no path to read"
    ),
}


class Uses(ast.NodeVisitor):
    """Finds what a module refers to, by its full name."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._aliases: dict[str, str] = {}
        self._within: list[str] = []
        self.found: list[tuple[str, str, int]] = []

    def _note(self, name: str, node: ast.AST) -> None:
        parts = name.split(".")
        heads = {".".join(parts[: count + 1]) for count in range(len(parts))}
        is_queue = parts[-1] in QUEUES and parts[0] not in THREAD_MODULES
        if heads & (MODULES | FUNCTIONS) or parts[-1] in METHODS or is_queue:
            self.found.append((".".join(self._within), name, getattr(node, "lineno", 0)))

    def _full(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self._aliases.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            base = self._full(node.value)
            return None if base is None else f"{base}.{node.attr}"
        if isinstance(node, ast.Subscript) and self._full(node.value) == "sys.modules":
            return _text(node.slice)
        if isinstance(node, ast.Call) and node.args:
            function = self._full(node.func)
            if function in LOOKUPS:
                return _text(node.args[0])
            if function == "getattr" and len(node.args) > 1:
                base, name = self._full(node.args[0]), _text(node.args[1])
                return None if base is None or name is None else f"{base}.{name}"
        return None

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._aliases[alias.asname or alias.name.partition(".")[0]] = (
                alias.name if alias.asname else alias.name.partition(".")[0]
            )
            self._note(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        parents = self._package.split(".")
        base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
        module = ".".join(filter(None, (base, node.module)))
        for alias in node.names:
            assert alias.name != "*", f"{module} is imported as a whole: nobody sees what"
            self._aliases[alias.asname or alias.name] = f"{module}.{alias.name}"
            self._note(f"{module}.{alias.name}", node)

    def _alias(self, value: ast.expr | None, *targets: ast.expr) -> None:
        """Note another name for a module or a function."""
        full = None if value is None else self._full(value)
        for target in targets:
            if isinstance(target, ast.Name) and full is not None and full != target.id:
                self._aliases[target.id] = full

    def visit_Assign(self, node: ast.Assign) -> None:
        self._alias(node.value, *node.targets)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._alias(node.value, node.target)
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._alias(node.value, node.target)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        full = self._full(node)
        if full is not None:
            self._note(full, node)
            return
        if node.attr in METHODS | QUEUES:
            self._note(node.attr, node)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            # A variable may have the name of a module that is not imported here.
            full = self._aliases.get(node.id, node.id)
            if node.id in self._aliases or full not in MODULES:
                self._note(full, node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if (full := self._full(node)) is not None:
            self._note(full, node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if (full := self._full(node)) is not None:
            self._note(full, node)
        for keyword in node.keywords:
            is_harmless = keyword.arg == "weights_only" and _is(keyword.value, True)
            is_refused = keyword.arg == "allow_pickle" and _is(keyword.value, False)
            if keyword.arg in KEYWORDS and not is_harmless and not is_refused:
                self.found.append((".".join(self._within), f"{keyword.arg}=", node.lineno))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        # Imports and lookups by a string, and arguments in a dict.
        if isinstance(node.value, str) and node.value in MODULES | FUNCTIONS | METHODS | KEYWORDS:
            self.found.append((".".join(self._within), repr(node.value), node.lineno))

    def _visit_named(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._within.append(node.name)
        self.generic_visit(node)
        self._within.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_named(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_named(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_named(node)


def _text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _is(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def uses(source: str, package: str = "deepnvme") -> list[tuple[str, str, int]]:
    found = Uses(package)
    found.visit(ast.parse(source))
    return found.found


def test_every_place_in_python_is_listed_with_a_reason() -> None:
    seen = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        package = ".".join(("deepnvme", *path.relative_to(PACKAGE).parent.parts))
        for within, what, line in uses(path.read_text(), package):
            seen.add((name, within, what))
            assert (name, within, what) in ALLOWED, (
                f"{path}:{line}: {what} in {within or 'the module'} may run code of whoever made the data. Read it "
                "through deepnvme.load, or give the reason in ALLOWED of this test"
            )
    assert seen == set(ALLOWED), f"in the list, and not in the sources: {sorted(set(ALLOWED) - seen)}"


def test_no_disguise_helps() -> None:
    for source in (
        "import pickle as p\np.loads(b'')",
        "from pickle import loads as harmless\nharmless(b'')",
        "import torch as t\ndef f():\n    t.load('x')",
        "from torch import load",
        "import torch\nread = torch.load\nread('x')",
        "from torch.serialization import load as x",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "def f(x):\n    x.load('y', weights_only=False)",
        "def f(x, y):\n    x.load('y', weights_only=y)",
        "eval('1')",
        "run = exec\nrun('1')",
        "import builtins\nbuiltins.eval('1')",
        "import importlib\nimportlib.import_module('pickle')",
        "getattr(__builtins__, 'eval')('1')",
        "__import__('x')",
        "import sys\nsys.modules.get('marshal')",
        "import sys\ndist = sys.modules.get('x')\ndist.all_gather_object([], 1)",
        "from torch.distributed import broadcast_object_list as tell",
        "from ..x import Unpickler",
        "def f(x):\n    x().Unpickler()",
        "class A(__import__('dill').Unpickler): pass",
        "import cloudpickle.cloudpickle",
        "import shelve",
        "import marshal\nmarshal.loads(b'')",
        "import dill",
        "from joblib import load",
        "from torch.serialization import _load",
        "import torch\ntorch.serialization._legacy_load(1)",
        "from torch import _weights_only_unpickler",
        "import torch._weights_only_unpickler as x",
        "from torch.distributed.checkpoint import FileSystemReader",
        "import torch.distributed.checkpoint as dcp\ndcp.FileSystemReader('x')",
        "import torch.distributed.checkpoint as dcp\ndcp.load({}, checkpoint_id='x')",
        "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save",
        "import sys\nsys.modules['torch'].load('x')",
        "import sys\nsys.modules.get('torch').load('x')",
        "from sys import modules\nmodules['pickle.x']",
        "import importlib\nimportlib.import_module('torch').load('x')",
        "from importlib import import_module as get\nmodule: object = get('torch')\nmodule.load('x')",
        "import importlib\nif module := importlib.import_module('torch'):\n    module.load('x')",
        "import importlib\nimportlib.import_module('torch.serialization')._load(1)",
        "import importlib\nimportlib.import_module('dill.detect')",
        "import torch\ngetattr(torch, 'load')('x')",
        "def f(x):\n    x(**{'weights_only': False})",
        "def f(x):\n    x(**dict(weights_only=False))",
        "options = {}\noptions['allow_pickle'] = True",
        "import accelerate\naccelerate.load_checkpoint_in_model(1, 'x')",
        "from accelerate.utils import load_checkpoint_in_model",
        "import multiprocessing\nmultiprocessing.Queue()",
        "import torch.multiprocessing as mp\nmp.get_context('spawn').SimpleQueue()",
        "from multiprocessing import Pipe",
        "from multiprocessing import get_context\nget_context().Pipe()",
        "from multiprocessing import Pool",
        "from multiprocessing.managers import BaseManager",
        "from concurrent.futures import ProcessPoolExecutor",
    ):
        assert uses(source), source
    for source in (
        "model.eval()",
        "import json\njson.loads('1')",
        "import re\nre.compile('x')",
        "from deepnvme import load\nload('x')",
        "x.load('y', weights_only=True)",
        "import numpy\nnumpy.save('x', 1, allow_pickle=False)",
        "# pickle.loads",
        "'see pickle.loads'",
        "import queue\nqueue.Queue()",
        "from queue import SimpleQueue\nSimpleQueue()",
        "from concurrent.futures import ThreadPoolExecutor",
        "import sys\nsys.modules['torch'].save(1, 'x')",
        "import torch\ntorch.serialization.add_safe_globals([])",
    ):
        assert not uses(source), source


# String literals that the extension may not have, unless they are listed: names of modules and functions of Python.
RUST_NAMES = MODULES | METHODS | {"torch.load", "torch.serialization", "load", "loads", "eval", "exec", "__reduce__",
                                  "__reduce_ex__", "__setstate__", "builtins", "__import__"}  # fmt: skip
RUST_CODE = re.compile(
    r"\bpickle\s*\.|\btorch\s*\.\s*load\b|\bimport\s+\w+|\bfrom\s+\w+\s+import\b|\b(eval|exec|__import__)\s*\("
)
# Texts of `help()`. Its examples name functions that run code.
DOCSTRINGS = "docs.rs"
RUST_ALLOWED = {
    ("checkpoint/build/callables.rs", "builtins"): "names in pickles are compared with it; nothing is imported",
    ("timeline.rs", "loads"): "of json, on a text that the extension has made",
}
_TOKENS = re.compile(
    r"""//[^\n]*|/\*.*?\*/|b?'(?:\\.[^']*|[^\\'\n])'|[bc]?r(?P<fence>\#*)"(?P<raw>.*?)"(?P=fence)|[bc]?"(?P<text>(?:\\.|[^"\\])*)\"""",
    re.DOTALL,
)


def literals(source: str) -> Iterator[tuple[str, int]]:
    """Yield the string literals of a Rust source, and their lines."""
    for token in _TOKENS.finditer(source):
        text = token["raw"] if token["raw"] is not None else token["text"]
        if text is not None:
            yield text, source.count("\n", 0, token.start()) + 1


def rust_uses(source: str) -> list[tuple[str, int]]:
    """Literals that name a way into Python's unpickling, and calls that run code."""
    found = [(text, line) for text, line in literals(source) if text in RUST_NAMES or RUST_CODE.search(text)]
    bare = _TOKENS.sub(lambda token: "" if token[0].startswith("/") else '""', source)
    found += [
        (call[0], 0)
        for call in re.finditer(
            r"\.(run|eval|run_bound|eval_bound)\(\s*\"|PyModule::from_code|PyRun_\w+|PyMarshal_\w+", bare
        )
    ]
    return found


def test_the_extension_calls_no_unpickler() -> None:
    seen = set()
    for path in sorted((ROOT / "python" / "src").rglob("*.rs")):
        name = path.relative_to(ROOT / "python" / "src").as_posix()
        if name == DOCSTRINGS:
            continue
        for text, line in rust_uses(path.read_text()):
            seen.add((name, text))
            assert (name, text) in RUST_ALLOWED, (
                f"{path}:{line}: {text!r} is a way to run code; give a reason in this test"
            )
    assert seen == set(RUST_ALLOWED)
    # No other crate could: none of them knows Python.
    for path in sorted((ROOT / "crates").glob("*/Cargo.toml")):
        assert "pyo3" not in path.read_text(), path


def test_no_disguise_helps_in_rust() -> None:
    for source in (
        'py.import("pickle")',
        'py.import(intern!(py, "torch.serialization"))?.call_method1("x", ())',
        'module.getattr(r#"Unpickler"#)',
        'py.run(c"1", None, None)',
        'let text = c"import os";',
        'x.call_method1(intern!(py, "loads"), (b,))',
        "PyModule::from_code(py, code, file, name)",
    ):
        assert rust_uses(source), source
    for source in ('// py.import("pickle")', '/* "pickle" */', 'let quote = \'"\'; // "pickle"', '"the pickle has"'):
        assert not rust_uses(source), source


def test_code_of_a_model_folder_is_refused_by_name() -> None:
    """The ``Auto`` classes of transformers ask on the terminal whether to run a folder's code, unless they are told."""
    found = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            function = node.func if isinstance(node, ast.Call) else None
            if isinstance(function, ast.Attribute) and function.attr == "from_pretrained":
                assert isinstance(node, ast.Call)
                if "Auto" in ast.unparse(function.value):
                    found += 1
                    assert any(keyword.arg == "trust_remote_code" for keyword in node.keywords), f"{path}:{node.lineno}"
    assert found >= 4
