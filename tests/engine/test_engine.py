"""The loop on tiny random models: batches, chunks, prefixes, ends, and what goes wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bytefloor.engine.cache import CachePlan
from bytefloor.engine.engine import Engine
from bytefloor.engine.loading import open_tokenizer
from bytefloor.engine.reference import Precision, ReferenceExecutor
from bytefloor.engine.request import Finish, Request
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.engine.score import score_chunks
from bytefloor.errors import RequestError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.families import Model, load_model
from bytefloor.text.tokenizer import Tokenizer
from tiny import build_tiny, prompt_ids

WINDOW = 8
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module", params=["gemma4-unified", "gemma4-e", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Sliding and global layers; shared keys and values; and a model that has neither."""
    tiny = build_tiny(request.param, tmp_path_factory.mktemp("tiny"))
    return load_model(open_checkpoint(tiny.directory))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(open_checkpoint(build_tiny("qwen3", tmp_path_factory.mktemp("tiny")).directory))


def make_engine(model: Model, **plan: int) -> Engine:
    settings = {"capacity": 128, "chunk": 16, "n_sequences": 1, "page_size": 4} | plan
    step = build_step(model.config, model.weights, Rounding())
    executor = ReferenceExecutor(step, CachePlan(**settings))
    executor.poison()
    return Engine(executor, open_tokenizer(model.checkpoint), model.config.vocabulary_size)


def run(engine: Engine, request: Request) -> tuple[list[int], str, Finish]:
    ids, text, finish = [], "", None
    for delta in engine.generate(request):
        text += delta.text
        ids += [delta.sampled.id] if delta.sampled else []
        finish = delta.finish or finish
    assert finish is not None
    return ids, text, finish


def run_all(engine: Engine, requests: list[Request]) -> list[list[int]]:
    order = [engine.add(request) for request in requests]
    found: dict[int, list[int]] = {request_id: [] for request_id in order}
    while engine.has_work:
        for delta in engine.step():
            if delta.sampled:
                found[delta.request_id].append(delta.sampled.id)
    return [found[request_id] for request_id in order]


def unequal_requests(sampling: SamplingParams) -> list[Request]:
    return [
        Request(
            tuple(prompt_ids(length, seed=i)),
            max_tokens=12 + i,
            sampling=replace(sampling, seed=i if i % 2 else 0),
            ignores_end=True,
        )
        for i, length in enumerate((3, 40, 8, 7, 9, 17, 1, 25))
    ]


@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(temperature=1.0, top_k=0, top_p=1.0)], ids=["greedy", "sampled"]
)
def test_eight_unequal_sequences_equal_one_by_one(model: Model, sampling: SamplingParams) -> None:
    """S06, S07, S08, P08: no batch-mate changes a token, whether all run at once or some wait."""
    requests = unequal_requests(sampling)
    alone = [run(make_engine(model), request)[0] for request in requests]
    assert [len(ids) for ids in alone] == [request.max_tokens for request in requests]
    assert run_all(make_engine(model, n_sequences=8), requests) == alone
    assert run_all(make_engine(model, n_sequences=3, chunk=5), requests) == alone
    # The prompts alone take 110 positions, with the answers 236.
    short = make_engine(model, n_sequences=8, chunk=16, capacity=64, positions=96)
    assert run_all(short, requests) == alone
    assert short.load.n_preempted > 0


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3])
def test_chunks_do_not_change_logits(model: Model, length: int) -> None:
    """K04, S03: prompts around the window, in one pass, in chunks of every kind, token by token."""
    ids = prompt_ids(length)
    step = build_step(model.config, model.weights, Rounding())
    results = []
    for chunk in (64, 1, 2, 3, 7, 8, 9, 15, 16, 17):
        executor = ReferenceExecutor(step, CachePlan(64, chunk, page_size=4))
        executor.poison()
        results.append(torch.cat(list(score_chunks(executor, ids, chunk))))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=1e-4)
        assert result.argmax(-1).tolist() == results[0].argmax(-1).tolist()


def test_a_prompt_that_begins_alike_continues_from_the_cache(model: Model) -> None:
    """S04, S11: the answer equals a cold run, and cached tokens are counted truthfully."""
    engine = make_engine(model)
    first = tuple(prompt_ids(3 * WINDOW))
    ids, _, finish = run(engine, Request(first, max_tokens=5, sampling=GREEDY, ignores_end=True))
    assert finish.n_cached == 0
    second = (*first, *ids, *prompt_ids(6, seed=5)[1:])
    warm, _, finish = run(engine, Request(second, max_tokens=9, sampling=GREEDY, ignores_end=True))
    assert finish.n_cached == len(first) + len(ids) - 1
    cold, _, _ = run(make_engine(model), Request(second, max_tokens=9, sampling=GREEDY, ignores_end=True))
    assert warm == cold


def test_a_prompt_that_diverges_at_the_answer_continues_from_the_end_of_the_old_prompt(model: Model) -> None:
    """Templates that drop old thinking diverge there, long after sliding layers have moved on."""
    engine = make_engine(model)
    first = tuple(prompt_ids(20))
    run(engine, Request(first, max_tokens=40, sampling=GREEDY, ignores_end=True))
    second = (*first, *prompt_ids(9, seed=7)[1:])
    warm, _, finish = run(engine, Request(second, max_tokens=8, sampling=GREEDY, ignores_end=True))
    assert finish.n_cached == len(first)
    cold, _, _ = run(make_engine(model), Request(second, max_tokens=8, sampling=GREEDY, ignores_end=True))
    assert warm == cold


def test_a_prompt_that_shares_only_what_has_left_the_window_is_computed_again(model: Model) -> None:
    """S04: sharing the first W tokens of a prompt of 3 W."""
    engine = make_engine(model)
    first = tuple(prompt_ids(3 * WINDOW))
    run(engine, Request(first, max_tokens=20, sampling=GREEDY, ignores_end=True))
    second = (*first[:WINDOW], *prompt_ids(12, seed=3)[1:])
    warm, _, finish = run(engine, Request(second, max_tokens=8, sampling=GREEDY, ignores_end=True))
    cold, _, _ = run(make_engine(model), Request(second, max_tokens=8, sampling=GREEDY, ignores_end=True))
    assert warm == cold
    has_sliding = any(layer.window for layer in model.config.layers)
    assert finish.n_cached == (0 if has_sliding else WINDOW)


def test_the_same_prompt_again_computes_one_token(model: Model) -> None:
    engine = make_engine(model)
    request = Request(tuple(prompt_ids(21)), max_tokens=6, sampling=GREEDY, ignores_end=True)
    first, _, _ = run(engine, request)
    again, _, finish = run(engine, request)
    assert again == first
    assert finish.n_cached == 20


def test_old_prefixes_give_way_to_a_running_sequence(model: Model) -> None:
    """S17: pages run out, stored prefixes are given up, nothing crashes and nothing changes."""
    engine = make_engine(model, capacity=64, n_sequences=2)
    requests = [
        Request(tuple(prompt_ids(50, seed=i)), max_tokens=10, sampling=GREEDY, ignores_end=True) for i in range(6)
    ]
    together = run_all(engine, requests)
    alone = [run(make_engine(model, capacity=64), request)[0] for request in requests]
    assert together == alone


def test_an_answer_ends_where_the_context_does(qwen: Model) -> None:
    """S01, V03: finish reason length; positions are never shifted."""
    engine = make_engine(qwen, capacity=24)
    ids, _, finish = run(engine, Request(tuple(prompt_ids(20)), sampling=GREEDY, ignores_end=True))
    assert (finish.reason, finish.detail) == ("length", "context of 24 is full")
    assert len(ids) == 4


@pytest.mark.parametrize("length", [23, 24, 25, 72])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(qwen: Model, length: int) -> None:
    """V03, V04: never cut silently."""
    engine = make_engine(qwen, capacity=24)
    request = Request(tuple(prompt_ids(length)), sampling=GREEDY, ignores_end=True)
    if length < 24:
        assert run(engine, request)[2].n_generated == 1
    else:
        with pytest.raises(RequestError, match=rf"{length} tokens, the context holds 24"):
            engine.add(request)


def test_impossible_requests_are_refused(qwen: Model) -> None:
    engine = make_engine(qwen)
    with pytest.raises(RequestError, match="prompt is empty"):
        engine.add(Request(()))
    with pytest.raises(RequestError, match="max_tokens is 0"):
        engine.add(Request((5,), max_tokens=0))
    with pytest.raises(RequestError, match="prompt token 9999 is outside"):
        engine.add(Request((9999,)))
    assert not engine.has_work


def next_ids(qwen: Model, n: int) -> tuple[list[int], Tokenizer]:
    engine = make_engine(qwen)
    return run(engine, Request(tuple(prompt_ids(9)), max_tokens=n, sampling=GREEDY, ignores_end=True))[
        0
    ], engine.tokenizer


def test_stop_strings_over_several_tokens_end_the_answer_before_them(qwen: Model) -> None:
    """V01"""
    ids, tokenizer = next_ids(qwen, 12)
    whole = tokenizer.decode(ids)
    for start in (2, 5):
        stop = whole[start : start + 3]
        _, text, finish = run(
            make_engine(qwen),
            Request(tuple(prompt_ids(9)), max_tokens=12, sampling=GREEDY, stops=(stop,), ignores_end=True),
        )
        assert text == whole[: whole.index(stop)]
        assert (finish.reason, finish.detail) == ("stop", "stop string")


def test_text_of_all_deltas_is_the_decoded_answer(model: Model) -> None:
    ids, text, _ = run(
        make_engine(model), Request(tuple(prompt_ids(9)), max_tokens=40, sampling=GREEDY, ignores_end=True)
    )
    engine = make_engine(model)
    assert text == engine.tokenizer.decode(ids)


def test_end_tokens_end_the_answer_and_are_not_printed(qwen: Model) -> None:
    """T07: each id of the set."""
    engine = make_engine(qwen)
    assert engine.tokenizer.end_ids
    for end in engine.tokenizer.end_ids:
        request = Request(tuple(prompt_ids(9)), sampling=replace(GREEDY, logit_bias={end: 100.0}))
        ids, text, finish = run(engine, request)
        assert ids == [end]
        assert text == ""
        assert finish.reason == "stop"


def test_suppressed_and_padding_tokens_are_never_sampled(qwen: Model) -> None:
    """R12: the table has more rows than there are tokens."""
    engine = make_engine(qwen)
    n_tokens = engine.tokenizer.n_tokens
    assert n_tokens < qwen.config.vocabulary_size
    sampling = SamplingParams(temperature=100.0, top_k=0, top_p=1.0, min_p=0.0, seed=3)
    ids, _, _ = run(engine, Request(tuple(prompt_ids(4)), max_tokens=100, sampling=sampling, ignores_end=True))
    assert max(ids) < n_tokens


def test_the_reported_seed_reproduces_the_answer(qwen: Model) -> None:
    """P08: also when none was given."""
    loose = SamplingParams(temperature=1.5, top_k=0)
    request = Request(tuple(prompt_ids(9)), max_tokens=20, sampling=loose, ignores_end=True)
    first, _, finish = run(make_engine(qwen), request)
    again, _, _ = run(make_engine(qwen), replace(request, sampling=replace(loose, seed=finish.seed)))
    assert again == first


def test_nan_logits_end_the_request_and_leave_the_engine_usable(qwen: Model) -> None:
    """N06"""
    engine = make_engine(qwen)
    request = Request(tuple(prompt_ids(9)), max_tokens=5, sampling=GREEDY, ignores_end=True)
    healthy, _, _ = run(make_engine(qwen), request)
    real_run = engine.executor.run
    engine.executor.run = lambda batch: real_run(batch) * float("nan")  # type: ignore[method-assign]
    _, _, finish = run(engine, request)
    assert finish.reason == "error"
    assert "nan" in finish.detail.lower()
    engine.executor.run = real_run  # type: ignore[method-assign]
    engine.executor.poison()  # type: ignore[attr-defined]
    after, _, finish = run(engine, request)
    assert after == healthy
    assert not engine.has_work


def test_a_request_that_cannot_be_sampled_ends_alone(qwen: Model) -> None:
    """Its company in the batch goes on as if it had never been there."""
    company = Request(tuple(prompt_ids(9)), max_tokens=5, sampling=GREEDY, ignores_end=True)
    alone, _, _ = run(make_engine(qwen), company)
    engine = make_engine(qwen, n_sequences=3)
    bad = engine.add(replace(company, sampling=replace(GREEDY, logit_bias={10**6: 1.0})))
    good = engine.add(company)
    deltas = [delta for _ in range(100) for delta in engine.step()]
    ends = {delta.request_id: delta.finish for delta in deltas if delta.finish}
    assert not engine.has_work
    assert ends[bad].reason == "error"
    assert "logit_bias names token id 1000000" in ends[bad].detail
    assert [delta.sampled.id for delta in deltas if delta.request_id == good and delta.sampled] == alone


def test_an_executor_that_fails_loses_its_batch_and_no_pages(qwen: Model) -> None:
    engine = make_engine(qwen)
    free = {name: pool.n_free for name, pool in engine._pages.pools.items()}
    real_run = engine.executor.run

    def broken(batch: object) -> torch.Tensor:
        raise RuntimeError("device lost")

    engine.executor.run = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="device lost"):
        run(engine, Request(tuple(prompt_ids(9)), sampling=GREEDY))
    assert not engine.has_work
    assert {name: pool.n_free for name, pool in engine._pages.pools.items()} == free
    engine.executor.run = real_run  # type: ignore[method-assign]
    assert (
        run(engine, Request(tuple(prompt_ids(9)), max_tokens=3, sampling=GREEDY, ignores_end=True))[2].n_generated == 3
    )


def test_a_cancelled_answer_stops_and_the_next_one_is_right(qwen: Model) -> None:
    engine = make_engine(qwen)
    request = Request(tuple(prompt_ids(9)), max_tokens=30, sampling=GREEDY, ignores_end=True)
    answer = engine.generate(request)
    for _ in range(4):
        next(answer)
    answer.close()
    assert not engine.has_work
    assert run(engine, request)[0] == run(make_engine(qwen), request)[0]


def test_a_loop_is_reported_as_one(qwen: Model) -> None:
    engine = make_engine(qwen, capacity=512)
    sampling = replace(GREEDY, logit_bias={9: 100.0})
    request = Request(tuple(prompt_ids(4)), sampling=sampling, ignores_end=True, detects_loops=True)
    assert run(engine, request)[2].reason == "loop"


def test_bf16_weights_are_an_option_that_stays_close(qwen: Model) -> None:
    ids = prompt_ids(20)
    step = build_step(qwen.config, qwen.weights, Rounding())
    plan = CachePlan(64, 64)
    exact = torch.cat(list(score_chunks(ReferenceExecutor(step, plan), ids, 64)))
    narrow = ReferenceExecutor(step, plan, precision=Precision(weights=torch.bfloat16))
    found = torch.cat(list(score_chunks(narrow, ids, 64)))
    error = (found - exact).square().mean() / exact.square().mean()
    assert 0 < error < 1e-3
    assert narrow.weight_bytes() < 0.6 * ReferenceExecutor(step, plan).weight_bytes()


def test_roundings_of_the_list_happen_only_when_asked_for(qwen: Model) -> None:
    """The same list with and without: without equals a list that has none; with differs, a little."""
    ids, plan = prompt_ids(20), CachePlan(64, 64)
    plain = build_step(qwen.config, qwen.weights, Rounding())
    rounded = build_step(qwen.config, qwen.weights, Rounding(activations="int8_g32", cache="bf16"))
    exact = torch.cat(list(score_chunks(ReferenceExecutor(plain, plan), ids, 64)))
    without = ReferenceExecutor(rounded, plan, precision=Precision(rounds=False))
    assert torch.equal(torch.cat(list(score_chunks(without, ids, 64))), exact)
    found = torch.cat(list(score_chunks(ReferenceExecutor(rounded, plan), ids, 64)))
    error = ((found - exact).square().mean() / exact.square().mean()).item()
    assert 1e-7 < error < 1e-2


def test_float64_agrees_with_float32(qwen: Model) -> None:
    ids, plan = prompt_ids(20), CachePlan(64, 64)
    step = build_step(qwen.config, qwen.weights, Rounding())
    wide = Precision(compute=torch.float64, weights=torch.float64)
    found = torch.cat(list(score_chunks(ReferenceExecutor(step, plan, precision=wide), ids, 64)))
    assert found.dtype == torch.float64
    exact = torch.cat(list(score_chunks(ReferenceExecutor(step, plan), ids, 64)))
    assert (found - exact).abs().max().item() < 1e-4


def test_nothing_of_the_directory_needs_a_network(tmp_path: Path) -> None:
    directory = build_tiny("qwen3", tmp_path).directory
    assert open_tokenizer(open_checkpoint(directory)).n_tokens > 0
