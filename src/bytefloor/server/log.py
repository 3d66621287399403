"""Log lines as JSON, one a line."""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any

from bytefloor.server.ids import new_id

_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class JsonFormatter(logging.Formatter):
    """``time``, ``level``, ``event``, what ``extra={"facts": ...}`` brought, and a traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": at, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log_to_stderr() -> None:
    """Send the server's log, and uvicorn's, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name, level in (("bytefloor.server", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False


def request_id(given: bytes | None) -> str:
    """The client's own id where it is one that a log can hold, otherwise a random one."""
    if given is not None:
        text = given.decode("latin-1")
        if _ID.fullmatch(text):
            return text
    return f"req-{new_id(10)}"
