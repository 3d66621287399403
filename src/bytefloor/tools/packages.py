"""Packages that a verb cannot do without, asked for before anything is imported."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from bytefloor.errors import RequestError

CLIENT = ("httptools", "psutil", "tokenizers", "jinja2", "llguidance")
"""What a load generator imports, the engine's own among them."""
SERVER = (*CLIENT, "msgspec", "prometheus_client", "starlette", "uvicorn")


def require(modules: Iterable[str], verb: str) -> None:
    """RequestError that names all which are not installed."""
    missing = [module.replace("_", "-") for module in modules if find_spec(module) is None]
    if missing:
        raise RequestError(f"{verb} needs packages that are not installed: {', '.join(missing)}")
