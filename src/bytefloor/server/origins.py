"""What is wrong with a chat in the words of the body it was made of."""

from __future__ import annotations

import re
from collections.abc import Mapping

from bytefloor.server.refusal import Refusal

_PATH = re.compile(r"[\w.\[\]]+")


def own_words(refusal: Refusal, origins: Mapping[str, str]) -> Refusal:
    """The refusal, the field at the beginning of its message by the name that the client gave it.

    origins: fields of the chat, and which of the body's each came from.
    """
    message = _PATH.sub(lambda found: _origin(found.group(), origins), refusal.message, count=1)
    param = None if refusal.param is None else _origin(refusal.param, origins)
    return Refusal(refusal.status, message, param, refusal.code)


def _origin(path: str, origins: Mapping[str, str]) -> str:
    """By the longest beginning of the path that is known."""
    known = [name for name in origins if path == name or path.startswith((f"{name}.", f"{name}["))]
    if not known:
        return path
    longest = max(known, key=len)
    return origins[longest] + path[len(longest) :]
