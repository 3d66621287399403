"""Requests whose prompts are cut to a budget: the same answer in any company, and the truth about what was reused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_engine import make_engine, run, run_all

from bytefloor.engine.cache import Room
from bytefloor.engine.engine import Engine
from bytefloor.engine.loading import EngineOptions, make_executor, open_engine
from bytefloor.engine.request import EmbeddingRequest, Request
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.errors import RequestError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.model.families import Model, load_model
from bytefloor.ops.eviction import OBSERVED
from cut_prompts import Emulation
from drafted import Always, draft_by
from tiny import build_tiny, prompt_ids

GREEDY = SamplingParams(temperature=0, seed=1)
BUDGET = 48


@pytest.fixture(scope="module", params=["gemma4-unified", "gemma4-e", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Sliding and global layers; shared keys and values; and a model that has neither."""
    return load_model(open_checkpoint(build_tiny(request.param, tmp_path_factory.mktemp("tiny")).directory))


def cutting(model: Model, **plan: int) -> Engine:
    return make_engine(model, **{"capacity": 256, "chunk": 64, "budget": BUDGET, **plan})


def asked(n_prompt: int, seed: int = 0, n_tokens: int = 12) -> Request:
    return Request(tuple(prompt_ids(n_prompt, seed)), max_tokens=n_tokens, sampling=GREEDY, ignores_end=True)


def used(engine: Engine, kind: str = "global") -> int:
    """Pages of layers without a window that somebody has, those that only prefixes hold left out."""
    (found,) = [each for name, each in engine.load.pages.items() if name.startswith(kind)]
    return found.n_used - found.n_idle


def test_an_answer_is_the_best_token_of_each_row_under_the_mask(model: Model) -> None:
    """Token by token against the emulation, which has no cache."""
    request = asked(100)
    engine = cutting(model)
    ids, _, finish = run(engine, request)
    assert (finish.n_prompt, finish.n_dropped, finish.n_generated) == (100, 52, 12)
    logits = Emulation(engine.executor.step, [*request.prompt_ids, *ids], 100, BUDGET).logits()
    allowed = logits[99:-1].clone()
    allowed[:, sorted(engine.banned_ids)] = -float("inf")
    assert allowed.argmax(-1).tolist() == ids
    assert run(make_engine(model, capacity=256), request)[0] != ids


@pytest.mark.parametrize("n_prompt", [1, BUDGET - 1, BUDGET])
def test_a_prompt_within_the_budget_gives_the_same_text(model: Model, n_prompt: int) -> None:
    request = asked(n_prompt, n_tokens=40)
    ids, text, finish = run(cutting(model), request)
    plain_ids, plain_text, plain = run(make_engine(model, capacity=256, chunk=64), request)
    assert (ids, text) == (plain_ids, plain_text)
    assert (finish.n_dropped, plain.n_dropped) == (0, 0)


def test_no_batch_mate_and_no_chunk_changes_a_token(model: Model) -> None:
    requests = [asked(n, seed=i, n_tokens=8 + i) for i, n in enumerate((100, 49, 3, 80, 48, 130, 60, 81))]
    alone = [run(cutting(model), request)[0] for request in requests]
    assert run_all(cutting(model, n_sequences=8, chunk=64), requests) == alone
    assert run_all(cutting(model, n_sequences=3, chunk=OBSERVED + 2), requests) == alone
    assert run_all(cutting(model, n_sequences=8, chunk=OBSERVED + 7, page_size=16), requests) == alone


def test_who_loses_its_pages_is_cut_once_more_and_says_the_same(model: Model) -> None:
    """What prompts keep and answers take 5 x 83 positions, of which there are 256; an answer goes on behind its cut."""
    requests = [asked(70 + 5 * i, seed=i, n_tokens=35) for i in range(5)]
    alone = [run(cutting(model), request)[0] for request in requests]
    short = cutting(model, n_sequences=5, positions=256, n_snapshots=0)
    assert run_all(short, requests) == alone
    assert short.load.n_preempted > 0


def test_prompts_that_need_their_last_rows_together_never_wait_for_each_other(model: Model) -> None:
    """Two that lost their pages have 32 rows left that go together, of 40; half of these is enough for neither."""
    lengths = [(100, 70), (100, 60), (100, 50), (100, 40), (90, 40), (60, 60), (110, 60)]
    requests = [asked(n, seed=i, n_tokens=n_tokens) for i, (n, n_tokens) in enumerate(lengths)]
    engine = cutting(model, n_sequences=3, chunk=40, capacity=180, positions=256, page_size=16, n_snapshots=0)
    order = [engine.add(request) for request in requests]
    found: dict[int, list[int]] = {request_id: [] for request_id in order}
    for _ in range(2000):
        for delta in engine.step():
            found[delta.request_id].append(delta.sampled.id)
        if not engine.has_work:
            break
    assert not engine.has_work
    assert engine.load.n_preempted > 0
    assert [len(found[request_id]) for request_id in order] == [n_tokens for _, n_tokens in lengths]


def test_pages_come_back_when_the_prompt_is_read(model: Model) -> None:
    """Not when the answer ends: who waits for pages begins then."""
    engine = cutting(model, n_sequences=2, positions=256, n_snapshots=0)
    engine.add(asked(200, n_tokens=30))
    engine.add(asked(180, seed=1, n_tokens=30))
    held = []
    while held[-1:] != [BUDGET // 4]:
        engine.step()
        held.append(used(engine))
        assert engine.load.n_waiting == 1
    assert held == [16, 32, 42, 12]  # 64 rows a step, but the last 32 of 200 go together
    engine.step()
    assert engine.load.n_waiting == 0


def test_what_was_cut_is_no_prefix_and_nobody_says_it_is(model: Model) -> None:
    """A second turn, which begins with the first's prompt and answer, is computed as a whole; so is the same prompt."""
    engine = cutting(model)
    first = asked(90)
    ids, _, _ = run(engine, first)
    second = replace(first, prompt_ids=(*first.prompt_ids, *ids, *prompt_ids(9, seed=4)[1:]))
    for request in (second, first):
        again, _, finish = run(engine, request)
        assert finish.n_cached == 0
        assert again == run(cutting(model), request)[0]


def test_what_is_short_is_a_prefix_up_to_the_rows_that_choose(model: Model) -> None:
    """All of a short conversation; of what its continuation would leave to choose by, everything but the last rows."""
    engine = cutting(model)
    first = asked(40, n_tokens=6)
    ids, _, _ = run(engine, first)
    kept = (*first.prompt_ids, *ids)
    second = replace(first, prompt_ids=(*kept, *prompt_ids(OBSERVED + 1, seed=4)[1:]))
    again, _, finish = run(engine, second)
    assert (finish.n_cached, finish.n_dropped) == (len(kept) - 1, len(second.prompt_ids) - BUDGET)
    assert again == run(cutting(model), second)[0]
    # Of 52 tokens 20 may be reused, of those that have been stored 45 are the same. What a window of 8 needs is gone.
    third = replace(first, prompt_ids=(*kept, *prompt_ids(7, seed=5)[1:]))
    assert len(third.prompt_ids) == 52
    again, _, finish = run(engine, third)
    has_sliding = any(layer.window for layer in model.config.layers)
    assert (finish.n_cached, finish.n_dropped) == (0 if has_sliding else 20, 4)
    assert again == run(cutting(model), third)[0]


def test_drafts_are_computed_and_rewound_behind_the_cut(model: Model) -> None:
    phrase = prompt_ids(9, seed=2)[1:]
    request = Request((2, *phrase * 12), max_tokens=60, sampling=GREEDY, ignores_end=True)
    plain, text, _ = run(cutting(model), request)
    engine = cutting(model)
    draft_by(engine, Always(engine.executor.most_draft_rows))
    ids, drafted, finish = run(engine, request)
    assert (ids, drafted) == (plain, text)
    assert finish.n_draft > finish.n_draft_accepted > 0
    assert finish.n_dropped == 97 - BUDGET


def test_a_cancelled_answer_leaves_nothing(model: Model) -> None:
    engine = cutting(model)
    answer = engine.generate(asked(100, n_tokens=50))
    for _ in range(6):
        next(answer)
    answer.close()
    assert {kind: use.n_used for kind, use in engine.load.pages.items()} == dict.fromkeys(engine.load.pages, 0)
    assert run(engine, asked(100))[0] == run(cutting(model), asked(100))[0]


def test_a_text_to_be_embedded_is_not_cut(model: Model) -> None:
    text = EmbeddingRequest(tuple(prompt_ids(120)))
    vectors = []
    for engine in (cutting(model, chunk=50), make_engine(model, capacity=256, chunk=50)):
        engine.add(text)
        deltas = [delta for _ in range(9) for delta in engine.step()]
        vectors.append(deltas[-1].embedding)
    assert vectors[0] == vectors[1]


def test_a_model_of_windows_alone_has_nothing_to_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = load_model(open_checkpoint(build_tiny("gemma3", tmp_path).directory))
    layers = tuple(replace(layer, window=8) for layer in opened.config.layers)
    model = replace(opened, config=replace(opened.config, layers=layers))
    with pytest.raises(RequestError, match=r"--kv-budget 64: every layer of .* has a window"):
        make_executor(model, Room(128, budget=64), torch.device("cpu"))


def test_an_engine_is_opened_with_a_budget(tmp_path: Path) -> None:
    directory = build_tiny("qwen3", tmp_path).directory
    opened = open_engine(directory, EngineOptions(context=256, device="cpu", kv_budget=BUDGET))
    assert run(opened.engine, asked(100))[2].n_dropped == 52
    with pytest.raises(RequestError, match="--kv-budget 32: expected more than 32"):
        open_engine(directory, EngineOptions(device="cpu", kv_budget=32))
