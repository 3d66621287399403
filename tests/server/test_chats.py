"""The real client against the real engine: what comes back is what the engine says."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from bytefloor.engine.loading import Opened
from bytefloor.engine.request import Request
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.text.chat import Message
from server.live import Live

GREEDY = {"temperature": 0, "max_tokens": 12}


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def said_by_engine(opened: Opened, text: str, n_tokens: int, **sampling: Any) -> str:
    assert opened.template is not None
    prompt = opened.template.prepare([Message("user", text)])
    asked = Request(
        tuple(prompt.ids), n_tokens, SamplingParams(**sampling), detects_loops=True, shown_ids=prompt.keep_special
    )
    deltas = "".join(delta.text for delta in opened.engine.generate(asked))
    splitter = prompt.splitter()
    pieces = [*splitter.push(deltas), *splitter.finish()]
    return "".join(piece for channel, piece in pieces if channel == "content")


def test_a_chat_is_what_the_engine_says(server: Live, opened: Opened) -> None:
    reply = server.openai.chat.completions.create(model="tiny", messages=user("what is in a name?"), **GREEDY)
    choice = reply.choices[0]
    assert choice.message.content == said_by_engine(opened, "what is in a name?", 12, temperature=0)
    assert choice.finish_reason == "length"
    assert choice.message.role == "assistant"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 12
    assert reply.usage.prompt_tokens == server.n_prompt("what is in a name?")
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 12
    timings = reply.model_extra["timings"]  # type: ignore[index]
    assert timings["predicted_n"] == 12
    assert timings["prompt_n"] + timings["cache_n"] == reply.usage.prompt_tokens
    assert timings["predicted_ms"] > 0


def test_every_sampling_parameter_reaches_the_engine(server: Live, opened: Opened) -> None:
    sampling = {"temperature": 1.3, "top_p": 0.9, "seed": 0, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    extra = {"top_k": 7, "min_p": 0.01, "repetition_penalty": 1.2, "typical_p": 0.95}
    bias = {"40": 2.5, "41": -100}
    reply = server.openai.chat.completions.create(
        model="tiny", messages=user("go"), max_tokens=20, logit_bias=bias, extra_body=extra, **sampling
    )
    wanted = said_by_engine(opened, "go", 20, logit_bias={40: 2.5, 41: -100}, **sampling, **extra)
    assert reply.choices[0].message.content == wanted
    assert reply.model_extra["timings"]["seed"] == 0  # type: ignore[index]


def rounded(logprobs: Any) -> list[Any]:
    """Sums are taken in another order where the prompt was in the cache."""
    entries = logprobs.content if logprobs else []
    return [
        (entry.token, entry.bytes, pytest.approx(entry.logprob, abs=1e-3), [top.token for top in entry.top_logprobs])
        for entry in entries
    ]


def joined(chunks: list[Any]) -> list[dict[str, Any]]:
    """Each choice of a stream put together."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            whole = found.setdefault(choice.index, {"content": "", "logprobs": [], "finish_reason": None})
            assert whole["finish_reason"] is None, "something came after the finish"
            whole["content"] += choice.delta.content or ""
            whole["logprobs"] += rounded(choice.logprobs)
            whole["finish_reason"] = choice.finish_reason
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0, "logprobs": True, "top_logprobs": 3},
        {"temperature": 1.0, "seed": 7, "n": 3},
        {"temperature": 1.5, "seed": 3, "stop": ["e", "th"], "logprobs": True},
    ],
    ids=["greedy", "choices", "stops"],
)
def test_streaming_equals_not_streaming(server: Live, asked: dict[str, Any]) -> None:
    asked = {"model": "tiny", "messages": user("tell me a tale"), "max_tokens": 30, **asked}
    whole = server.openai.chat.completions.create(**asked)
    stream = server.openai.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked)
    chunks = list(stream)
    assert joined(chunks) == [
        {
            "content": choice.message.content,
            "logprobs": rounded(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }
        for choice in whole.choices
    ]
    assert len(whole.choices) == asked.get("n", 1)
    # V07: the last chunk has the usage and no choices, the others have none.
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_choice_i_has_the_ith_seed(server: Live) -> None:
    asked = {"model": "tiny", "messages": user("a tale"), "max_tokens": 15, "temperature": 1.2}
    several = server.openai.chat.completions.create(n=3, seed=40, **asked)
    texts = [choice.message.content for choice in several.choices]
    alone = [server.openai.chat.completions.create(seed=40 + i, **asked).choices[0].message.content for i in range(3)]
    assert texts == alone
    assert len(set(texts)) == 3
    assert several.usage is not None
    # The prompt counts once, its answers all.
    assert several.usage.prompt_tokens == server.n_prompt("a tale")
    timings = several.model_extra["timings"]  # type: ignore[index]
    # The second and third choice found the prompt that the first had read, but for one token.
    assert timings["cache_n"] >= 2 * (several.usage.prompt_tokens - 1)


def test_sixteen_unequal_prompts_at_once_equal_one_at_a_time(server: Live) -> None:
    """S06, S07, P08"""
    prompts = [f"{i} {'word ' * (i % 5) * 3}{'x' * i}" for i in range(16)]

    def ask(text: str) -> tuple[str | None, int]:
        reply = server.openai.chat.completions.create(
            model="tiny", messages=user(text), temperature=0, max_tokens=5 + len(text) % 17
        )
        assert reply.usage is not None
        return reply.choices[0].message.content, reply.usage.completion_tokens

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, prompts))
    assert together == [ask(text) for text in prompts]
    assert len({text for text, _ in together}) == 16
    assert [n for _, n in together] == [5 + len(text) % 17 for text in prompts]


def test_cached_tokens_are_told(server: Live) -> None:
    text = "a question that nobody has asked before"
    n_prompt = server.n_prompt(text)
    first, second = (server.chat(text, max_tokens=2).json() for _ in range(2))
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] < n_prompt - 10
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == n_prompt - 1
    assert second["timings"]["prompt_n"] == 1


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(server: Live, is_streamed: bool) -> None:
    """V03, V04: never cut; with room for one token it answers that one."""
    spare = 128 - server.n_prompt("")
    fits = server.chat("x" * (spare - 1), temperature=0, stream=is_streamed)
    assert fits.status_code == 200
    assert '"finish_reason":"length"' in fits.text
    for n in (spare, spare + 1, 3 * 128):
        refused = server.chat("x" * n, stream=is_streamed)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == "messages"
        assert f"{128 - spare + n} tokens" in error["message"]
        assert "context holds 128" in error["message"]


def test_completions_go_on_from_text_and_from_ids(server: Live) -> None:
    text = "in the beginning there was"
    ids = server.post("/tokenize", content=text, add_special=True).json()["tokens"]
    asked: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 9}
    by_text = server.openai.completions.create(prompt=text, **asked)
    by_ids = server.openai.completions.create(prompt=ids, **asked)
    assert by_text.choices[0].text == by_ids.choices[0].text != ""
    assert by_text.usage is not None
    assert by_text.usage.prompt_tokens == len(ids)
    both = server.openai.completions.create(prompt=[text, "no"], n=2, **asked)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == both.choices[1].text == by_text.choices[0].text
    streamed = ["", "", "", ""]
    for chunk in server.openai.completions.create(prompt=[text, "no"], n=2, stream=True, **asked):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in both.choices]


def test_completions_are_sixteen_tokens_long_unless_asked(server: Live) -> None:
    reply = server.openai.completions.create(model="tiny", prompt="on", temperature=0, logprobs=2)
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 16
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.text_offset is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 16
    assert all(len(best) == 2 for best in logprobs.top_logprobs or [])
    assert all(value <= 0 for value in logprobs.token_logprobs)
    assert logprobs.text_offset == sorted(set(logprobs.text_offset))
    assert logprobs.text_offset[0] == 0


def test_models(server: Live) -> None:
    assert [model.id for model in server.openai.models.list()] == ["tiny"]
    assert server.openai.models.retrieve("tiny").owned_by == "bytefloor"
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        server.openai.models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError) as refused:
        server.openai.chat.completions.create(model="gpt-9", messages=user("hi"))
    assert refused.value.code == "model_not_found"
    assert refused.value.param == "model"


def test_content_in_parts_is_a_text_of_lines(server: Live) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    rendered = server.post("/apply-template", messages=[{"role": "user", "content": parts}]).json()
    assert rendered["prompt"] == "[user] one\ntwo\n[assistant] "


def test_control_tokens_that_a_user_types_stay_text(server: Live) -> None:
    """One token for each of its letters, here and in /tokenize."""
    assert server.n_prompt("<eos>") == server.n_prompt("#####")
    assert len(server.post("/tokenize", content="<eos>").json()["tokens"]) == 5
    assert server.post("/tokenize", content="<eos>", parse_special=True).json()["tokens"] == [1]
