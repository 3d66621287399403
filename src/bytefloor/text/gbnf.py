"""GBNF, llama.cpp's grammars, as the Lark grammars that llguidance reads.

llguidance brings the translation. What it would get wrong is written differently before, or refused: escapes by code
point, a dot that means newlines too, character classes that Rust's regular expressions read as set operations.
"""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

from bytefloor.errors import RequestError

_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\r\n]*|\.|[^"\[#.]+|.', re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_ANY = "[\\x00-\U0010ffff]"
_RULE = re.compile(r"^([a-z][a-z0-9_]*):", re.MULTILINE)
_TERMINAL = re.compile(r"^([A-Z][A-Z0-9_]*):", re.MULTILINE)
_NAME_OR_LITERAL = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|[A-Za-z_][A-Za-z0-9_]*')
_SET_OPERATION = re.compile(r"&&|--|~~")


def to_lark(source: str) -> str:
    """A Lark grammar. RequestError for what is no GBNF or not supported.

    Rules without recursion come back as terminals, which are greedy: they take all that they can match, and what should
    follow never may. So they are made rules again.
    """
    text = "".join(_settled(match[0]) for match in _TOKEN.finditer(source))
    try:
        return _as_rules(gbnf_to_lark(text))
    except Exception as error:  # it raises nothing more particular
        raise RequestError(f"gbnf: {' '.join(str(error).split())}") from None


def _as_rules(lark: str) -> str:
    taken = set(_RULE.findall(lark))
    names: dict[str, str] = {}
    for name in _TERMINAL.findall(lark):
        rule = name.lower()
        while rule in taken:
            rule += "_x"
        taken.add(rule)
        names[name] = rule
    return _NAME_OR_LITERAL.sub(lambda match: names.get(match[0], match[0]), lark)


def _settled(token: str) -> str:
    if token == ".":
        return _ANY
    if token.startswith("["):
        if _SET_OPERATION.search(token):
            raise RequestError(
                f"gbnf: {token}: a class with &&, -- or ~~ is not supported; write \\x26, \\x2d or \\x7e"
            )
        return _ESCAPE.sub(_in_class, token)
    return _ESCAPE.sub(_in_text, token) if token.startswith('"') else token


def _in_text(escape: re.Match[str]) -> str:
    """Code points as themselves, but for what cannot stand in a literal."""
    code = _code(escape)
    if code is None:
        return escape[0]
    return f"\\x{code:02x}" if code < 0x20 or chr(code) in '"\\' else chr(code)


def _in_class(escape: re.Match[str]) -> str:
    """Up to 0xFF as \\xNN, which stands for the code point there too; above it, as itself."""
    code = _code(escape)
    if code is None:
        return escape[0]
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


def _code(escape: re.Match[str]) -> int | None:
    digits = escape[1] or escape[2] or escape[3]
    if digits is None:
        return None
    code = int(digits, 16)
    if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
        raise RequestError(f"gbnf: {escape[0]}: not a character")
    return code
