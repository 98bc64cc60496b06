"""vLLM on the CPU, with embedding tables that stay in the checkpoint.

Gemma runs in vLLM's engine. Its class of Gemma 3n for text ignores the per-layer embeddings, so they are looked up
as well. Qwen4, DeepSeek-V4.1 and LongCat need kernels of a GPU, so their embedding classes are built alone: those of
vLLM, in groups of one or two processes over gloo. ``ParallelEngramEmbedding`` looks up with a kernel of Triton, so it
is compared with that kernel's formula. The number of a GPU's multiprocessors, which it asks for, is made up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from . import models

models.skip_without("vllm")

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# The engine in this process, so that its tables can be found. In float32, as in test_vllm.py.
GENERATE = (
    models.LOG_PROBABILITIES
    + """
    import os, sys
    import torch
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    def look_up(module):
        # vLLM's class for Gemma 3n of text has the table, but does not use it. The one for images and sound does.
        model = module.model
        rows = getattr(model, "get_per_layer_input_embeddings", None) or model.get_per_layer_inputs
        return rows(torch.arange(300)).contiguous().view(torch.uint8).flatten().tolist()

    if __name__ == "__main__":
        fixed = dict(skip_tokenizer_init=True, enforce_eager=True, max_model_len=128, dtype="float32")
        model = LLM(model="model", **fixed, **{settings})
        prompts = [{{"prompt_token_ids": [1, 5, 9, 11]}}, {{"prompt_token_ids": [7, 3, 310]}}]
        wanted = SamplingParams(max_tokens=12, temperature=0, detokenize=False, logprobs=3)
        found = log_probabilities(model.generate(prompts, wanted))
        found.append(model.apply_model(look_up))
        filler = sys.modules.get("deepnvme.integrations._vllm.fill_rows")
        tables = [] if filler is None else list(filler._tables.values())
        answer([found, [[each.name, list(each.store().shape), each.store().stats().rows_read] for each in tables]])
"""
)

TABLES = {"DEEPNVME_TABLES": "embed_tokens_per_layer", "DEEPNVME_TABLES_MEMORY": "2MB"}


@pytest.mark.parametrize(
    ("write", "settings", "rows"),
    [
        (models.write_gemma3n, {"load_format": "safetensors"}, 300),
        (models.write_gemma4, {"load_format": "deepnvme"}, 320),
    ],
)
def test_gemma_generates_the_same(
    tmp_path: Path, server: Callable[..., Any], write: Any, settings: dict[str, str], rows: int
) -> None:
    write(tmp_path / "model")
    stock, none = server(GENERATE.format(settings=settings))
    assert none == []
    *generated, ((*rows_of_ids,),) = stock
    assert len({token for tokens, _ in generated for token in tokens}) > 4
    assert len(set(rows_of_ids)) > 100
    ours, tables = server(GENERATE.format(settings=settings), **TABLES)
    assert ours == stock
    ((name, shape, read),) = tables
    assert "per_layer" in name
    assert shape == [rows, 64]
    assert read > 4


# `tests` gets the rank, the number of ranks, and the answer to extend. It runs in each process of the group.
RANKS = (
    models.RANKS
    + """
    import os
    import torch
    from safetensors.torch import save_file

    def bits(tensor):
        return tensor.contiguous().view(torch.uint8)

    def run(rank, world):
        # Apart, or vLLM would use a kernel over shared memory, which cannot add bytes.
        os.environ["VLLM_DIST_IDENT"] = f"rank{rank}"
        from vllm.config import EngramConfig, VllmConfig, set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel
        config = VllmConfig()
        config.parallel_config.tensor_parallel_size = world
        config.engram_config = EngramConfig(cpu_offload=False)
        with set_current_vllm_config(config):
            init_distributed_environment(world, rank, f"file://{os.getcwd()}/group{world}", rank, "gloo")
            initialize_model_parallel(world)
            found = []
            tests(rank, world, found)
            answer_all(rank, world, found)

    def weights(name):
        from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator
        return safetensors_weights_iterator([name], False)

    def register():
        os.environ["DEEPNVME_TABLES"], os.environ["DEEPNVME_TABLES_MEMORY"] = "all", "2MB"
        from deepnvme.integrations import vllm
        vllm.register()
        vllm.register()
    TESTS

    if __name__ == "__main__":
        torch.multiprocessing.spawn(run, (NUMBER,), nprocs=NUMBER)
"""
)


def program(tests: str, world: int) -> str:
    """Run functions in each process of a group."""
    return RANKS.replace("TESTS", tests.strip()).replace("NUMBER", str(world))


QWEN = """
    def make(dtype):
        from transformers import Qwen4ExpTextConfig
        from vllm.models.qwen4_exp.nvidia.ngram_embedding import Qwen4ExpNGramEmbedding
        sizes = dict(ngram_size=3, heads_per_ngram=2, ngram_vocab_size_base=500, vocab_size=300, eos_token_id=2)
        parts = dict(make_ngram_vocab_size_divisible_by=128, split_ngram_parts=4, ple_embedding_dtype=dtype)
        config = Qwen4ExpTextConfig(**sizes, **parts)
        prefix = "model.layers.0.ple.ple_embedding"
        return Qwen4ExpNGramEmbedding(
            config, 160, 0, 64, data_parallel_rank=0, prefix=prefix, params_dtype=torch.bfloat16)

    def look_up(module, dtype):
        module.load_weights(weights(f"{dtype}.safetensors"))
        ids = torch.randint(0, 300, (50,), generator=torch.Generator().manual_seed(5))
        starts, context = torch.tensor([0, 20, 50]), torch.full((2, 2), 2)
        module.start_prefetch(ids, starts, context)
        rows = module(None, ids, starts, context)
        return rows, module.ngram_embedding.dequantize(rows, torch.bfloat16)

    def tests(rank, world, found):
        stock = {}
        for dtype in (None, "float8_e4m3fn"):
            module = make(dtype)
            rows = module.ngram_embedding.org_vocab_size
            table = torch.randn(rows, 40, generator=torch.Generator().manual_seed(3))
            table = table.to(torch.float8_e4m3fn if dtype else torch.bfloat16)
            state = {f"ngram_embedding.shard_{i}.weight": part.clone()
                     for i, part in enumerate(table.split(-(-rows // 4)))}
            if dtype:
                state["ngram_embedding.weight_scale"] = torch.tensor(0.37)
            write(rank, f"{dtype}.safetensors", state)
            stock[dtype] = look_up(module, dtype)
        register()
        for dtype, wanted in stock.items():
            module = make(dtype)
            ours = look_up(module, dtype)
            read = module.ngram_embedding.weight.table.store().stats().rows_read
            same = [torch.equal(bits(left), bits(right)) for left, right in zip(ours, wanted)]
            found.append([type(module.ngram_embedding).__name__, same, bool(ours[1].any()), read])
        os.environ["DEEPNVME_TABLES"] = "1GB"
        found.append(type(make(None).ngram_embedding).__name__)
"""


@pytest.mark.parametrize("world", [1, 2])
def test_qwen4(server: Callable[..., Any], world: int) -> None:
    """``Qwen4ExpNGramEmbedding`` with its embedding, in bfloat16 and in float8 with its scale."""
    ranks = server(program(QWEN, world))
    assert len(ranks) == world
    for *tables, small in ranks:
        assert [table[:3] for table in tables] == [["DiskPLEDeviceEmbedding", [True, True], True]] * 2
        assert all(table[3] > 50 for table in tables)
        assert small == "Qwen4ExpPLEDeviceEmbedding"


LONGCAT = """
    def make():
        from transformers import LongcatFlashConfig
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
        from vllm.model_executor.models.longcat_flash_ngram import NgramEmbedding
        config = LongcatFlashConfig(vocab_size=300, hidden_size=64, pad_token_id=0, eos_token_id=2)
        config.ngram_vocab_size_ratio, config.emb_split_num, config.emb_neighbor_num = 4, 2, 3
        config.dtype = torch.bfloat16
        words = VocabParallelEmbedding(300, 64, params_dtype=torch.bfloat16)
        words.weight.data.copy_((torch.arange(words.weight.numel()) % 7).view_as(words.weight))
        return NgramEmbedding(config, words)

    def look_up(module):
        for name, tensor in weights("model.safetensors"):
            module.load_weight(name, tensor)
        ids = torch.randint(0, 300, (20,), generator=torch.Generator().manual_seed(5))
        bounds = zip(module._offsets, module._offsets[1:])
        return module.embed_batched(ids, torch.stack([torch.linspace(lo, hi - 1, 20).long() for lo, hi in bounds], 1))

    def tests(rank, world, found):
        module = make()
        torch.manual_seed(4)
        state = {}
        for index, size in enumerate(module._sizes):
            state[f"ngram_embeddings.embedders.{index}.weight"] = torch.randn(size, module.oe_dim).bfloat16()
            state[f"ngram_embeddings.post_projs.{index}.weight"] = torch.randn(64, module.oe_dim).bfloat16()
        write(rank, "model.safetensors", state)
        wanted = look_up(module)
        register()
        module = make()
        ours = look_up(module)
        kinds = [type(each).__name__ for each in (module.word_embeddings, module.oe_embedder)]
        found.extend([kinds, torch.equal(bits(ours), bits(wanted)), bool(ours.any())])
"""


@pytest.mark.parametrize("world", [1, 2])
def test_longcat(server: Callable[..., Any], world: int) -> None:
    """``NgramEmbedding`` with ids as from its kernel, which runs on GPUs only."""
    ranks = server(program(LONGCAT, world))
    assert ranks == [[["VocabParallelEmbedding", "DiskVocabParallelEmbedding"], True, True]] * world


ENGRAM = """
    def tests(rank, world, found):
        from types import SimpleNamespace
        register()
        torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=4)
        torch.accelerator.current_device_index = lambda: 0
        from vllm.models.deepseek_v41.common.engram import Engram, EngramLayout
        config = SimpleNamespace(
            engram_layer_ids=[1, 3], engram_num_embeddings=[0, 0], engram_max_ngram_size=3, engram_n_heads=2,
            engram_head_dim=64, engram_compressed_vocab_size=100, engram_pad_token_id=0, engram_vocab_size=200)
        primes = EngramLayout(config).primes
        config.engram_num_embeddings = [sum(map(sum, layer)) for layer in primes]
        layout = EngramLayout(config)
        total, sizes = layout.num_embeddings[1], [size for order in layout.primes[1] for size in order]
        torch.manual_seed(6)
        rows = torch.randn(total, 64).to(torch.float8_e4m3fn)
        scales = torch.randint(110, 135, (total, 2), dtype=torch.uint8).view(torch.float8_e8m0fnu)
        write(rank, "model.safetensors", {"weight": rows, "weight_scale_inv": scales})
        embedding = Engram._create_embedding(SimpleNamespace(), layout, 1)
        for name, tensor in weights("model.safetensors"):
            parameter = getattr(embedding, name)
            parameter.weight_loader(parameter, tensor)
        starts = torch.tensor([sum(sizes[:head]) for head in range(4)])
        ids = starts + torch.randint(0, min(sizes), (20, 4))
        wanted = rows[ids].float().unflatten(-1, (2, 32)) * scales[ids].float().unsqueeze(-1)
        wanted = wanted.flatten(-2).bfloat16()
        same = [torch.equal(bits(embedding(ids)), bits(wanted))]
        # As Engram does on a GPU: it starts the look-up, and waits in the layer.
        heads = embedding.part_n_hash_cols
        staged = torch.full((20, heads, 64), 7.0, dtype=torch.bfloat16)
        embedding.lookup(ids, staged, background=True)
        module = SimpleNamespace(embed_tokens=embedding, _prefetch_done=None, staged_rows=staged)
        ready = Engram._ready_rows(module, 20)
        first = embedding.head_start
        same.append(torch.equal(bits(ready), bits(wanted[:, first : first + heads])))
        try:
            embedding.lookup(ids, torch.empty(20, heads * 66, dtype=torch.uint8))
        except Exception as error:
            refused = str(error)
        os.environ["DEEPNVME_TABLES"] = "oe_embedder"
        try:
            # vLLM's own, whose dp_shared_memory this configuration lacks.
            stock = type(Engram._create_embedding(SimpleNamespace(), layout, 1)).__name__
        except Exception as error:
            stock = str(error)
        found.extend([type(embedding).__name__, same, bool(wanted.any()), refused, stock])
"""


@pytest.mark.parametrize("world", [1, 2])
def test_engram(server: Callable[..., Any], world: int) -> None:
    """``ParallelEngramEmbedding`` and ``Engram._create_embedding``, ``_ready_rows``."""
    ranks = server(program(ENGRAM, world))
    assert len(ranks) == world
    for name, same, has_numbers, refused, stock in ranks:
        assert name == "DiskEngramEmbedding"
        assert same == [True, True]
        assert has_numbers
        assert "packed rows cannot be read from disk" in refused
        assert stock == "ParallelEngramEmbedding"


REFUSED = """
    def tests(rank, world, found):
        from types import SimpleNamespace
        from vllm.config import get_current_vllm_config
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
        register()

        def said(call):
            try:
                return str(call())
            except Exception as error:
                return f"{type(error).__name__}: {error}"

        def make(name="embed_tokens_per_layer", **settings):
            return VocabParallelEmbedding(300, 64, params_dtype=torch.bfloat16, prefix=f"model.{name}", **settings)

        config = get_current_vllm_config()
        config.lora_config = SimpleNamespace()
        found.append(said(make))
        config.lora_config, config.model_config = None, SimpleNamespace(enable_sleep_mode=True)
        found.append(said(make))
        config.model_config = None
        found.append(said(lambda: make(org_num_embeddings=290)))
        embedding, head = make(), ParallelLMHead(300, 64, params_dtype=torch.bfloat16)
        tied = head.tie_weights(embedding)
        found.append(said(lambda: torch.nn.functional.linear(torch.ones(1, 64).bfloat16(), tied.weight)))
        found.append(said(lambda: embedding.weight_loader(embedding.weight, torch.ones(300, 64).bfloat16())))
        found.append(said(lambda: embedding(torch.tensor([1]))))
        found.append(type(make("embed_tokens")).__name__)
        found.append(type(make()).__name__)
"""


def test_uses_that_are_refused(server: Callable[..., Any]) -> None:
    (told,) = server(program(REFUSED, 1))
    assert "cannot be combined with LoRA (--enable-lora)" in told[0]
    assert "cannot be combined with sleep mode (--enable-sleep-mode)" in told[1]
    assert "added rows" in told[2]
    assert "An embedding that is tied to the LM head" in told[3]
    assert "--load-format deepnvme" in told[4]
    assert "row 0 of 300 was not loaded" in told[5]
    assert told[6:] == ["VocabParallelEmbedding", "DiskVocabParallelEmbedding"]
