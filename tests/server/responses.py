"""What tests of the Responses API share: scripts, tools, and the prompts that bodies become."""

from __future__ import annotations

from typing import Any

from bytefloor.server.asked import ask_chat
from bytefloor.server.bodies import ChatBody, convert
from bytefloor.server.responses_bodies import ResponseBody
from bytefloor.server.responses_chat import ask_response
from server.live import Live, Scripted
from text.tool_chats import TOOLS

PATH = "/v1/responses"
Stage = tuple[Live, Scripted]
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nIt may rain.\n</think>\n\n"
FLAT: list[Any] = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]


def n_prompt(running: Live, body: dict[str, Any]) -> int:
    asked, _ = ask_response(convert(body, ResponseBody, ""), running.service.served)
    return len(asked.choices[0].request.prompt_ids)


def prompt_of(running: Live, **body: Any) -> str:
    asked, _ = ask_response(convert(body, ResponseBody, ""), running.service.served)
    return running.service.served.tokenizer.decode(list(asked.choices[0].request.prompt_ids), keep_special=True)


def chat_prompt_of(running: Live, messages: list[Any], **body: Any) -> str:
    chat = convert({"messages": messages, **body}, ChatBody, "")
    ids = ask_chat(chat, running.service.served).choices[0].request.prompt_ids
    return running.service.served.tokenizer.decode(list(ids), keep_special=True)
