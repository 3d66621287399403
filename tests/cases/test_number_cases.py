"""K04, K13, N01, P08, Q04, S01, S03, S06 and layers without RoPE: numbers of whole models, against transformers."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import greedy_of, make_engine, run_together
from gguf import GGMLQuantizationType as Q
from torch import Tensor
from transformers import SmolLM3Config, SmolLM3ForCausalLM

from bytefloor.engine.cache import CachePlan
from bytefloor.engine.reference import Precision, ReferenceExecutor
from bytefloor.engine.request import Request
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.engine.score import check_finite, check_not_uniform, score_chunks
from bytefloor.errors import BytefloorError, NumericalError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.families import load_model
from parity import assert_close, logits_of
from tiny import TinyModel, build_tiny, prompt_ids, reference_logits, seeded, token_list, write_json, write_tokenizer
from tiny_gguf import write_tiny_gguf, write_tiny_quant_gguf
from tiny_mlx import write_tiny_mlx

GREEDY = SamplingParams(temperature=0)
HALF_MAX = 65504.0
N_VOCABULARY = 283
PADDING = range(len(token_list()), N_VOCABULARY)
"""Rows of the tiny embeddings that no token owns."""


def executor_of(path: Path, **plan: int) -> ReferenceExecutor:
    model = load_model(open_checkpoint(path))
    step = build_step(model.config, model.weights, Rounding())
    executor = ReferenceExecutor(step, CachePlan(**{"capacity": 640, "chunk": 64, **plan}))
    executor.poison()
    return executor


def request_of(prompt: list[int], n: int | None, **sampling: Any) -> Request:
    return Request(tuple(prompt), max_tokens=n, sampling=replace(GREEDY, **sampling), ignores_end=True)


# --- range (N01)


@pytest.mark.parametrize("container", ["safetensors", "gguf"])
def test_a_residual_beyond_float16_stays_right(container: str, tmp_path: Path) -> None:
    """N01: Gemma 3 shapes whose residual passes 65504; logits and greedy answer equal the float32 reference."""
    model, prompt = build_tiny("gemma3-overflow", tmp_path), prompt_ids()
    path = model.directory if container == "safetensors" else write_tiny_gguf(model, tmp_path / "m.gguf")
    largest: dict[str, float] = {}

    def observe(call: Any, result: torch.Tensor) -> None:
        if call.op.name == "add":
            largest[call.part] = max(largest.get(call.part, 0.0), result.abs().max().item())

    executor = executor_of(path)
    logits = torch.cat(list(score_chunks(executor, prompt, 64, observe)))
    assert max(largest.values()) > HALF_MAX
    assert largest["layers.6.mlp"] > HALF_MAX
    assert_close(logits, reference_logits(model, prompt))
    expected = greedy_of(model.reference, prompt, 16, PADDING)
    assert run_together(make_engine(path), [request_of(prompt, 16)])[0][0] == expected


def test_a_residual_beyond_float16_stays_finite_with_bf16_weights(tmp_path: Path) -> None:
    """N01: bfloat16 is the narrowest that holds it; the residual itself stays float32."""
    model, prompt = build_tiny("gemma3-overflow", tmp_path), prompt_ids()
    engine = make_engine(model.directory, Precision(weights=torch.bfloat16))
    ((ids, finish),) = run_together(engine, [request_of(prompt, 16)])
    assert finish.reason == "length"
    assert len(set(ids)) > 1


# --- chunks (K04, S03)


@pytest.mark.parametrize("name", ["gemma4-unified", "qwen3"])
def test_no_chunk_size_changes_a_long_prompt(name: str, tmp_path: Path) -> None:
    """K04, S03: 530 tokens on pages of 64, cut at and beside every power of two, against one pass of transformers."""
    model, ids = build_tiny(name, tmp_path), prompt_ids(530)
    expected = reference_logits(model, ids)
    for chunk in (512, 31, 32, 33, 63, 64, 65, 127, 128, 129):
        executor = executor_of(model.directory, chunk=chunk)
        found = torch.cat(list(score_chunks(executor, ids, chunk)))
        assert_close(found, expected)
        best = expected.topk(2).values
        is_clear = best[:, 0] - best[:, 1] > 1e-3
        assert torch.equal(found.argmax(-1)[is_clear], expected.argmax(-1)[is_clear])
    short = ids[:140]
    for chunk in (1, 2, 3, 7, 8, 9, 15, 16, 17):
        executor = executor_of(model.directory, chunk=chunk)
        assert_close(torch.cat(list(score_chunks(executor, short, chunk))), expected[:140])


# --- ends (S01)


@pytest.mark.parametrize("name", ["gemma3", "gemma4-e"])
def test_generating_to_the_end_of_the_context_shifts_nothing(name: str, tmp_path: Path) -> None:
    """S01: sliding layers, a context many windows long; every token is transformers' own, and then it is `length`."""
    model, prompt = build_tiny(name, tmp_path), prompt_ids(10)
    ((ids, finish),) = run_together(make_engine(model.directory, capacity=64), [request_of(prompt, None)])
    assert (finish.reason, finish.detail) == ("length", "context of 64 is full")
    assert ids == greedy_of(model.reference, prompt, 54, PADDING)


def test_each_of_several_end_tokens_ends_an_answer(tmp_path: Path) -> None:
    """T07: those of generation_config.json and of config.json beside the tokenizer's own."""
    directory = tmp_path / "copy"
    shutil.copytree(build_tiny("qwen3", tmp_path).directory, directory)
    write_json(directory / "generation_config.json", {"eos_token_id": [40, 41]})
    config_without(directory, eos_token_id=[42])
    engine = make_engine(directory)
    assert engine.tokenizer.end_ids == {1, 40, 41, 42}
    for end in (1, 40, 41, 42):
        request = Request(tuple(prompt_ids(9)), sampling=replace(GREEDY, logit_bias={end: 100.0}))
        ((ids, finish),) = run_together(engine, [request])
        assert (ids, finish.reason, finish.detail) == ([end], "stop", "end of turn")


# --- company (P08, S06, S07)


@pytest.mark.parametrize("name", ["gemma4-e", "gemma3"])
def test_sixteen_prompts_together_answer_as_alone(name: str, tmp_path: Path) -> None:
    """S06, S07, P08: seeded ones keep their text, whether a batch mate brought a seed, none, or no randomness."""
    directory = build_tiny(name, tmp_path).directory
    sampling = [
        SamplingParams(temperature=1.0, top_k=0, seed=0),
        SamplingParams(temperature=1.2, top_k=0),
        GREEDY,
        SamplingParams(temperature=1.0, top_k=0, seed=7),
    ]
    requests = [
        Request(tuple(prompt_ids(3 + 5 * i, seed=i)), max_tokens=10, sampling=sampling[i % 4], ignores_end=True)
        for i in range(16)
    ]
    together = run_together(make_engine(directory, n_sequences=16, chunk=32), requests)
    other_slots = run_together(make_engine(directory, n_sequences=5, chunk=16), requests[::-1])[::-1]
    alone = make_engine(directory, n_snapshots=0)
    for request, (ids, finish), (moved, _) in zip(requests, together, other_slots, strict=True):
        replay = replace(request, sampling=replace(request.sampling, seed=finish.seed))
        assert run_together(alone, [replay])[0][0] == ids
        if request.sampling.seed is not None or request.sampling.is_greedy:
            assert moved == ids
    assert together[0][1].seed == 0
    assert len({tuple(ids) for ids, _ in together}) > 8


# --- what is never sampled (R12, Gemma 4's suppress_tokens)


@pytest.mark.parametrize("source", ["generation_config.json", "gguf"])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.5, top_k=0, seed=1)], ids=["T=0", "T=1.5"])
def test_suppressed_tokens_are_never_sampled_not_even_greedily(
    source: str, sampling: SamplingParams, tmp_path: Path
) -> None:
    """suppress_tokens are -inf before any sampling: the likeliest ones are suppressed, and the next likeliest taken."""
    model, prompt = build_tiny("gemma4-unified", tmp_path / "model"), prompt_ids(9)
    best = [i for i in reference_logits(model, prompt)[-1].argsort(descending=True).tolist() if i not in PADDING]
    suppressed = sorted(best[:2])
    if source == "gguf":
        extra = {"tokenizer.ggml.suppress_tokens": suppressed}
        path = write_tiny_gguf(model, tmp_path / "m.gguf", extra=extra)
    else:
        path = tmp_path / "copy"
        shutil.copytree(model.directory, path)
        write_json(path / "generation_config.json", {"eos_token_id": 1, "suppress_tokens": suppressed})
    assert make_engine(path).tokenizer.suppressed_ids >= set(suppressed)
    request = Request(tuple(prompt), max_tokens=100, sampling=sampling, ignores_end=True)
    ((ids, _),) = run_together(make_engine(path), [request])
    assert not {*suppressed, *PADDING} & set(ids)
    if sampling.is_greedy:
        assert ids[0] == best[2]
        assert ids[:12] == greedy_of(model.reference, prompt, 12, {*suppressed, *PADDING})
    # Without the setting, they are what the model says.
    ((free, _),) = run_together(make_engine(model.directory), [request])
    assert suppressed[0] in free or suppressed[1] in free


# --- embeddings (K13)


MLX_EMBEDDINGS = [{"bits": 4, "group_size": 64}, {"bits": 8, "group_size": 32}]


def assert_says_something(logits: torch.Tensor) -> None:
    """-ln(vocabulary) for every token is what an embedding that was never filled gives."""
    n = logits.shape[-1]
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    assert entropy.max().item() < math.log(n) - 0.1


@pytest.mark.parametrize(
    "kind", [Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.Q8_0, Q.Q5_0, Q.MXFP4, Q.Q2_K, Q.IQ4_XS], ids=lambda q: q.name
)
def test_a_quantised_embedding_is_looked_up_and_is_the_head(kind: Q, tmp_path: Path) -> None:
    """K13: tied, in each type that files use for it."""
    path = tmp_path / "q" / "m.gguf"
    oracle = write_tiny_quant_gguf(build_tiny("qwen3-wide", tmp_path / "hf"), path, {"token_embd*": kind})
    ids = prompt_ids()
    logits = logits_of(path, ids, 64)
    assert_says_something(logits)
    assert_close(logits, reference_logits(oracle, ids))
    weights = load_model(open_checkpoint(path)).weights
    assert weights.embedding.stored.format_name == kind.name
    assert weights.head.stored is weights.embedding.stored


@pytest.mark.parametrize("setting", MLX_EMBEDDINGS, ids=["affine-4", "affine-8"])
@pytest.mark.parametrize("name", ["qwen3-wide", "qwen3-untied"])
def test_an_affine_embedding_is_looked_up(name: str, setting: dict[str, int], tmp_path: Path) -> None:
    """K13: tied and not; only the embedding is quantised, so nothing else can make up for it."""
    overrides = {"embed_tokens": setting, "*": False}
    oracle = write_tiny_mlx(build_tiny(name, tmp_path / "hf"), tmp_path / "mlx", setting, overrides)
    ids = prompt_ids()
    logits = logits_of(tmp_path / "mlx", ids, 64)
    assert_says_something(logits)
    assert_close(logits, reference_logits(oracle, ids))
    stored = load_model(open_checkpoint(tmp_path / "mlx")).weights.embedding.stored
    assert stored.format_name == f"affine-{setting['bits']}b-g{setting['group_size']}"


def token_nll(executor: ReferenceExecutor, ids: Sequence[int], chunk: int) -> Tensor:
    """Negative log-likelihood, nats, of ids[1:], float64 [T - 1].

    NumericalError where the logits are not finite, or say nothing.
    """
    parts = []
    start = 0
    for logits in score_chunks(executor, ids, chunk):
        check_finite(logits, start)
        if start == 0:
            check_not_uniform(logits)
        targets = torch.tensor(ids[start + 1 : start + 1 + logits.shape[0]], device=logits.device)
        log_probabilities = logits[: len(targets)].double().log_softmax(-1)
        parts.append(-log_probabilities.gather(1, targets[:, None])[:, 0])
        start += logits.shape[0]
    return torch.cat(parts).cpu()


def test_a_model_that_says_nothing_is_refused(tmp_path: Path) -> None:
    """K13: an embedding of zeros gives every token the same probability; the first chunk that is scored tells."""
    model = build_tiny("qwen3", tmp_path / "model")
    path = write_tiny_gguf(zeroed(model), tmp_path / "m.gguf")
    with pytest.raises(NumericalError, match=r"position 0 give all 283 tokens the same probability"):
        token_nll(executor_of(path), prompt_ids(), 16)


def zeroed(model: TinyModel) -> TinyModel:
    with torch.no_grad():
        model.reference.get_input_embeddings().weight.zero_()
    return model


# --- perplexity (Q04)


def test_a_likelihood_that_is_no_number_is_an_error(tmp_path: Path) -> None:
    """Q04: NaN = fail."""
    executor = executor_of(build_tiny("qwen3", tmp_path).directory)
    real_run = executor.run
    n_runs = iter(range(9))

    def break_second(batch: Any) -> torch.Tensor:
        logits = real_run(batch).clone()
        if next(n_runs) == 1:
            logits[5, 7] = float("nan")
        return logits

    executor.run = break_second  # type: ignore[method-assign]
    with pytest.raises(NumericalError, match="position 21 hold NaN"):
        token_nll(executor, prompt_ids(), 16)


def test_likelihoods_are_those_of_transformers(tmp_path: Path) -> None:
    """Q04: in nats, for every token but the first, however the text is cut."""
    model, ids = build_tiny("gemma3", tmp_path), prompt_ids()
    logits = reference_logits(model, ids).double()[:-1]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
    for chunk in (64, 40, 39, 7, 1):
        found = token_nll(executor_of(model.directory, chunk=chunk), ids, chunk)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


# --- layers without RoPE


@torch.no_grad()
def build_smollm3(directory: Path, **more: Any) -> SmolLM3ForCausalLM:
    """A tiny random SmolLM3 and its directory; norms are neither 0 nor 1, attention far from uniform."""
    config = SmolLM3Config(
        vocab_size=N_VOCABULARY,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rms_norm_eps=1e-4,
        rope_parameters={"rope_type": "default", "rope_theta": 5e4},
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        **more,
    )
    config._attn_implementation = "eager"
    model = SmolLM3ForCausalLM(config).float().eval().requires_grad_(False)
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=seeded("smollm3", name))
        tensor.copy_(1 + 0.3 * noise if tensor.dim() == 1 else noise * 1.2 * tensor.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return model


@pytest.mark.parametrize("more", [
    {"no_rope_layers": [1, 1, 0, 1, 0, 1]}, {"no_rope_layer_interval": 2}, {"no_rope_layer_interval": 3},
], ids=["list", "every second", "every third"])  # fmt: skip
def test_smollm3_leaves_rope_out_of_the_layers_that_say_so(more: dict[str, Any], tmp_path: Path) -> None:
    """ "None" is a legal RoPE of a layer: tiny random SmolLM3 models against transformers."""
    model, ids = build_smollm3(tmp_path, **more), prompt_ids()
    if "no_rope_layer_interval" in more:
        config_without(tmp_path, "no_rope_layers")
    layers = load_model(open_checkpoint(tmp_path)).config.layers
    uses = model.config.no_rope_layers
    assert [layer.rope is not None for layer in layers] == [bool(x) for x in uses]
    assert 0 < sum(uses) < len(uses)
    expected = reference_logits(model, ids)
    for chunk in (64, 7, 1):
        assert_close(logits_of(tmp_path, ids, chunk), expected)
    # An engine that turned every layer would be seen.
    for layer in model.model.layers:
        layer.self_attn.use_rope = True
    assert (reference_logits(model, ids) - expected).abs().max() > 0.1


def config_without(directory: Path, *keys: str, **more: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in keys}
    write_json(directory / "config.json", {**kept, **more})


def test_smollm3_without_either_key_follows_its_familys_rule(tmp_path: Path) -> None:
    """Every fourth layer has no RoPE where config.json leaves both keys out."""
    model, ids = build_smollm3(tmp_path), prompt_ids()
    assert model.config.no_rope_layers == [1, 1, 1, 0, 1, 1]
    config_without(tmp_path, "no_rope_layers", "no_rope_layer_interval")
    assert_close(logits_of(tmp_path, ids, 64), reference_logits(model, ids))


@pytest.mark.parametrize("name", ["llama", "smollm3"])
def test_sliding_layers_of_a_family_that_has_none_are_refused(name: str, tmp_path: Path) -> None:
    """S02: a window is honoured or refused, never ignored."""
    build_smollm3(tmp_path)
    types = ["sliding_attention"] * 3 + ["full_attention"] * 3
    config_without(tmp_path, layer_types=types, sliding_window=8, model_type=name)
    with pytest.raises(BytefloorError, match="sliding"):
        load_model(open_checkpoint(tmp_path))
