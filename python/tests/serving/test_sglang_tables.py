"""SGLang on the CPU, with embedding tables that stay in the checkpoint.

SGLang's engine serves none of these models on the CPU: Gemma 4 needs other attention kernels, Gemma 3n's configuration
stops it, and the others need kernels of a GPU. So SGLang's own classes are built alone, in groups of one or two
processes over gloo: whole models for Gemma, of which the per-layer embeddings are computed, and embeddings for the
rest. Names of CPU kernels that SGLang looks up while it is imported are defined, and never called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from . import models

models.skip_without("sglang")

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# `tests` gets the rank, the number of ranks, and the answer to extend. It runs in each process of the group.
RANKS = (
    models.RANKS
    + """
    import importlib.util, os, pathlib, re
    import torch
    from types import SimpleNamespace
    from safetensors.torch import save_file

    def bits(tensor):
        return tensor.contiguous().view(torch.uint8)

    def run(rank, world):
        library = torch.library.Library("sgl_kernel", "FRAGMENT")
        sources = pathlib.Path(importlib.util.find_spec("sglang").origin).parent / "srt"
        pattern = re.compile(r"torch\\.ops\\.sgl_kernel\\.(\\w+)")
        texts = [path.read_text() for part in ("models", "layers") for path in (sources / part).rglob("*.py")]
        for name in {name for text in texts for name in pattern.findall(text)}:
            library.define(f"{name}(Tensor any) -> Tensor")
        from sglang.srt.distributed import parallel_state
        from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
        from sglang.srt.server_args import ServerArgs
        parallel_state.init_distributed_environment(
            world_size=world, rank=rank, local_rank=rank, backend="gloo",
            distributed_init_method=f"file://{os.getcwd()}/group{world}")
        arguments = ServerArgs(model_path="dummy", tp_size=world, device="cpu")
        publish(arguments, role="test", ranks=SpawnRanks(world_rank=rank))
        get_parallel().override_permanently(world_group=parallel_state._WORLD)
        parallel_state.initialize_model_parallel(backend="gloo")
        torch.set_default_dtype(torch.bfloat16)
        found = []
        tests(rank, world, found)
        answer_all(rank, world, found)

    def weights(*names):
        from sglang.srt.model_loader.weight_utils import safetensors_weights_iterator
        return safetensors_weights_iterator(list(names))

    def on_disk(make, tables="all", **settings):
        os.environ.update({"DEEPNVME_TABLES": tables, "DEEPNVME_TABLES_MEMORY": "2MB"})
        from deepnvme.integrations._sglang.tables import initialize_model
        return initialize_model(make, **settings)

    TESTS

    if __name__ == "__main__":
        torch.multiprocessing.spawn(run, (NUMBER,), nprocs=NUMBER)
"""
)
# A CUDA build of torch brings NCCL, which SGLang takes for a sign of GPUs.
ENVIRONMENT = {"SGLANG_NCCL_SO_PATH": "/nonexistent"}


@pytest.fixture
def ranks(server: Callable[..., Any]) -> Callable[[str, int], Any]:
    """Run functions in each process of a group."""

    def run(tests: str, world: int) -> Any:
        return server(RANKS.replace("TESTS", tests.strip()).replace("NUMBER", str(world)), **ENVIRONMENT)

    return run


GEMMA = """
    def tests(rank, world, found):
        from transformers import AutoConfig
        from sglang.srt.model_loader.weight_utils import buffered_multi_thread_safetensors_weights_iterator
        from sglang.srt.models.gemma3n_causal import Gemma3nForCausalLM
        from sglang.srt.models.gemma4_causal import Gemma4ForCausalLM
        for folder, kind in (("three", Gemma3nForCausalLM), ("four", Gemma4ForCausalLM)):
            config = AutoConfig.from_pretrained(folder)
            files = sorted(map(str, pathlib.Path(folder).glob("*.safetensors")))
            stock = kind(config)
            stock.load_weights(weights(*files))
            ours = on_disk(lambda: kind(config))
            ours.load_weights(buffered_multi_thread_safetensors_weights_iterator(files, max_workers=2))
            ids = torch.arange(300)
            rows, wanted = (model.model.get_per_layer_inputs(ids) for model in (ours, stock))
            kinds = {name: type(each).__name__ for name, each in ours.named_parameters() if "embed_tokens" in name}
            found.append([kinds, torch.equal(bits(rows), bits(wanted)), bool(rows.any())])
            small = on_disk(lambda: kind(config), tables="1GB")
            found.append(type(small.model.embed_tokens_per_layer.weight).__name__)
"""


def test_gemma(tmp_path: Path, ranks: Callable[[str, int], Any]) -> None:
    """Models of Gemma 3n and 4, loaded by SGLang's two iterators; their per-layer inputs."""
    models.write_gemma3n(tmp_path / "three")
    models.write_gemma4(tmp_path / "four")
    (told,) = ranks(GEMMA, 1)
    kinds = {"model.embed_tokens.weight": "Parameter", "model.embed_tokens_per_layer.weight": "RowWeight"}
    assert told == [[kinds, True, True], "Parameter"] * 2


QWEN = """
    def tests(rank, world, found):
        from sglang.srt.configs.qwen4_exp import Qwen4ExpTextConfig
        from sglang.srt.models.qwen4_exp import Qwen4ExpForConditionalGeneration, Qwen4ExpNGramEmbedding

        class Model(torch.nn.Module):
            load_weights = Qwen4ExpForConditionalGeneration.load_weights
            _load_qwen4_exp_ple_buffer = Qwen4ExpForConditionalGeneration._load_qwen4_exp_ple_buffer

            def __init__(self, config):
                super().__init__()
                self.config, self.ple = config, torch.nn.Module()
                self.ple.ple_embedding = Qwen4ExpNGramEmbedding(config, 160, 0, None, "model.ple.ple_embedding")

            def look_up(self, name):
                self.load_weights(weights(name))
                self.ple.ple_embedding.ngram_embedding.weight_scale.fill_(0.37)
                rows = self.ple.ple_embedding.ngram_embedding.org_vocab_size
                ids = torch.randint(0, rows, (30, 4), generator=torch.Generator().manual_seed(9))
                return self.ple.ple_embedding._embed_ngram_ids(ids, None, 30)

        for stored, dtype, offload in (
            (torch.bfloat16, None, False), (torch.float8_e4m3fn, "float8_e4m3fn", False),
            # SGLang finds out while it loads.
            (torch.float8_e4m3fn, None, False), (torch.float8_e4m3fn, "float8_e4m3fn", True)):
            sizes = dict(ngram_size=3, heads_per_ngram=2, ngram_vocab_size_base=500, vocab_size=300, eos_token_id=2)
            parts = dict(make_ngram_vocab_size_divisible_by=128, split_ngram_parts=4, ple_embedding_dtype=dtype)
            config = Qwen4ExpTextConfig(**sizes, **parts)
            config.ple_offload_embedding = False
            stock = Model(config)
            rows = stock.ple.ple_embedding.ngram_embedding.org_vocab_size
            table = torch.randn(rows, 40, generator=torch.Generator().manual_seed(3)).to(stored)
            prefix = "model.ple.ple_embedding.ngram_embedding"
            state = {f"{prefix}.shard_{i}.weight".removeprefix("model."): part.clone()
                     for i, part in enumerate(table.split(-(-rows // 4)))}
            name = f"{stored}{dtype}{offload}.safetensors"
            write(rank, name, state)
            wanted = stock.look_up(name)
            # In pinned memory, which needs a GPU, unless the table is on disk.
            config.ple_offload_embedding = offload
            model = on_disk(lambda: Model(config))
            ours = model.look_up(name)
            embedding = model.ple.ple_embedding.ngram_embedding
            kinds = [type(embedding).__name__, type(embedding.weight).__name__]
            found.append([kinds, torch.equal(bits(ours), bits(wanted)), bool(ours.any())])
"""


@pytest.mark.parametrize("world", [1, 2])
def test_qwen4(ranks: Callable[[str, int], Any], world: int) -> None:
    """``Qwen4ExpNGramEmbedding``, loaded by the model's own method; also as with ``--ple-offload-embedding``."""
    plain = [["VocabParallelEmbedding", "RowWeight"], True, True]
    host = [["DiskHostEmbedding", "RowWeight"], True, True]
    assert ranks(QWEN, world) == [[plain, plain, plain, host]] * world


ENGRAM = """
    def tests(rank, world, found):
        from sglang.srt.layers.engram import Engram, EngramEmbedding, EngramHasher, EngramLayout, FP8_BLOCK_SIZE
        config = SimpleNamespace(
            engram_layer_ids=[1, 3], engram_num_embeddings=[0, 0], engram_max_ngram_size=3, engram_n_heads=2,
            engram_head_dim=64, engram_vocab_size=200)
        bounds = EngramLayout.from_config(config).column_bounds
        config.engram_num_embeddings = [bounds(0)[-1], bounds(1)[-1]]
        layout = EngramLayout.from_config(config)
        total = layout.num_embeddings[1]
        torch.manual_seed(6)
        rows = torch.randn(total, 64, dtype=torch.float32).to(torch.float8_e4m3fn)
        scales = torch.randint(110, 135, (total, 64 // FP8_BLOCK_SIZE), dtype=torch.uint8).view(torch.float8_e8m0fnu)
        write(rank, "model.safetensors", {"weight": rows, "scale": scales})

        def make():
            return EngramEmbedding(total, 64, 3, column_bounds=layout.column_bounds(1))

        stock, ours = make(), on_disk(make)
        for module in (stock, ours):
            for name, tensor in weights("model.safetensors"):
                parameter = getattr(module, name)
                parameter.weight_loader(parameter, tensor)
            module.finish_load("layer 3")
        ids = torch.randint(0, total, (30, 4))
        same = torch.equal(bits(ours(ids)), bits(stock(ids)))
        found.extend([type(ours).__name__, same, bool(ours(ids).any())])

        # Ids of all layers are prefetched when they are computed.
        class Hasher(EngramHasher):
            def __init__(self):
                torch.nn.Module.__init__(self)

            def forward(self, ids):
                return ids

        class Layer(Engram):
            def __init__(self):
                torch.nn.Module.__init__(self)
                self.layer_hash_index, self.embed = 1, make()

        model = on_disk(lambda: torch.nn.ModuleList([Layer(), Hasher()]))
        embed = model[0].embed
        for name, tensor in weights("model.safetensors"):
            getattr(embed, name).weight_loader(getattr(embed, name), tensor)
        model[1](torch.stack([ids, ids], 1))
        for _ in range(1000):
            stats = embed.weight.table.store().stats()
            if stats.rows_prefetched:
                break
            import time
            time.sleep(0.01)
        found.append(stats.rows_prefetched > 0)
        os.environ["SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE"] = "1"
        try:
            on_disk(make)
        except Exception as error:
            found.append(str(error))
"""


@pytest.mark.parametrize("world", [1, 2])
def test_engram(ranks: Callable[[str, int], Any], world: int) -> None:
    """``EngramEmbedding``, compared with SGLang's own computation on the CPU."""
    told = ranks(ENGRAM, world)
    assert len(told) == world
    for name, *done, refused in told:
        assert name == "DiskEngramEmbedding"
        assert done == [True, True, True]
        assert "SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE keeps it in memory" in refused


LONGCAT = """
    def tests(rank, world, found):
        from sglang.srt.layers.n_gram_embedding import NgramEmbedding
        zeros = torch.zeros

        def make():
            # It asks for a GPU by name, for one small tensor.
            torch.zeros = lambda *sizes, device=None, **settings: zeros(*sizes, **settings)
            try:
                return NgramEmbedding(300, 64, 1200, 2, 3, 2)
            finally:
                torch.zeros = zeros

        stock = make()
        torch.manual_seed(4)
        state = {"model.embed_tokens.weight": torch.randn(300, 64)}
        for index in range(4):
            size = 1200 + 2 * index + 1
            state[f"model.ngram_embeddings.embedders.{index}.weight"] = torch.randn(size, 16)
            state[f"model.ngram_embeddings.post_projs.{index}.weight"] = torch.randn(64, 16)
        write(rank, "model.safetensors", state)
        batch = SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: False, is_decode=lambda: False))
        ngrams = torch.randint(0, 4800, (30, 4), dtype=torch.int32)
        ours, results = on_disk(make), []
        for module in (ours, stock):
            for name, tensor in weights("model.safetensors"):
                module.load_weight(module.word_embeder.weight, name, tensor)
            module.oe_n_gram_ids = ngrams
            results.append(module(torch.arange(30), batch))
        kinds = [type(each.weight).__name__ for each in (ours.word_embeder, ours.oe_embeder)]
        found.extend([kinds, torch.equal(*map(bits, results)), bool(results[0].any())])
"""


@pytest.mark.parametrize("world", [1, 2])
def test_longcat(ranks: Callable[[str, int], Any], world: int) -> None:
    """``NgramEmbedding`` with ids as from its kernel, which runs on GPUs only."""
    assert ranks(LONGCAT, world) == [[["Parameter", "RowWeight"], True, True]] * world


def test_the_hook_is_applied_where_the_environment_asks_for_it(server: Callable[..., Any]) -> None:
    program = """
        from sglang.srt.plugins import load_plugins
        load_plugins()
        from sglang.srt.plugins.hook_registry import HookRegistry
        from sglang.srt.model_loader import loader
        told = [hasattr(loader._initialize_model, "__wrapped__")]
        try:
            loader._initialize_model(None, None)
        except Exception as error:
            told.append(str(error))
        answer(told)
    """
    hooked, refused = server(program, DEEPNVME_TABLES="embeddings")
    assert hooked
    assert "DEEPNVME_TABLES is 'embeddings'; it must be all, a size" in refused
    assert server(program)[0] is False


REFUSED = """
    def tests(rank, world, found):
        from sglang.srt.server_args import ServerArgs
        from sglang.srt.runtime_context import SpawnRanks, publish
        arguments = ServerArgs(model_path="dummy", device="cpu")
        for option in ("enable_lora", "enable_memory_saver"):
            from sglang.srt import runtime_context
            from types import SimpleNamespace
            runtime_context.get_server_args = lambda: SimpleNamespace(**{option: True})
            try:
                on_disk(dict)
            except Exception as error:
                found.append(str(error))
"""


def test_settings_that_are_refused(ranks: Callable[[str, int], Any]) -> None:
    ((lora, saver),) = ranks(REFUSED, 1)
    assert "cannot be combined with --enable-lora" in lora
    assert "cannot be combined with --enable-memory-saver" in saver
