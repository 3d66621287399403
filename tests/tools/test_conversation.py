"""Turns of a conversation on a tiny model, and Ctrl-C in the middle of one."""

from __future__ import annotations

import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from bytefloor.engine.loading import EngineOptions, Opened, open_engine
from bytefloor.engine.request import Finish
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.errors import RequestError
from bytefloor.text.chat import Message
from bytefloor.tools import chat, interrupt, run
from bytefloor.tools.chat import ChatOptions, Conversation, Leave
from bytefloor.tools.session import Answer
from text.small_chats import GEMMA4_TOKENIZER
from tiny import build_tiny

TEMPLATE = """\
{% for m in messages %}[{{ m.role }}] {{ m.content }}
{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"""
OPTIONS = ChatOptions(SamplingParams(temperature=0), 6, (), None, None, True)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    root = tmp_path_factory.mktemp("chat")
    directory = root / "chatty"
    shutil.copytree(build_tiny("qwen3", root).directory, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return open_engine(directory, EngineOptions(context=200))


@pytest.fixture
def talk(opened: Opened) -> Conversation:
    return Conversation(opened, OPTIONS)


def test_a_second_turn_computes_only_what_is_new(talk: Conversation) -> None:
    first = talk.ask("what is in a name?").finish
    second = talk.ask("and then?").finish
    assert second.n_prompt > first.n_prompt + first.n_generated
    # The last token of the old prompt may join the answer's first letters.
    assert first.n_prompt - 1 <= second.n_cached < second.n_prompt
    assert f"{second.n_cached} of them from the cache" in run.summary(second, talk.opened)
    assert talk.n_context == second.n_prompt + second.n_generated


def test_the_line_at_the_end_tells_of_drafts_where_there_were_some(opened: Opened) -> None:
    finish = Finish("stop", "end of turn", 9, 0, 30, 0.1, 1.0, 1)
    assert "drafts" not in run.summary(finish, opened)
    line = run.summary(replace(finish, n_draft=40, n_draft_accepted=19), opened)
    assert "answer 30 tokens: 29.0 tok/s, 19 of 40 drafts right; context" in line


def test_retry_computes_one_token_of_the_prompt(talk: Conversation) -> None:
    first = talk.ask("again?")
    question = talk.command("/retry")
    assert question == "again?"
    assert talk.turns == []
    second = talk.ask(question)
    assert second.finish.n_cached == first.finish.n_prompt - 1
    assert second.text == first.text


def test_what_is_undone_leaves_no_trace(talk: Conversation) -> None:
    first = talk.ask("one")
    talk.ask("two")
    talk.command("/undo")
    assert [turn.content for turn in talk.turns] == ["one", first.text]
    talk.command("/undo")
    with pytest.raises(RequestError, match="nothing to undo"):
        talk.command("/undo")
    with pytest.raises(RequestError, match="nothing to retry"):
        talk.command("/retry")


def test_a_refused_retry_keeps_the_turn(talk: Conversation) -> None:
    talk.ask("one")
    before = list(talk.turns)
    talk.options = replace(talk.options, stops=("",))
    with pytest.raises(RequestError, match="stop string"):
        chat._take_line(talk, "/retry")
    assert talk.turns == before


def test_a_full_context_says_what_to_do_in_a_chat(talk: Conversation) -> None:
    with pytest.raises(RequestError, match=r"context holds 200; /undo or /reset makes room"):
        talk.ask("x" * 300)
    assert talk.turns == []


def test_commands_change_what_they_say(talk: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    talk.ask("hello")
    talk.command("/system be brief")
    assert [message.role for message in talk.messages] == ["system"]
    assert talk.command("/system") is None
    assert talk.messages == []
    talk.command("/temp 0.5")
    assert talk.options.sampling.temperature == 0.5
    talk.command("/thinking off")
    assert talk.options.thinking is False
    talk.command("/thinking hide")
    assert not talk.options.is_thought_shown
    capsys.readouterr()
    talk.command("/context")
    talk.command("/help")
    said = capsys.readouterr()
    assert said.err.startswith("0 of 200 positions used\n/help")
    assert said.out == ""
    with pytest.raises(Leave):
        talk.command("/exit")


@pytest.mark.parametrize("line", ["/", "/frob", "/temp", "/temp hot", "/temp -1", "/thinking", "/thinking on"])
def test_a_wrong_command_is_refused_and_changes_nothing(talk: Conversation, line: str) -> None:
    with pytest.raises(RequestError):
        talk.command(line)
    assert talk.options == OPTIONS


def test_an_empty_system_message_is_one(talk: Conversation) -> None:
    """As with ``run``: it keeps a template from putting in its own."""
    talk.options = replace(OPTIONS, system="")
    assert [message.content for message in talk.messages] == [""]


def press(monkeypatch: pytest.MonkeyPatch, n_times: int) -> list[str]:
    """Ctrl-C, as often, while the first piece of the answer is being written."""
    written: list[str] = []

    def write(text: str, stream: object = None) -> None:
        written.append(text)
        if len(written) == 1:
            for _ in range(n_times):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(run, "write", write)
    return written


def test_ctrl_c_ends_the_answer_and_keeps_what_was_said(talk: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    talk.options = replace(OPTIONS, n_tokens=50)
    written = press(monkeypatch, 1)
    answer = talk.ask("tell me")
    assert answer.finish.reason == "cancelled"
    assert 1 <= answer.finish.n_generated < 50
    assert "".join(written) == answer.text
    assert [turn.role for turn in talk.turns] == ["user", "assistant"]
    # What was computed is not lost.
    assert talk.ask("go on").finish.n_cached >= answer.finish.n_prompt - 1


def test_a_second_ctrl_c_interrupts_at_once_and_leaves_a_usable_engine(
    talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGINT)
    press(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        talk.ask("tell me")
    assert talk.turns == []
    assert not talk.opened.engine.has_work
    assert signal.getsignal(signal.SIGINT) is before
    assert talk.ask("and now?").finish.n_generated > 0


def test_an_answer_that_never_began_leaves_no_turn(talk: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Finish("cancelled", "cancelled", 9, 0, 0, 0.0, 0.0, 0)
    monkeypatch.setattr(chat, "stream_answer", lambda *_: Answer("", "", (), (), finish))
    talk.ask("tell me")
    assert talk.turns == []


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    """A script's background job shares the terminal with what Ctrl-C is meant for."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupt.between_steps() as is_pressed:
            signal.raise_signal(signal.SIGINT)
            assert not is_pressed()
    finally:
        signal.signal(signal.SIGINT, before)


def test_history_is_private_and_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = chat._history_path()
    assert path == tmp_path / "bytefloor" / "chat_history"
    assert path.stat().st_mode & 0o077 == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(path))  # a file: no folder can be made in it
    assert chat._history_path() is None


def test_a_backslash_joins_lines() -> None:
    lines = iter(["one\\", "two\\", "three"])
    assert chat._joined(lambda _: next(lines)) == "one\ntwo\nthree"


@pytest.mark.parametrize(("per_layer_width", "wanted"), [(0, "<|channel>thought\n<channel|>"), (16, "model\n")])
def test_small_gemma4_models_without_a_template_get_a_bare_model_turn(
    opened: Opened, per_layer_width: int, wanted: str
) -> None:
    """G14"""
    config = replace(opened.model.config, family="gemma4", per_layer_width=per_layer_width)
    bare = replace(opened, template=None, tokenizer=GEMMA4_TOKENIZER, model=replace(opened.model, config=config))
    assert Conversation(bare, OPTIONS).template.render([Message("user", "hi")]).endswith(wanted)
