"""``chat``: a conversation. What earlier turns computed is kept, and each answer says how much of it was reused."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bytefloor.engine.loading import EngineOptions, Legible, Opened
from bytefloor.engine.request import Request
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.errors import BytefloorError, RequestError
from bytefloor.text.chat import Message
from bytefloor.text.stop import StopMatcher
from bytefloor.tools.run import Printer
from bytefloor.tools.session import Answer, as_text, count_tokens, open_with_progress, stream_answer, summary, write

HELP = """\
/help                this list
/exit                leave (also Ctrl-D)
/reset               forget the conversation
/undo                forget the last question and its answer
/retry               answer the last question again
/system TEXT         set the system message and start over; without TEXT remove it
/thinking on|off|auto   ask the template for thinking
/thinking show|hide  show or hide it
/temp X              temperature
/context             how full the context is
A line that ends in \\ goes on in the next one. Ctrl-C ends an answer."""


@dataclass(frozen=True)
class ChatOptions:
    """What ``chat`` was asked."""

    sampling: SamplingParams
    n_tokens: int
    stops: tuple[str, ...]
    system: str | None
    thinking: bool | None
    is_thought_shown: bool
    detects_loops: bool = True


class Leave(Exception):
    """The user is done."""


class Conversation:
    """The turns so far and how to take the next one."""

    def __init__(self, opened: Opened, options: ChatOptions) -> None:
        self.opened = opened
        self.options = options
        self.template = opened.chat_template()
        self.turns: list[Message] = []
        self.n_context = 0

    @property
    def messages(self) -> list[Message]:
        """System message and turns."""
        head = [Message("system", self.options.system)] if self.options.system is not None else []
        return [*head, *self.turns]

    def ask(self, text: str) -> Answer:
        """Put a question and stream the answer. Without a single token of one the conversation stays as it was."""
        question = Message("user", text)
        answer = self._answer([*self.messages, question])
        if answer.ids:
            self.turns += [question, Message("assistant", answer.text, reasoning=answer.reasoning or None)]
        return answer

    def _answer(self, messages: Sequence[Message]) -> Answer:
        prompt = self.template.prepare(messages, thinking=self.options.thinking)
        capacity = self.opened.engine.capacity
        if len(prompt.ids) >= capacity:
            raise RequestError(
                f"the conversation has {len(prompt.ids)} tokens with this question, the context holds {capacity}; "
                "/undo or /reset makes room, or start with a larger -c"
            )
        request = Request(
            prompt_ids=tuple(prompt.ids),
            max_tokens=count_tokens(self.options.n_tokens),
            sampling=self.options.sampling,
            stops=self.options.stops,
            detects_loops=self.opened.detects_loops and self.options.detects_loops,
            shown_ids=prompt.keep_special,
            thinking=prompt.thinking,
        )
        printer = Printer(self.options.is_thought_shown)
        answer = stream_answer(self.opened.engine, request, prompt.splitter(), printer)
        self.n_context = len(prompt.ids) + len(answer.ids)
        return answer

    def undo(self, verb: str = "undo") -> str:
        """Forget the last question and answer; returns the question. verb: what there may be nothing to do with."""
        if len(self.turns) < 2:
            raise RequestError(f"there is nothing to {verb}")
        question = self.turns[-2].content
        del self.turns[-2:]
        return question

    def command(self, line: str) -> str | None:
        """Carry out a /command; a text that comes back is a question to ask."""
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        commands: dict[str, Callable[[str], str | None]] = {
            "/help": lambda _: _say(HELP),
            "/exit": _leave,
            "/quit": _leave,
            "/reset": self._reset,
            "/undo": lambda _: _say(f"forgotten: {self.undo()}"),
            "/retry": lambda _: self.undo("retry"),
            "/system": self._set_system,
            "/thinking": self._set_thinking,
            "/temp": self._set_temperature,
            "/context": lambda _: _say(f"{self.n_context} of {self.opened.engine.capacity} positions used"),
        }
        if word not in commands:
            raise RequestError(f"{word} is no command; /help lists them")
        return commands[word](rest)

    def _reset(self, _: str) -> None:
        self.turns.clear()
        self.n_context = 0
        _say("the conversation is empty")

    def _set_system(self, text: str) -> None:
        self.options = replace(self.options, system=text or None)
        self._reset("")

    def _set_thinking(self, word: str) -> None:
        if word in ("show", "hide"):
            self.options = replace(self.options, is_thought_shown=word == "show")
        elif word == "on" and not self.template.supports_thinking:
            raise RequestError("/thinking on: the model's chat template has no thinking to turn on")
        elif word in ("on", "off", "auto"):
            self.options = replace(self.options, thinking={"on": True, "off": False, "auto": None}[word])
        else:
            raise RequestError(f"/thinking {word}: expected on, off, auto, show or hide")

    def _set_temperature(self, word: str) -> None:
        try:
            value = float(word)
        except ValueError:
            raise RequestError(f"/temp {word}: expected a number") from None
        self.options = replace(self.options, sampling=replace(self.options.sampling, temperature=value))


def _say(text: str) -> None:
    """Everything but answers goes to standard error, as with ``run``."""
    print(text, file=sys.stderr)


def _leave(_: str) -> None:
    raise Leave


def converse(model: str | None, options: EngineOptions, asked: ChatOptions) -> None:
    """Read questions until the user leaves. Ctrl-C on a terminal drops the line that is being typed."""
    count_tokens(asked.n_tokens)
    StopMatcher(asked.stops)

    def look(legible: Legible, _: int) -> None:
        if not legible.chat_template().supports_thinking and asked.thinking:
            raise RequestError("--thinking: the model's chat template has no thinking to turn on")

    conversation = Conversation(open_with_progress(model, options, look), asked)
    _introduce(conversation)
    read = _reader()
    while True:
        try:
            _take_line(conversation, read())
        except (EOFError, Leave):
            return
        except BytefloorError as error:
            _say(f"error: {error}")
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            _say("Ctrl-D or /exit leaves")


def _introduce(conversation: Conversation) -> None:
    opened = conversation.opened
    for notice in conversation.template.notices:
        _say(f"note: {notice}")
    config = opened.model.config
    _say(f"{config.name} ({config.family}), context {opened.engine.capacity}, {opened.device}; /help")


def _take_line(conversation: Conversation, line: str) -> None:
    question: str | None = line
    before = list(conversation.turns)
    if line.startswith("/"):
        question = conversation.command(line)
    if question is None or not question.strip():
        return
    try:
        answer = conversation.ask(question)
    except BaseException:
        conversation.turns = before  # /retry has taken a turn back already
        raise
    write("\n")
    _say(summary(answer.finish, conversation.opened))


def _reader() -> Callable[[], str]:
    """Line editing and history on a terminal; plain lines from a pipe."""
    if not sys.stdin.isatty():
        return lambda: _joined(_plain_line)
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = _history_path()
    session: PromptSession[str] = PromptSession(history=FileHistory(str(path)) if path else InMemoryHistory())
    return lambda: _joined(session.prompt)


def _plain_line(_: str) -> str:
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return as_text(line, "the line").rstrip("\r\n")


def _joined(read: Callable[[str], str]) -> str:
    """One question; a line that ends in a backslash goes on in the next."""
    lines = [read("> ")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        try:
            lines.append(read(". "))
        except EOFError:
            break
    return "\n".join(lines)


def _history_path() -> Path | None:
    """None where nothing can be kept. What was asked is nobody else's business: only the user can read it."""
    try:
        path = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "bytefloor" / "chat_history"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        return None
    return path if os.access(path, os.R_OK | os.W_OK) else None
