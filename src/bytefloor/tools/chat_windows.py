"""Conversations as windows: the model is shown all that goes before an assistant's turn, and the turn's tokens count.

A line of the file is a conversation: ``{"messages": [{"role": ..., "content": ...}, ...]}``, messages as they are sent
to the server. Each turn is shown as the template asks for it: as if the model were about to write it.
"""

from __future__ import annotations

from collections.abc import Sequence

from bytefloor.errors import RequestError
from bytefloor.server.bodies import Body, MessageBody, decode
from bytefloor.server.messages import as_messages
from bytefloor.server.refusal import Refusal
from bytefloor.text.chat import ChatTemplate, Message
from bytefloor.text.tokenizer import Tokenizer
from bytefloor.tools.windows import Window


class Conversation(Body):
    """A line of the file."""

    messages: list[MessageBody]


def read_conversations(text: str) -> list[tuple[int, list[Message]]]:
    """(number of the line, messages) of each line that is not empty. RequestError names the line and the field."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append((number, as_messages(decode(line.encode(), Conversation).messages)))
        except Refusal as refusal:
            raise RequestError(f"line {number}: {refusal.message}") from None
    return found


def cut_conversations(text: str, template: ChatTemplate, tokenizer: Tokenizer) -> list[Window]:
    """Windows of all assistant turns. Turns of one conversation share a window where the later ones' prompt goes on
    from the earlier answer; where a template drops or changes what has been said they cannot.

    RequestError for a conversation without such a turn, or one that the template does not show.
    """
    windows: list[Window] = []
    for number, messages in read_conversations(text):
        try:
            windows += _windows_of(number, messages, template, tokenizer.end_ids)
        except RequestError as error:
            raise RequestError(f"line {number}: {error}") from None
    if not windows:
        raise RequestError("there are no conversations: expected a line of JSON for each")
    return windows


def _windows_of(
    number: int, messages: Sequence[Message], template: ChatTemplate, end_ids: frozenset[int]
) -> list[Window]:
    turns = [place for place, message in enumerate(messages) if message.role == "assistant"]
    if not turns:
        raise RequestError("no turn of the assistant: there is nothing to score")
    if turns[0] == 0:
        raise RequestError("messages[0] is the assistant's, expected a turn before it that it answers")
    found: list[Window] = []
    for place in turns:
        ids, first = _shown(messages[: place + 1], template, place)
        # What a template puts behind the token that ends a turn is nothing that a model writes.
        end = next((i for i in range(first, len(ids)) if ids[i] in end_ids), len(ids) - 1) + 1
        targets = range(first, end)
        if not targets:
            raise RequestError(f"messages[{place}]: the template shows nothing of this turn")
        before = found[-1] if found else None
        if before is not None and ids[: len(before.ids)] == before.ids:
            found[-1] = Window(ids[:end], [*before.targets, *targets], before.name)
        else:
            found.append(Window(ids[:end], list(targets), f"line {number}, messages[{place}]"))
    return found


def _shown(messages: Sequence[Message], template: ChatTemplate, place: int) -> tuple[list[int], int]:
    """Tokens up to and including the last message, and where those begin that the model would write."""
    before = template.prepare(messages[:-1], add_generation_prompt=False)
    asked = template.prepare(messages[:-1], add_generation_prompt=True)
    whole = template.prepare(messages, add_generation_prompt=False)
    if not (asked.text.startswith(before.text) and whole.text.startswith(before.text)):
        raise RequestError(
            f"messages[{place}]: with this turn the template shows those before it otherwise than without"
        )
    n_alike = _n_alike(asked.ids, whole.ids)
    if whole.text.startswith(asked.text) or asked.is_thought_open:
        return whole.ids, n_alike
    # The template asks with more than it shows of old turns: an empty thought, for one.
    return [*asked.ids, *whole.ids[n_alike:]], len(asked.ids)


def _n_alike(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
