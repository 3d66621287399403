"""How long answers think, over the API."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bytefloor.engine.loading import EngineOptions, open_engine
from bytefloor.server.bodies import ChatBody
from bytefloor.server.refusal import Refusal
from bytefloor.server.thinking import WantedThinking, by_budget, by_effort, wanted_thinking
from server.live import Live, Scripted, chatty, live, scripted

#: Opens the thought itself unless thinking is off.
OPENING = """\
{% for m in messages %}[{{ m.role }}] {{ m.content }}
{% endfor %}[assistant]{% if enable_thinking is defined and not enable_thinking %}{% else %}<think>{% endif %}"""
CLOSING = "\n</think>"

Stage = tuple[Live, Scripted]


def thoughtful(root: Path, template: str) -> Path:
    """The tiny Qwen3 with the tags as control tokens, in two of its spare rows."""
    directory = chatty(root, "qwen3", template)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    n_tokens = len(tokenizer["model"]["vocab"])
    for place, tag in enumerate(("<think>", "</think>")):
        added = {**tokenizer["added_tokens"][0], "id": n_tokens + place, "content": tag}
        tokenizer["added_tokens"].append(added)
        tokenizer["model"]["vocab"][tag] = n_tokens + place
    path.write_text(json.dumps(tokenizer))
    return directory


@pytest.fixture(params=["control", "spelled"])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    """Answers that the test decides; the tags are control tokens, or spelled with many."""
    make = thoughtful if request.param == "control" else partial(chatty, name="qwen3")
    engine, executor = scripted(open_engine(make(tmp_path, template=OPENING), EngineOptions(context=64)))
    with live(engine) as running:
        yield running, executor


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Random weights, which close no thought by themselves."""
    directory = thoughtful(tmp_path_factory.mktemp("think"), OPENING)
    with live(open_engine(directory, EngineOptions(context=200, n_sequences=4))) as running:
        yield running


def both(stage: Stage, script: str, **body: Any) -> tuple[str, str, int]:
    """(thought, content, reasoning tokens) of a whole answer, which the stream's must equal."""
    running, executor = stage
    asked = {"messages": [{"role": "user", "content": "why?"}], "temperature": 0, **body}
    shown = {name: asked[name] for name in ("messages", "reasoning_effort", "thinking_budget") if name in asked}
    executor.say(script, running.post("/apply-template", **shown).json()["n_tokens"])
    reply = running.post("/v1/chat/completions", **asked).json()
    message = reply["choices"][0]["message"]
    stream = running.openai.chat.completions.create(
        model="tiny", stream=True, stream_options={"include_usage": True},
        messages=asked["messages"], extra_body={k: v for k, v in asked.items() if k != "messages"},
    )  # fmt: skip
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == message["content"]
    thought = "".join(getattr(delta, "reasoning_content", "") for delta in deltas)
    assert thought == message.get("reasoning_content", "")
    usage = chunks[-1].usage
    assert usage.completion_tokens == reply["usage"]["completion_tokens"]
    n_thought = reply["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert usage.completion_tokens_details.reasoning_tokens == n_thought
    return thought, message["content"], n_thought


@pytest.mark.parametrize("n", [0, 1, 4])
def test_a_thought_that_is_spent_is_closed(stage: Stage, n: int) -> None:
    thought, content, n_thought = both(stage, "0123456789" * 3, thinking_budget=n)
    n_forced = len(stage[0].post("/tokenize", content=CLOSING, parse_special=True).json()["tokens"]) - (n == 0)
    assert (thought, n_thought) == ("0123456789"[:n], n)
    # The script goes on behind the places that were taken from it.
    assert content == ("0123456789" * 3)[n + n_forced :]


def test_a_thought_that_ends_in_time_is_left_alone(stage: Stage) -> None:
    assert both(stage, "why</think>so", thinking_budget=5)[:2] == ("why", "so")
    assert both(stage, "why</think>so", reasoning_effort="low")[:2] == ("why", "so")
    assert both(stage, "why</think>so")[:2] == ("why", "so")


def test_no_thinking(stage: Stage) -> None:
    assert both(stage, "so it is", reasoning_effort="none") == ("", "so it is", 0)


def test_thoughts_are_counted_without_a_budget(thinker: Live) -> None:
    usage = thinker.chat(max_tokens=15, temperature=0).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 15}
    usage = thinker.chat(max_tokens=15, reasoning_effort="none").json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
    usage = thinker.post("/v1/completions", prompt="once", max_tokens=5).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_no_ban_keeps_a_thought_open(thinker: Live) -> None:
    """And the forced tokens have log-probabilities like all others."""
    closing = thinker.post("/tokenize", content=CLOSING, parse_special=True).json()["tokens"]
    bans = {str(id): -100 for id in closing}
    reply = thinker.chat(max_tokens=20, logit_bias=bans, seed=1, thinking_budget=6, logprobs=True, top_logprobs=2)
    choice = reply.json()["choices"][0]
    assert choice["message"]["content"] != ""
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries][6:8] == ["\n", "</think>"]
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] < 0 for entry in entries)


def test_every_choice_has_its_own_budget(thinker: Live) -> None:
    asked = {"thinking_budget": 5, "max_tokens": 12, "temperature": 1.5}
    reply = thinker.chat(n=3, seed=4, **asked).json()
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 15}
    alone = [thinker.chat(seed=4 + i, **asked).json()["choices"][0]["message"] for i in range(3)]
    assert [choice["message"] for choice in reply["choices"]] == alone
    assert len({message["reasoning_content"] for message in alone}) == 3


def test_in_company_as_alone(thinker: Live) -> None:
    """Budgets of several lengths beside each other and beside none."""

    def one(n: int) -> Any:
        more = {"thinking_budget": n} if n else {}
        return thinker.chat("x" * n, max_tokens=14, seed=n, temperature=1.3, **more).json()["choices"][0]["message"]

    alone = [one(n) for n in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(one, range(6))) == alone


@pytest.mark.parametrize("n", [0, 6])
def test_the_answer_behind_a_closed_thought_follows_its_grammar(thinker: Live, n: int) -> None:
    asked = {"thinking_budget": n, "max_tokens": 40, "temperature": 1.5, "regex": "[a-c]{3}-[0-9]{4}"}
    for seed in range(4):
        reply = thinker.chat(seed=seed, **asked).json()
        assert re.fullmatch(asked["regex"], reply["choices"][0]["message"]["content"])
        assert reply["choices"][0]["finish_reason"] == "stop"
        assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": n}


def test_what_a_grammar_lets_look_like_a_thought_is_its_own(tmp_path: Path) -> None:
    """Spelled by the grammar's text, not by the tags' tokens: nothing may be forced into it."""
    free = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %}{% endif %}[assistant]"
    regex = "<think>[a-c]{9}</think>[0-9]{3}"
    with live(open_engine(thoughtful(tmp_path, free), EngineOptions(context=128))) as running:
        (tag,) = running.post("/tokenize", content="<think>", parse_special=True).json()["tokens"]
        for n in (0, 4):
            reply = running.chat(thinking_budget=n, regex=regex, logit_bias={str(tag): -100}, seed=n).json()
            choice = reply["choices"][0]
            assert choice["finish_detail"] == "the grammar is complete"
            assert re.fullmatch("[0-9]{3}", choice["message"]["content"])
            assert re.fullmatch("[a-c]{9}", choice["message"]["reasoning_content"])


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"thinking_budget": 2, "reasoning_effort": "low"}, "thinking_budget", "given together"),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
            "reasoning_effort",
            "reasoning_effort turns thinking on, chat_template_kwargs.enable_thinking is false",
        ),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "reasoning_effort",
            "reasoning_effort turns thinking off, chat_template_kwargs.enable_thinking is true",
        ),
        (
            {"thinking_budget": 9, "chat_template_kwargs": {"enable_thinking": False}},
            "thinking_budget",
            "thinking_budget turns thinking on",
        ),
        ({"reasoning_effort": 3}, "reasoning_effort", "got `int`"),
        ({"thinking_budget": 1.5}, "thinking_budget", "got `float`"),
        ({"chat_template_kwargs": {"thinking_budget": 5}}, "chat_template_kwargs.thinking_budget", "itself"),
    ],
)
def test_what_contradicts_itself_is_refused(thinker: Live, body: dict[str, Any], param: str, words: str) -> None:
    reply = thinker.chat(**body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert words in reply.json()["error"]["message"]


def test_a_template_that_always_thinks_cannot_be_told_not_to(tmp_path: Path) -> None:
    always = "{% for m in messages %}{{ m.content }}{% endfor %}[assistant]<think>"
    engine, _ = scripted(open_engine(thoughtful(tmp_path, always), EngineOptions(context=64)))
    with live(engine) as running:
        reply = running.chat(reasoning_effort="none")
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "reasoning_effort"
    assert "cannot be turned off" in reply.json()["error"]["message"]


def test_efforts_and_budgets() -> None:
    efforts = ["none", "minimal", "low", "medium", "high", "xhigh", None]
    found = [by_effort(effort, "reasoning.effort") for effort in efforts]
    assert [(each.is_on, each.n_most) for each in found] == [
        (False, None), (True, 512), (True, 1024), (True, 4096), (True, 16384), (True, None), (None, None),
    ]  # fmt: skip
    assert by_budget(1024, "thinking.budget_tokens") == WantedThinking(True, 1024, "thinking.budget_tokens")
    assert wanted_thinking(ChatBody(messages=[])) == WantedThinking()
    for call in (lambda: by_effort("max", "reasoning.effort"), lambda: by_effort(True, "reasoning.effort")):
        with pytest.raises(Refusal, match=r"^reasoning.effort = .*: expected none, minimal, low") as refused:
            call()
        assert refused.value.param == "reasoning.effort"
