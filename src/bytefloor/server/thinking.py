"""How long an answer may think, as each protocol asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bytefloor.server.bodies import ChatBody, TemplateBody
from bytefloor.server.refusal import bad_field
from bytefloor.server.sampling import in_range

BUDGETS: dict[str, int | None] = {"none": 0, "minimal": 512, "low": 1024, "medium": 4096, "high": 16384, "xhigh": None}
"""Tokens of thought that an effort stands for: 0 turns thinking off, None lets it go on as long as the model likes."""
MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class WantedThinking:
    """is_on: None leaves it to the template. n_most: tokens of thought, None without limit. at: the field that said so,
    "" where none did."""

    is_on: bool | None = None
    n_most: int | None = None
    at: str = ""


def by_effort(effort: Any, at: str) -> WantedThinking:
    """An effort, one of `BUDGETS`; None says nothing. Refusal 400 for another, naming the field `at`."""
    if effort is None:
        return WantedThinking()
    if not isinstance(effort, str) or effort not in BUDGETS:
        raise bad_field(at, f"{at} = {effort!r}: expected {', '.join(BUDGETS)}")
    n_most = BUDGETS[effort]
    return WantedThinking(False, None, at) if n_most == 0 else WantedThinking(True, n_most, at)


def by_budget(n_tokens: int | None, at: str) -> WantedThinking:
    """So many tokens of thought; of 0 it is closed as soon as it opens. Refusal 400 for less, naming the field `at`."""
    if n_tokens is None:
        return WantedThinking()
    in_range(at, n_tokens, int, 0, MOST_TOKENS)
    return WantedThinking(True, n_tokens, at)


def wanted_thinking(body: ChatBody | TemplateBody) -> WantedThinking:
    """From the body's effort or its budget. Refusal 400 where fields contradict each other."""
    if body.reasoning_effort is not None and body.thinking_budget is not None:
        message = "reasoning_effort and thinking_budget are given together: an answer has one budget, give one of them"
        raise bad_field("thinking_budget", message)
    wanted = by_budget(body.thinking_budget, "thinking_budget")
    if body.reasoning_effort is not None:
        wanted = by_effort(body.reasoning_effort, "reasoning_effort")
    told = (body.chat_template_kwargs or {}).get("enable_thinking")
    if None not in (told, wanted.is_on) and told != wanted.is_on:
        turned = "on" if wanted.is_on else "off"
        message = f"{wanted.at} turns thinking {turned}, chat_template_kwargs.enable_thinking is {str(told).lower()}"
        raise bad_field(wanted.at, f"{message}: give one of them")
    return wanted
