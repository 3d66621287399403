"""Grammars through the engine: alone and together, streamed or not, with bans, stops, limits and thoughts."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
from test_engine import make_engine, run

from bytefloor.engine.engine import Engine
from bytefloor.engine.request import Finish, Request
from bytefloor.engine.sampler import Sampler
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.errors import RequestError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.model.families import Model, load_model
from bytefloor.text.grammar import Grammar, compile_grammar
from tiny import build_tiny, prompt_ids

GREEDY = SamplingParams(temperature=0)
SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["é", "b"]}, "maxItems": 2},
    },
    "required": ["ok", "n", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(open_checkpoint(build_tiny("qwen3", tmp_path_factory.mktemp("tiny")).directory))


@pytest.fixture
def engine(model: Model) -> Engine:
    return make_engine(model, capacity=400, n_sequences=4)


def compiled(engine: Engine, kind: str = "json_schema", source: object = SCHEMA) -> Grammar:
    return compile_grammar(engine.tokenizer, kind, source)  # type: ignore[arg-type]


def asked(grammar: Grammar, **options: object) -> Request:
    # Random weights like white space, of which a schema allows a good deal.
    white = {int(id): -100.0 for id in np.flatnonzero(grammar.tokenizer.guide.is_white)}
    settings: dict = {"sampling": SamplingParams(temperature=1, seed=1, logit_bias=white)} | options
    return Request(tuple(prompt_ids(12)), grammar=grammar, **settings)


def run_together(engine: Engine, requests: list[Request]) -> list[tuple[list[int], str, Finish]]:
    found: dict[int, tuple[list[int], str, Finish | None]] = {engine.add(each): ([], "", None) for each in requests}
    while engine.has_work:
        for delta in engine.step():
            ids, text, finish = found[delta.request_id]
            more = [delta.sampled.id] if delta.sampled else []
            found[delta.request_id] = ([*ids, *more], text + delta.text, delta.finish or finish)
    return list(found.values())  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_is_valid_and_ends_by_itself(engine: Engine, seed: int) -> None:
    request = asked(compiled(engine))
    ids, text, finish = run(engine, replace(request, sampling=replace(request.sampling, seed=seed)))
    jsonschema.validate(json.loads(text), SCHEMA)
    assert finish.reason == "stop"
    assert finish.detail == "the grammar is complete"
    assert engine.tokenizer.decode(ids) == text


def test_several_at_once_equal_one_by_one(engine: Engine) -> None:
    """Grammars beside each other, and beside a request without one."""
    schema, digits = compiled(engine), compiled(engine, "regex", "[0-9]{3,9}")
    requests = [
        asked(schema),
        asked(digits),
        Request(tuple(prompt_ids(9)), max_tokens=20, sampling=SamplingParams(seed=5)),
        replace(asked(schema), prompt_ids=tuple(prompt_ids(20, seed=3))),
    ]
    alone = [run(engine, request) for request in requests]
    together = run_together(engine, requests)
    assert [ids for ids, _, _ in together] == [ids for ids, _, _ in alone]
    assert [text for _, text, _ in together] == [text for _, text, _ in alone]
    jsonschema.validate(json.loads(together[0][1]), SCHEMA)
    assert together[1][1].isdigit()
    assert together[2][2].n_generated == 20


def test_greedy_takes_the_best_token_that_is_allowed(engine: Engine) -> None:
    grammar = compiled(engine, "regex", "[a-z]{8}")
    prompt = tuple(prompt_ids(12))
    logits: list[np.ndarray] = []
    plain = engine.executor.run

    def watched(batch: object):
        rows = plain(batch)  # type: ignore[arg-type]
        logits.extend(rows.float().cpu().numpy())
        return rows

    engine.executor.run = watched  # type: ignore[method-assign]
    ids, _, _ = run(engine, Request(prompt, sampling=GREEDY, grammar=grammar))
    for n, id in enumerate(ids):
        allowed = np.flatnonzero(grammar.start(prompt, ids[:n]).allowed())
        allowed = allowed[~np.isin(allowed, sorted(engine.banned_ids))]
        assert id == allowed[logits[n][allowed].argmax()]


def test_bans_and_biases_hold_under_a_grammar(engine: Engine) -> None:
    grammar = compiled(engine, "regex", "[ab]{12}")
    a, b = (engine.tokenizer.encode(letter, add_bos=False)[-1] for letter in "ab")
    spelled = {id: -100.0 for id in range(engine.tokenizer.n_tokens) if b"b" in engine.tokenizer.token_bytes(id)}
    _, text, finish = run(engine, asked(grammar, sampling=SamplingParams(logit_bias=spelled)))
    assert (text, finish.reason) == ("a" * 12, "stop")
    _, text, _ = run(engine, asked(grammar, sampling=SamplingParams(temperature=0, logit_bias={b: 100.0})))
    assert text == "b" * 12
    assert a != b


def test_where_bans_leave_no_allowed_token_the_answer_is_an_error(engine: Engine) -> None:
    nothing = {id: -100.0 for id in range(engine.tokenizer.n_tokens) if b"b" in engine.tokenizer.token_bytes(id)}
    grammar = compiled(engine, "regex", "ab")
    _, text, finish = run(engine, asked(grammar, sampling=SamplingParams(logit_bias=nothing)))
    assert (text, finish.reason) == ("a", "error")
    assert "grammar" in finish.detail
    assert run(engine, asked(grammar, sampling=GREEDY))[1] == "ab"


def test_a_grammar_that_cannot_be_followed_ends_its_own_request_alone(engine: Engine) -> None:
    heavy = compiled(engine, "regex", "(.{0,500}a){200}")
    letters = dict.fromkeys(engine.tokenizer.encode("ab", add_bos=False), 50.0)
    requests = [
        asked(heavy, sampling=SamplingParams(seed=1, logit_bias=letters)),
        asked(compiled(engine, "regex", "[0-9]{3}")),
    ]
    (_, _, failed), (_, text, finish) = run_together(engine, requests)
    assert failed.reason == "error"
    assert "cannot be followed" in failed.detail
    assert (len(text), finish.reason) == (3, "stop")


def test_limits_and_stops_cut_as_ever(engine: Engine) -> None:
    grammar = compiled(engine, "regex", "a{30}b")
    _, text, finish = run(engine, asked(grammar, max_tokens=4, sampling=GREEDY))
    assert finish.reason == "length"
    assert text == "a" * len(text)
    _, text, finish = run(engine, asked(grammar, stops=("b",)))
    assert (text, finish.detail) == ("a" * 30, "stop string")


def test_the_last_token_allowed_completes_the_grammar(engine: Engine) -> None:
    grammar = compiled(engine, "regex", "x[0-9]y")
    n = run(engine, asked(grammar, sampling=GREEDY))[2].n_generated
    _, text, finish = run(engine, asked(grammar, sampling=GREEDY, max_tokens=n))
    assert (len(text), finish.reason) == (3, "stop")


def test_an_end_token_ends_where_more_could_follow(engine: Engine) -> None:
    ends = dict.fromkeys(engine.tokenizer.end_ids, 60.0)
    ids, text, finish = run(engine, asked(compiled(engine, "regex", "a{3,}"), sampling=SamplingParams(logit_bias=ends)))
    assert text == "aaa"
    assert (finish.reason, finish.detail) == ("stop", "end of turn")
    assert ids[-1] in engine.tokenizer.end_ids


def test_requests_that_contradict_themselves_are_refused(engine: Engine, model: Model) -> None:
    grammar = compiled(engine)
    with pytest.raises(RequestError, match="ignores_end"):
        engine.add(asked(grammar, ignores_end=True))
    with pytest.raises(RequestError, match="another tokenizer"):
        make_engine(model).add(asked(grammar))


def test_a_mask_shorter_than_the_logits_bans_the_rest() -> None:
    logits = np.arange(10, dtype=np.float32)
    allowed = np.array([True, False, True, False])
    assert Sampler(GREEDY, ()).sample(logits, 0, allowed).id == 2
    assert Sampler(GREEDY, ()).sample(logits, 0, np.ones(64, np.bool_)).id == 9
    with pytest.raises(RequestError, match="leave no token"):
        Sampler(GREEDY, ()).sample(logits, 0, np.zeros(10, np.bool_))


def test_the_mask_is_made_while_the_executor_is_at_work(engine: Engine) -> None:
    """Before anything waits for the logits: on a device the two run beside each other."""
    order: list[str] = []
    grammar = compiled(engine, "regex", "a{5}")

    class Watched(type(engine.executor.run(_one_row(engine)))):  # type: ignore[misc]
        def float(self):
            order.append("wait")
            return super().float()

    plain = engine.executor.run

    def watched(batch: object):
        order.append("run")
        return plain(batch).as_subclass(Watched)  # type: ignore[arg-type]

    engine.executor.run = watched  # type: ignore[method-assign]
    request_id = engine.add(asked(grammar))
    (sequence,) = engine._scheduler.waiting
    assert sequence.constraint is not None
    prepare = sequence.constraint.prepare
    sequence.constraint.prepare = lambda: (order.append("mask"), prepare())[1]  # type: ignore[method-assign]
    while engine.has_work and order.count("wait") < 3:
        engine.step()
    engine.cancel(request_id)
    assert order[:3] == ["run", "mask", "wait"]


def _one_row(engine: Engine):
    from bytefloor.engine.batch import Batch
    from bytefloor.engine.cache import SequenceCache

    batch, executor = Batch(), engine.executor
    SequenceCache(executor.plan, executor.step.kinds, engine._pages.pools).append_rows(batch, [5], [0])
    return batch


def test_the_loop_on_the_device_is_left_to_others(engine: Engine) -> None:
    """It knows no masks. A request without a grammar goes to it again."""

    class Loop:
        def can_serve(self, sampling: SamplingParams) -> bool:
            return True

        def start(self, *_: object) -> None:
            raise AssertionError("looped")

        def stop(self) -> None:
            pass

    engine._loop = Loop()  # type: ignore[assignment]
    assert run(engine, asked(compiled(engine, "regex", "a{5}")))[1] == "aaaaa"
    with pytest.raises(AssertionError, match="looped"):
        run(engine, Request(tuple(prompt_ids(12)), max_tokens=3))
