"""What a grammar costs a token: `PYTHONPATH=src:tests python tests/grammar_costs.py VOCABULARY.gguf`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.text.grammar import GrammarKind, compile_grammar
from bytefloor.text.tokenizer import Tokenizer

N = 120
ITEM = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "kind": {"enum": [f"k{n}" for n in range(50)]},
        "note": {"type": "string"},
    },
    "required": ["id", "kind", "note"],
    "additionalProperties": False,
}
KINDS: list[tuple[Any, Any]] = [
    ({"type": "string", "maxLength": 200}, 'some text here, quite "long"'),
    ({"type": "array", "items": ITEM}, [{"id": 7, "kind": "k7", "note": "nothing to say"}]),
    ({"type": "number", "minimum": 0, "maximum": 1e6}, 1.5),
]
PROPERTIES = {f"field_{n}": KINDS[n % 3][0] for n in range(N)}
LARGE = {"type": "object", "properties": PROPERTIES, "required": list(PROPERTIES), "additionalProperties": False}
VALUE = {f"field_{n}": KINDS[n % 3][1] for n in range(N)}
PAIRS = r"""
root ::= "{" ws pair ("," ws pair)* "}"
pair ::= text ":" ws text
text ::= "\"" [^"]* "\""
ws ::= [ \n]*
"""


def measure(tokenizer: Tokenizer, name: str, kind: GrammarKind, source: Any, answer: str) -> str:
    """One row: milliseconds to compile; of mask, unpacking and taking a token in, median, mean and most."""
    start = time.perf_counter()
    grammar = compile_grammar(tokenizer, kind, source)
    cells = [f"{(time.perf_counter() - start) * 1e3:.0f}"]
    constraint = grammar.start(())
    seconds: list[list[float]] = []
    for id in tokenizer.encode(answer, add_bos=False):
        times = [time.perf_counter()]
        for work in (constraint.prepare, constraint.allowed, lambda id=id: constraint.accept(id)):
            work()
            times.append(time.perf_counter())
        seconds.append(np.diff(times).tolist())
    for column in np.array(seconds).T * 1e3:
        cells.append(f"{np.median(column):.3f} / {column.mean():.3f} / {column.max():.1f}")
    return f"| {name} | {len(seconds)} | {' | '.join(cells)} |"


if __name__ == "__main__":
    tokenizer = Tokenizer.from_gguf(open_checkpoint(Path(sys.argv[1])).metadata)
    start = time.perf_counter()
    tokenizer.guide  # noqa: B018
    print(f"{tokenizer.n_tokens} tokens, guide {time.perf_counter() - start:.1f} s")
    print("| ms | tokens | compile | mask | unpack | accept |\n|---|---|---|---|---|---|")
    print(measure(tokenizer, "json_object", "json_object", None, json.dumps(VALUE, indent=2)))
    print(measure(tokenizer, "schema of 120 properties", "json_schema", LARGE, json.dumps(VALUE, indent=2)))
    print(measure(tokenizer, "GBNF of pairs", "gbnf", PAIRS, json.dumps({f"k{n}": "some text" for n in range(40)})))
    print(measure(tokenizer, "a character a rule", "lark", "start: c*\nc: /[a-z ]/", "hello there the fox " * 8))
