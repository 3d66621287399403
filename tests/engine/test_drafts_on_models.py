"""Drafts on models that compute: rows of several tokens give the tokens of one row after another.

On a CPU sums of several rows are taken in another order, so log-probabilities agree but for their last digits, and
tokens are the same wherever the best two are not as close as that.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from test_engine import make_engine, run, run_all
from test_structured_output import SCHEMA, asked, compiled

from bytefloor.engine.engine import Engine
from bytefloor.engine.loading import EngineOptions, Opened, open_engine
from bytefloor.engine.request import Finish, Request
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.model.families import Model, load_model
from bytefloor.text.chat import Message
from drafted import Always, foresee
from tiny import build_tiny, prompt_ids

GREEDY = SamplingParams(temperature=0, seed=1)
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=0.6, seed=2),
    "penalties": SamplingParams(temperature=0, repetition_penalty=1.1, presence_penalty=0.2, seed=1),
}


@pytest.fixture(scope="module", params=["gemma4-unified", "gemma4-e", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Sliding and global layers, a window of 8; shared keys and values; and a model that has neither."""
    return load_model(open_checkpoint(build_tiny(request.param, tmp_path_factory.mktemp("tiny")).directory))


def drafting(model: Model, **plan: int) -> Engine:
    engine = make_engine(model, **plan)
    engine._speculation = Always(engine.executor.most_draft_rows)
    return engine


def repeating(n_tokens: int, seed: int = 0) -> tuple[int, ...]:
    """A prompt that says the same thing again and again."""
    phrase = prompt_ids(8, seed)[1:]
    return tuple([2, *(phrase * n_tokens)][:n_tokens])


def run_foreseen(engine: Engine, request: Request, answer: list[int]) -> tuple[list[int], str, Finish]:
    """With drafts of which three of four are right."""
    engine.add(request)
    foresee(engine, answer, engine.tokenizer.n_tokens, random.Random(1))
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    assert deltas[-1].finish is not None
    return [delta.sampled.id for delta in deltas], "".join(delta.text for delta in deltas), deltas[-1].finish


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=list(SAMPLINGS))
@pytest.mark.parametrize("n_prompt", [7, 23])
def test_drafts_give_the_tokens_of_plain_decoding(model: Model, sampling: SamplingParams, n_prompt: int) -> None:
    request = Request(repeating(n_prompt), max_tokens=60, sampling=sampling, ignores_end=True)
    ids, text, _ = run(make_engine(model), request)
    assert run(drafting(model), request)[:2] == (ids, text)
    *found, finish = run_foreseen(drafting(model), request, ids)
    assert found == [ids, text]
    assert 10 < finish.n_draft_accepted < finish.n_draft


def test_log_probabilities_agree(model: Model) -> None:
    request = Request(repeating(20), max_tokens=40, sampling=replace(GREEDY, n_logprobs=3), ignores_end=True)
    plain, drafted = (list(engine.generate(request)) for engine in (make_engine(model), drafting(model)))
    for a, b in zip(plain, drafted, strict=True):
        assert a.sampled.id == b.sampled.id
        assert a.sampled.logprob == pytest.approx(b.sampled.logprob, abs=1e-4)
        assert [value for _, value in a.sampled.top] == pytest.approx([value for _, value in b.sampled.top], abs=1e-4)


def test_several_at_once_some_of_which_draft(model: Model) -> None:
    """Foreseen drafts, of which some are wrong, beside natural ones, on a pool that is too small for all."""
    samplings = [replace(SAMPLINGS["sampled"], seed=i) for i in range(4)]
    requests = [Request(repeating(5 + 9 * i, i), 30, samplings[i], ignores_end=True) for i in range(4)]
    alone = [run(make_engine(model), request)[0] for request in requests]
    for positions in (4 * 64, 80):
        engine = drafting(model, n_sequences=4, capacity=64, positions=positions)
        answers = iter(alone)
        add = engine.add

        def add_foreseen(request: Request, add=add, engine=engine, answers=answers) -> int:
            request_id = add(request)
            foresee(engine, next(answers), engine.tokenizer.n_tokens, random.Random(request_id))
            return request_id

        engine.add = add_foreseen  # type: ignore[method-assign]
        assert run_all(engine, requests) == alone
        assert (engine.load.n_preempted > 0) == (positions == 80)


def test_a_prompt_continues_from_an_answer_with_drafts(model: Model) -> None:
    engine = drafting(model)
    first = repeating(30)
    request = Request(first, max_tokens=30, sampling=GREEDY, ignores_end=True)
    ids, _, _ = run(make_engine(model), request)
    found, _, finish = run_foreseen(engine, request, ids)
    assert found == ids
    assert finish.n_draft_accepted
    longer = Request((*first, *ids, *prompt_ids(6, seed=5)[1:]), max_tokens=9, sampling=GREEDY, ignores_end=True)
    warm, _, finish = run(engine, longer)
    assert finish.n_cached == len(first) + len(ids) - 1
    assert warm == run(make_engine(model), longer)[0]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(open_checkpoint(build_tiny("qwen3", tmp_path_factory.mktemp("tiny")).directory))


@pytest.mark.parametrize("seed", range(4))
def test_a_grammar_masks_every_row(qwen: Model, seed: int) -> None:
    """The mask behind each accepted draft is that of the text with it; a draft that breaks the form is wrong."""
    plain, drafted = (make(qwen, capacity=400) for make in (make_engine, drafting))
    request = asked(compiled(plain))
    request = replace(request, sampling=replace(request.sampling, seed=seed))
    ids, text, finish = run(plain, request)
    jsonschema.validate(json.loads(text), SCHEMA)
    found, _, end = run_foreseen(drafted, replace(request, grammar=compiled(drafted)), ids)
    assert found == ids
    assert (end.detail, end.n_draft_accepted > 0) == (finish.detail, True)


def test_a_grammar_that_completes_inside_a_draft(qwen: Model) -> None:
    engine = drafting(qwen, capacity=400)
    ids, text, finish = run(engine, asked(compiled(engine, "regex", "(ab){20}"), sampling=GREEDY))
    assert (text, finish.detail) == ("ab" * 20, "the grammar is complete")
    assert finish.n_draft_accepted > 20
    assert finish.n_draft > finish.n_draft_accepted
    assert len(ids) == 40


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Opened:
    opened = open_engine(smollm2_path, EngineOptions(context=256, device="cpu", n_snapshots=0))
    assert opened.engine._speculation.is_on
    return opened


NAMES = "Repeat this list of names three times, exactly: Ada Lovelace, Alan Turing, Grace Hopper, Edsger Dijkstra."
RHYME = "The cat sat on the mat. The dog sat on the mat. The cow sat on the mat. The hen sat on"


@pytest.mark.parametrize("text", [NAMES, RHYME], ids=["chat", "text"])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.7, seed=1)], ids=["greedy", "sampled"])
def test_a_trained_model_says_the_same(smollm2: Opened, text: str, sampling: SamplingParams) -> None:
    """P12: words of the prompt come again in the answer."""
    chat = smollm2.chat_template().prepare([Message("user", text)]).ids
    request = Request(tuple(chat if text is NAMES else smollm2.tokenizer.encode(text)), 32, sampling)
    found = []
    for speculation in (Always(1), Always(16)):
        smollm2.engine._speculation = speculation
        found.append(run(smollm2.engine, request))
    assert found[0][:2] == found[1][:2]
    assert found[1][2].n_draft_accepted > 3


@pytest.mark.parametrize(
    ("options", "is_on"),
    [({}, True), ({"speculates": False}, False), ({"weights": "bf16"}, False), ({"kv": "int8"}, False)],
    ids=str,
)
def test_an_opened_engine_drafts_where_nothing_is_rounded(tmp_path: Path, options: dict, is_on: bool) -> None:
    directory = build_tiny("qwen3", tmp_path).directory
    opened = open_engine(directory, EngineOptions(context=64, device="cpu", **options))
    assert opened.engine._speculation.is_on == is_on
