"""Calls as users of torch write them: accepted, or refused where they are made, with the call to write instead."""

from __future__ import annotations

import errno
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import deepnvme

torch = pytest.importorskip("torch")


class Config:
    """A class that no loader knows."""

    def __init__(self) -> None:
        self.layers = 2


class Nested:
    def __init__(self) -> None:
        self.config = Config()


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=["pt", "safetensors"])
def saved(request: pytest.FixtureRequest) -> str:
    path = f"state.{request.param}"
    deepnvme.save({"a": torch.arange(6.0).view(2, 3).t().contiguous(), "b": torch.ones(2, dtype=torch.int16)}, path)
    return path


@pytest.mark.parametrize(
    "location", ["cpu", torch.device("cpu"), {"cpu": "cpu"}, {}, lambda storage, _: storage, lambda *_: None]
)
def test_map_location_is_that_of_torch(saved: str, location: Any) -> None:
    state = deepnvme.load(saved, map_location=location)
    assert torch.equal(state["a"], torch.arange(6.0).view(2, 3).t())
    assert state["b"].dtype == torch.int16


def test_map_location_moves_tensors(saved: str) -> None:
    assert deepnvme.load(saved, map_location="meta")["a"].is_meta
    places: list[str] = []

    def choose(storage: Any, place: str) -> Any:
        places.append(place)
        return storage

    deepnvme.load(saved, map_location=choose)
    assert places == ["cpu", "cpu"]


def test_a_map_location_that_contradicts_is_refused(saved: str) -> None:
    with pytest.raises(ValueError, match="device and map_location"):
        deepnvme.load(saved, map_location="cpu", device="meta")
    with pytest.raises(ValueError, match="excludes into, lazy and pin_memory"):
        deepnvme.load(saved, map_location={}, lazy=True)
    with pytest.raises(TypeError, match="pass a device, a dict of devices, or a function"):
        deepnvme.load(saved, map_location=3.5)  # type: ignore[arg-type]


def test_other_arguments_of_torch_name_the_way(saved: str) -> None:
    assert deepnvme.load(saved, weights_only=True, mmap=False).keys() == {"a", "b"}
    with pytest.raises(ValueError, match="add_safe_globals"):
        deepnvme.load(saved, weights_only=False)
    with pytest.raises(ValueError, match="lazy=True"):
        deepnvme.load(saved, mmap=True)
    with Path(saved).open("rb") as file, pytest.raises(TypeError, match=r"deepnvme\.open\(path\)"):
        deepnvme.load(file)  # type: ignore[arg-type]
    with Path("new").open("wb") as file, pytest.raises(TypeError, match=r'deepnvme\.open\(path, "wb"\)'):
        deepnvme.save({}, file)  # type: ignore[arg-type]


def test_save_warns_of_values_that_load_refuses() -> None:
    state = {"model": {"weight": torch.ones(2)}, "steps": [{"config": Config()}]}
    with pytest.warns(UserWarning) as caught:
        deepnvme.save(state, "state.pt")
    (warning,) = caught
    assert "['steps'][0]['config']" in str(warning.message)
    assert "torch.serialization.add_safe_globals([Config])" in str(warning.message)
    assert warning.filename == __file__
    with pytest.raises(deepnvme.errors.UnsafeFileError, match="Config"):
        deepnvme.load("state.pt")
    with torch.serialization.safe_globals([Config]), warnings.catch_warnings():
        warnings.simplefilter("error")
        deepnvme.save(state, "state.pt")
        assert deepnvme.load("state.pt")["steps"][0]["config"].layers == 2


def test_save_warns_of_classes_inside_objects_and_of_classes_themselves() -> None:
    with pytest.warns(UserWarning, match=r"\['x'\] needs .*Nested.*the state needs .*Config"):
        deepnvme.save({"x": Nested()}, "state.pt")
    with pytest.warns(UserWarning, match=r"\['kind'\] needs .*Config"):
        deepnvme.save({"kind": Config}, "state.pt")
    with pytest.warns(UserWarning, match=r"\['config'\]"), deepnvme.Checkpointer("run") as checkpointer:
        checkpointer.save(1, {"config": Config()})


@pytest.mark.filterwarnings("error")
def test_save_does_not_warn_of_values_that_load_accepts() -> None:
    state = {
        "dtype": torch.float16,
        "size": torch.Size([2]),
        "device": torch.device("cpu"),
        "bytes": b"x" * 9,
        "set": {1, 2},
        "frozen": frozenset((1,)),
        "complex": 1j,
        "sparse": torch.eye(3).to_sparse(),
        "array": bytearray(3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    deepnvme.save(state, "state.pt")
    assert deepnvme.load("state.pt").keys() == state.keys()


def test_a_missing_folder_for_swapping_is_created(tmp_path: Path) -> None:
    with deepnvme.Swapper(tmp_path / "a" / "b", memory="1MB") as swapper:
        swapper.put("x", torch.ones(3))
    with deepnvme.Swapper([tmp_path / "c", tmp_path / "d"], memory="1MB"):
        assert (tmp_path / "c").is_dir()
        assert (tmp_path / "d").is_dir()
    weight = torch.nn.Parameter(torch.ones(3))
    deepnvme.optim.SGD([weight], lr=0.1, momentum=0.9, swap_dir=tmp_path / "e", memory="1MB").close()
    assert (tmp_path / "e").is_dir()
    deepnvme.offload_parameters(torch.nn.Linear(64, 64), memory="1MB", swap_dir=tmp_path / "f").close()
    assert (tmp_path / "f").is_dir()


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: deepnvme.pinned_empty(3, "float32"), r"pass torch\.float32"),  # type: ignore[arg-type]
    (lambda: deepnvme.pinned_empty(3, 4), "such as torch.float32"),  # type: ignore[arg-type]
    (lambda: deepnvme.Checkpointer("run", memory=[]), "memory is"),  # type: ignore[arg-type]
    (lambda: deepnvme.Checkpointer("run", engine="aio"), r"deepnvme\.Engine"),  # type: ignore[arg-type]
    (lambda: deepnvme.Checkpointer("run", durability=True), "'none', 'data' or 'full'"),  # type: ignore[arg-type]
    (lambda: deepnvme.Checkpointer("run", checksums="yes"), "True or False"),  # type: ignore[arg-type]
    (lambda: deepnvme.Checkpointer("run", progress="yes"), "function of bytes done"),  # type: ignore[arg-type]
    (lambda: deepnvme.save({}, "x.pt", engine=3), r"deepnvme\.Engine"),  # type: ignore[arg-type]
    (lambda: deepnvme.save({}, 3), "takes a path"),  # type: ignore[arg-type]
    (lambda: deepnvme.load(3), "takes a path"),  # type: ignore[arg-type]
    (lambda: deepnvme.load("x.pt", engine=3), r"deepnvme\.Engine"),  # type: ignore[arg-type]
    (lambda: deepnvme.load("x.pt", into=torch.nn.Linear(2, 2)), r"model\.state_dict\(\)"),
    (lambda: deepnvme.stream(3, memory="1GB"), r"a folder, or a torch\.nn\.Module"),  # type: ignore[arg-type]
    (lambda: deepnvme.stream("x", memory="1GB", dtype=16), "such as torch.float32"),  # type: ignore[arg-type]
    (lambda: deepnvme.offload_parameters(3, memory="1GB", swap_dir="."), r"torch\.nn\.Module"),  # type: ignore[arg-type]
    (lambda: deepnvme.Swapper(3, memory="1MB"), "a folder, or a list of folders"),  # type: ignore[arg-type]
    (lambda: deepnvme.Swapper([3], memory="1MB"), "each folder must be"),  # type: ignore[list-item]
    (lambda: deepnvme.Swapper(".", memory="1MB").create("x", [2], "float32"), r"pass torch\.float32"),  # type: ignore[arg-type]
    (lambda: deepnvme.open("x", engine=3), r"deepnvme\.Engine"),  # type: ignore[call-overload]
]


@pytest.mark.parametrize(("call", "text"), WRONG)
def test_wrong_types_are_refused_where_they_are_given(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        call()


def test_sizes_as_text_work_in_a_checkpointer() -> None:
    with deepnvme.Checkpointer("run", memory="1GB", async_=True) as checkpointer:
        assert checkpointer.save(1, {"a": torch.ones(3)})


def test_stream_explains_names_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match="hf download org/name") as caught:
        deepnvme.stream("org/name", memory="1GB", cache_dir=tmp_path)
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(FileNotFoundError, match=r"/org/name"):
        deepnvme.stream("/org/name", memory="1GB")


def test_stream_finds_a_model_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from small_llama import small_llama

    cached = tmp_path / "models--org--name"
    commit = "0" * 40
    small_llama(vocab_size=64).save_pretrained(cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    model = deepnvme.stream("org/name", memory="8MB", cache_dir=tmp_path)
    assert model(torch.ones(1, 2, dtype=torch.long)).logits.shape == (1, 2, 64)
    model.streaming.close()
    remedy = rf"no revision 'v2' of a model .*hf download org/name --revision v2 --cache-dir {tmp_path}`"
    with pytest.raises(FileNotFoundError, match=remedy):
        deepnvme.stream("org/name", memory="8MB", cache_dir=tmp_path, revision="v2")


def test_stream_names_a_missing_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FileNotFoundError, match="pip install huggingface_hub"):
        deepnvme.stream("org/name", memory="1GB")


def test_streaming_and_offload_close_at_the_end_of_a_block(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    deepnvme.save(model.state_dict(), "w.safetensors")
    streamed = deepnvme.stream(model, weights="w.safetensors", memory="4MB")
    with streamed.streaming as streaming:
        assert repr(streaming).startswith("<deepnvme.Streaming of Sequential, model_bytes=33280, memory_bytes=4000000")
    assert streaming.is_closed
    assert repr(streaming).endswith(", closed>")
    with pytest.raises(deepnvme.errors.ClosedError), streaming:
        pass
    with deepnvme.offload_parameters(model, memory="1MB", swap_dir=tmp_path) as offloading:
        assert (
            repr(offloading)
            == "<deepnvme.ParameterOffload of a Sequential, parameter_bytes=33280, memory_bytes=1000000>"
        )
    assert offloading.is_closed
    assert "closed" in repr(offloading)
    with pytest.raises(deepnvme.errors.ClosedError), offloading:
        pass


def test_public_objects_are_pickled_by_their_public_name() -> None:
    with deepnvme.Checkpointer("run") as checkpointer:
        checkpointer.save(1, {"a": torch.ones(3)})
        for thing in (
            checkpointer.latest(),
            checkpointer.stats(),
            deepnvme.report,
            deepnvme.save,
            deepnvme.optim.AdamW,
        ):
            pickled = pickle.dumps(thing)
            assert b"deepnvme._" not in pickled
            assert pickle.loads(pickled) == thing


def test_modules_resolve_as_attributes() -> None:
    code = (
        "import sys, deepnvme\n"
        "assert 'deepnvme.integrations' not in sys.modules\n"
        "assert 'weights' in dir(deepnvme.integrations)\n"
        "assert 'torch' not in sys.modules\n"
        "assert deepnvme.integrations.weights.iterate_weights\n"
        "assert deepnvme.integrations.dcp.DeepnvmeReader\n"
        "assert not hasattr(deepnvme.integrations, 'nothing')\n"
        "assert deepnvme.deepspeed.install\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_array_of_numpy_is_named_once_with_its_remedy() -> None:
    numpy = pytest.importorskip("numpy")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        deepnvme.save({"a": numpy.ones(3), "deep": [numpy.float64(2)], "b": numpy.ones(3)}, "state.pt")
    (warning,) = said
    text = str(warning.message)
    assert "['a'] is a numpy array: save torch.from_numpy(array); ['deep'][0] is a numpy float64: save value" in text
    assert text.count("torch.from_numpy") == 2
    assert "_reconstruct" not in text
    assert "numpy.dtype" not in text


@pytest.mark.parametrize("module", [torch.nn.Linear(2, 3), torch.nn.Sequential(torch.nn.Linear(2, 3))])
def test_a_pickled_module_is_answered_with_its_state_dict(module: Any) -> None:
    torch.save(module, "model.pt")
    with pytest.raises(deepnvme.errors.UnsafeFileError, match=r"pickled module.*save its state_dict\(\)") as error:
        deepnvme.load("model.pt")
    assert "add_safe_globals" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "named", "remedy"),
    [
        (("cpu",), {}, r"device='cpu', or torch.load's name map_location='cpu'"),
        ((torch.device("cpu"),), {}, r"device=.*map_location="),
        ((), {"dtype": torch.float16}, r"into=.*cast=True"),
        ((), {"strict": False}, r"into="),
        ((), {"nonsense": 1}, r"unexpected keyword argument 'nonsense'$"),
    ],
)
def test_arguments_that_load_lacks_name_those_that_it_has(
    arguments: tuple[Any, ...], named: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(TypeError, match=remedy):
        deepnvme.load("model.pt", *arguments, **named)


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("~/model.pt", r"os\.path\.expanduser"),
        ("org/model", "hf download org/model"),
        ("org/model.pt", "check the path, and that its folder exists: 'org/model.pt'$"),
    ],
)
def test_a_path_of_another_kind_is_recognised(path: str, remedy: str) -> None:
    with pytest.raises(FileNotFoundError, match=remedy):
        deepnvme.load(path)
