"""Texts as vectors: against `transformers`, in chunks, beside answers, and when pages run out."""

from __future__ import annotations

import pytest
import torch

from bytefloor.engine.engine import Engine
from bytefloor.engine.request import Delta, EmbeddingRequest, Request
from bytefloor.errors import RequestError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.model.families import Model, load_model
from engine.test_engine import GREEDY, make_engine
from tiny import TinyModel, build_tiny, prompt_ids


@pytest.fixture(scope="module", params=["gemma4-unified", "gemma4-e", "qwen3"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return build_tiny(request.param, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return build_tiny("qwen3", tmp_path_factory.mktemp("tiny"))


def loaded(tiny: TinyModel) -> Model:
    return load_model(open_checkpoint(tiny.directory))


@torch.inference_mode()
def by_hand(tiny: TinyModel, ids: list[int]) -> torch.Tensor:
    """What the head of `transformers` gets, over all positions, float64 [D]."""
    found: list[torch.Tensor] = []
    head = tiny.reference.get_output_embeddings()
    watch = head.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0][0]))
    tiny.reference(input_ids=torch.tensor([ids]), use_cache=False)
    watch.remove()
    mean = found[0].double().mean(0)
    assert found[0].shape == (len(ids), mean.shape[0])
    return mean / mean.norm()


def run_all(engine: Engine, requests: list[Request | EmbeddingRequest]) -> list[list[Delta]]:
    """The deltas of each."""
    order = [engine.add(request) for request in requests]
    found: dict[int, list[Delta]] = {request_id: [] for request_id in order}
    while engine.has_work:
        for delta in engine.step():
            found[delta.request_id].append(delta)
    return [found[request_id] for request_id in order]


def vector(deltas: list[Delta]) -> torch.Tensor:
    (delta,) = deltas
    assert delta.embedding is not None
    return torch.tensor(delta.embedding, dtype=torch.float64)


def tokens(deltas: list[Delta]) -> list[int]:
    return [delta.sampled.id for delta in deltas if delta.sampled is not None]


def n_used(engine: Engine) -> int:
    """Pages that are not free and not a stored prefix's."""
    return sum(use.n_used - use.n_idle for use in engine.load.pages.values())


@pytest.mark.parametrize("chunk", [16, 5, 1])
def test_a_vector_is_the_mean_of_all_positions(tiny: TinyModel, chunk: int) -> None:
    engine = make_engine(loaded(tiny), n_sequences=2, chunk=chunk)
    texts = [prompt_ids(n, seed=n) for n in (1, 37, 128)]
    for ids, deltas in zip(texts, run_all(engine, [EmbeddingRequest(tuple(ids)) for ids in texts]), strict=True):
        torch.testing.assert_close(vector(deltas), by_hand(tiny, ids), rtol=0, atol=1e-5)
        finish = deltas[0].finish
        assert finish is not None
        assert (finish.reason, finish.n_prompt, finish.n_cached, finish.n_generated) == ("stop", len(ids), 0, 0)
        assert vector(deltas).norm().item() == pytest.approx(1)
    # No page stays, not even as a prefix.
    assert {use.n_used for use in engine.load.pages.values()} == {0}


@pytest.mark.parametrize("positions", [None, 64], ids=["room for all", "pages run out"])
def test_vectors_and_answers_beside_each_other_are_as_alone(tiny: TinyModel, positions: int | None) -> None:
    model = loaded(tiny)
    requests: list[Request | EmbeddingRequest] = [
        Request(tuple(prompt_ids(n, seed=n)), max_tokens=20 + n, sampling=GREEDY, ignores_end=True) for n in (1, 20, 9)
    ]
    requests[1:1] = [EmbeddingRequest(tuple(prompt_ids(n, seed=n))) for n in (45, 10, 1, 30)]
    alone = [run_all(make_engine(model), [request])[0] for request in requests]
    extra = {} if positions is None else {"positions": positions}
    engine = make_engine(model, n_sequences=8, capacity=64, chunk=4, **extra)
    for one, other in zip(alone, run_all(engine, requests), strict=True):
        assert tokens(other) == tokens(one)
        if one[0].embedding is not None:
            torch.testing.assert_close(vector(other), vector(one), rtol=0, atol=1e-5)
    assert (engine.load.n_preempted > 0) == (positions is not None)
    assert n_used(engine) == 0


def test_a_text_whose_pages_an_older_answer_needs_is_read_once_more(tiny: TinyModel) -> None:
    """From its beginning: what it had added up is forgotten with its pages."""
    engine = make_engine(loaded(tiny), n_sequences=2, capacity=64, chunk=3, positions=64)
    answer = Request(tuple(prompt_ids(4)), max_tokens=60, sampling=GREEDY, ignores_end=True)
    ids = prompt_ids(52, seed=9)
    _, deltas = run_all(engine, [answer, EmbeddingRequest(tuple(ids))])
    assert engine.load.n_preempted > 0
    torch.testing.assert_close(vector(deltas), by_hand(tiny, ids), rtol=0, atol=1e-5)


def test_a_prefix_saves_no_row_of_a_text(qwen: TinyModel) -> None:
    """Its rows are in the cache, what they gave is not."""
    engine, ids = make_engine(loaded(qwen)), prompt_ids(40)
    run_all(engine, [Request(tuple(ids), max_tokens=3, sampling=GREEDY, ignores_end=True)])
    (deltas,) = run_all(engine, [EmbeddingRequest(tuple(ids))])
    torch.testing.assert_close(vector(deltas), by_hand(qwen, ids), rtol=0, atol=1e-5)


def test_a_text_can_be_cancelled_and_a_failing_step_leaves_nothing(qwen: TinyModel) -> None:
    engine = make_engine(loaded(qwen), chunk=4)
    first, second = (engine.add(EmbeddingRequest(tuple(prompt_ids(20, seed=i)))) for i in range(2))
    engine.step()
    reading = engine.reading(first)
    assert reading is not None
    assert (reading.n_done, reading.n_prompt) == (4, 20)
    finish = engine.cancel(first)
    assert finish is not None
    assert finish.reason == "cancelled"
    assert {use.n_used for use in engine.load.pages.values()} == {0}

    def fail(_: object) -> torch.Tensor:
        raise RuntimeError("no")

    engine.executor.sum_hidden = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no"):
        engine.step()
    assert engine.cancel(second) is None
    assert {use.n_used for use in engine.load.pages.values()} == {0}


def test_values_that_are_not_finite_are_an_error(qwen: TinyModel) -> None:
    engine = make_engine(loaded(qwen))
    for bad in (float("nan"), float("inf"), 0.0):
        engine.executor.sum_hidden = lambda batch, bad=bad: torch.full((1, 4), bad, dtype=torch.float64)  # type: ignore
        ((delta,),) = run_all(engine, [EmbeddingRequest((2, 3))])
        assert delta.embedding is None
        assert delta.finish is not None
        assert delta.finish.reason == "error"
        assert "expected a finite number above 0" in delta.finish.detail


def test_what_cannot_be_embedded_is_refused(qwen: TinyModel) -> None:
    engine = make_engine(loaded(qwen), capacity=32)
    for ids, words in (((), "empty"), ((2,) * 33, "33 tokens, the context holds 32"), ((10**6,), "vocabulary")):
        with pytest.raises(RequestError, match=words):
            engine.add(EmbeddingRequest(ids))
    engine.add(EmbeddingRequest((2,) * 32))
