"""Grammars over vocabularies, small and real: exact bytes, ends exactly where allowed, thoughts before the answer."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from small_vocabularies import GEMMA4, GEMMA4_ADDED, byte_level, id_of, sentencepiece

from answers import answer
from bytefloor.errors import RequestError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.text.grammar import Grammar, compile_grammar
from bytefloor.text.reasoning import CHANNEL, THINK, split_reasoning
from bytefloor.text.tokenizer import Tokenizer

TINY = Tokenizer.from_gguf(
    byte_level(
        ("<end>", "<turn>"), ("<think>", "</think>", "<tool>"), eos_token_id="<end>", eot_token_id="<turn>"
    )
)  # fmt: skip
PIECES = Tokenizer.from_gguf(sentencepiece())
REAL = ["llama-bpe", "qwen2", "gemma-4", "llama-spm", "gpt-2"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "kinds": {"type": "array", "items": {"enum": ["naïve", "größer", "日本"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "size", "kinds"],
    "additionalProperties": False,
}


@functools.cache
def real(path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(open_checkpoint(path).metadata)


@pytest.fixture(params=[*REAL, "demo"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Real vocabularies, and the one of the demo model."""
    if request.param == "demo":
        return real(request.getfixturevalue("smollm2_path"))
    return real(request.getfixturevalue("shared_dir") / "vocab" / f"ggml-vocab-{request.param}.gguf")


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_bos=False)


def fits(grammar: Grammar, ids: list[int], prompt_ids: tuple[int, ...] = ()) -> bool:
    """Whether these tokens are a whole answer, at the start of a text."""
    constraint = grammar.start(prompt_ids)
    for id in ids:
        if not constraint.allowed()[id]:
            return False
        constraint.accept(id)
    return bool(constraint.allowed()[sorted(grammar.tokenizer.end_ids)].all())


# --- vocabularies


def test_words_are_the_bytes_that_decoding_gives(tokenizer: Tokenizer) -> None:
    words = tokenizer.guide.words
    assert words.vocab_size == tokenizer.n_tokens
    never = tokenizer.control_ids | tokenizer.suppressed_ids | tokenizer.end_ids
    plain = [id for id in range(tokenizer.n_tokens) if id not in never]
    for id in plain[:: max(1, len(plain) // 20_000)]:
        data = tokenizer.token_bytes(id)
        # 0xFF begins no text, and is llguidance's own sign.
        if tokenizer.token_text(id) != "<unk>" and data[:1] != b"\xff":
            assert words.decode_bytes([id]) == data, id
    special = {id for id in range(tokenizer.n_tokens) if words.is_special_token(id)}
    assert special == tokenizer.control_ids | tokenizer.end_ids
    assert sorted(words.eos_tokens) == sorted(tokenizer.end_ids)


def test_a_grammar_of_anything_takes_every_text_token_and_no_other(tokenizer: Tokenizer) -> None:
    """But for bytes that begin no character."""
    mask = compile_grammar(tokenizer, "regex", r"(?s:.)*").start((0,)).allowed()
    never = sorted(tokenizer.control_ids | tokenizer.suppressed_ids)
    assert not mask[[id for id in never if id not in tokenizer.end_ids]].any()
    assert mask[sorted(tokenizer.end_ids)].all()
    for id in np.flatnonzero(~mask).tolist():
        data = tokenizer.token_bytes(id)
        is_text = id not in never and tokenizer.token_text(id) != "<unk>" and data.strip(b" ")
        assert not is_text or not begins_text(data), (id, data)


def begins_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True


@pytest.mark.parametrize("indent", [None, 2])
def test_the_models_own_spelling_of_a_right_answer_is_allowed(tokenizer: Tokenizer, indent: int | None) -> None:
    value = {"name": "Zoë ☃", "size": 42, "kinds": ["naïve", "日本"]}
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    grammar = compile_grammar(tokenizer, "json_schema", SCHEMA)
    assert fits(grammar, encode(tokenizer, text))
    assert not fits(grammar, encode(tokenizer, text[:-1]))
    assert not fits(grammar, encode(tokenizer, text.replace("日", "月")))


def test_finished_answers_of_real_vocabularies_are_valid(tokenizer: Tokenizer) -> None:
    grammar = compile_grammar(tokenizer, "json_schema", json.dumps(SCHEMA))
    n_whole = 0
    for seed in range(3):
        # Behind a control token, where sentencepiece drops a space.
        start = min(tokenizer.control_ids)
        ids, text, is_whole = answer(grammar, seed, n_rows=tokenizer.n_tokens + 5, n_most=120, prompt_ids=(start,))
        assert not tokenizer.suppressed_ids & set(ids)
        if is_whole:
            jsonschema.validate(json.loads(text), SCHEMA)
            n_whole += 1
    assert n_whole


def test_an_end_token_that_is_marked_as_text_is_no_text() -> None:
    """Else a quoted `</s>` would end the answer in the middle of a string."""
    metadata = byte_level(added=("</s>",), eos_token_id="</s>")
    metadata["tokenizer.ggml.token_type"][-1] = 1
    tokenizer = Tokenizer.from_gguf(metadata)
    (end,) = tokenizer.end_ids
    assert tokenizer.vocabulary.kinds[end] == 1
    constraint = compile_grammar(tokenizer, "regex", "</s>x").start((0,))
    assert not constraint.allowed()[end]
    assert constraint.allowed()[id_of(tokenizer, "<")]


def test_without_an_end_token_a_grammar_ends_where_nothing_can_follow() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level())
    assert not tokenizer.end_ids
    constraint = compile_grammar(tokenizer, "regex", "ab?").start(())
    constraint.accept(id_of(tokenizer, "a"))
    assert np.flatnonzero(constraint.allowed()).tolist() == [id_of(tokenizer, "b")]
    constraint.accept(id_of(tokenizer, "b"))
    assert constraint.is_complete


def test_where_a_text_starts_the_dropped_space_is_none() -> None:
    """Llama 2's first token brings a space that nobody sees; inside the text the same token has one."""
    control, word, space_word = id_of(PIECES, "<s>"), id_of(PIECES, "a"), id_of(PIECES, "▁a")
    byte = id_of(PIECES, "<0x61>")
    grammar = compile_grammar(PIECES, "regex", "a( a)?")
    for start, allowed in ((control, {word, byte, space_word}), (word, {word, byte})):
        constraint = grammar.start((start,))
        assert set(np.flatnonzero(constraint.allowed()).tolist()) == allowed
    constraint = grammar.start((control,))
    constraint.accept(space_word)
    assert {space_word, *PIECES.end_ids} <= set(np.flatnonzero(constraint.allowed()).tolist())
    constraint.accept(space_word)
    assert constraint.is_complete
    assert PIECES.stream((control,)).push(space_word) == "a"


def test_a_space_that_the_answer_must_begin_with_is_seen() -> None:
    constraint = compile_grammar(PIECES, "regex", " a").start((id_of(PIECES, "<s>"),))
    allowed = [PIECES.vocabulary.text(id) for id in np.flatnonzero(constraint.allowed())]
    assert allowed == ["▁▁"]  # shown as one space


# --- kinds of grammar


@pytest.mark.parametrize("pattern", [r"[a-c]{2,5}", r"(yes|no|maybe)", r"\d{1,3}(\.\d+)?", r"(?i)abc", r"[^x]{0,4}x"])
def test_answers_match_the_regex(pattern: str) -> None:
    grammar = compile_grammar(TINY, "regex", pattern)
    for seed in range(5):
        _, text, is_whole = answer(grammar, seed, n_most=200)
        assert not is_whole or re.fullmatch(pattern, text), text


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("regex", "(", r"^regex: '\(': unclosed group$"),
        ("regex", "[a-", r"^regex: '\[a-': unclosed character class$"),
        ("regex", "(?=a)", "regex: .*look-around"),
        ("regex", "", "regex: .*not empty"),
        ("lark", None, "lark: found NoneType"),
        ("lark", 'start: "a" b', 'lark: .*unknown name: "b"'),
        ("lark", 'start: %json {"not": {}}', "#: the keyword 'not'"),
        ("lark", "start: %json {", "lark: %json at character 7: not JSON"),
        ("lark", "start: a\na[temperature=0.5]: /a/", "lark: .*temperature"),
        ("lark", "start: <|nothing|>", "lark: .*nothing"),
        ("gbnf", 'root ::= "a', "gbnf: "),
        ("gbnf", "root ::= b", "gbnf: .*'b' not found"),
        ("gbnf", 'a ::= "x"', "gbnf: .*root"),
        ("gbnf", "root ::= <tool>", "gbnf: .*<tool>"),
        ("gbnf", "root ::= [a&&b]", "gbnf: .*&&"),
        ("gbnf", r'root ::= "\ud800"', "gbnf: .*not a character"),
        ("xml", "a", "grammar kind 'xml': expected one of json_object"),
    ],
)
def test_what_is_no_grammar_is_refused(kind: str, source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        compile_grammar(TINY, kind, source)  # type: ignore[arg-type]


ARITHMETIC = """root  ::= (expr "=" ws term "\\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \\t\\n]*
"""


@pytest.mark.parametrize(
    ("source", "right", "wrong"),
    [
        ('root ::= "a" [b-d]+ | "x" # a comment\n', ["abcd", "x"], ["a", "xa", "ab#"]),
        ('root ::= item ("," item)*\nitem ::= [0-9]{1,2}', ["1,22", "7"], ["1,", "123"]),
        ('root ::= "(" root? ")"', ["(())"], ["(()"]),
        (r'root ::= "\u00e9\x41" [\u0410-\u0412\x2d\]^]', ["éAБ", "éA-", "éA]", "éA^"], ["éA", "éAГ"]),
        (r'root ::= "\"\\\n." . "/" [/]', ['"\\\n.\n//', '"\\\n.q//'], ['"\\\nx\n//', '"\\\n.//']),
        ('root ::= [^"\\\\]+', ["abc\n"], ['"', "\\"]),
        # A rule takes no more than lets the rest of the answer follow.
        ('root ::= a-b "\\n" c\na-b ::= [^#]+\nc ::= "A" | "B"', ["hm\nA", "a\nb\nB"], ["hm", "#\nA"]),
        ('root ::= text "END"\ntext ::= [a-zA-Z ]*', ["hello END", "END"], ["hello"]),
        ('root ::= "x" ws ws "y"\nws ::= [ ]+', ["x  y", "x   y"], ["x y"]),
        ('root ::= name ", " name\nname ::= [A-Z] [a-z, ]*', ["Bob, Al"], ["Bob"]),
        (ARITHMETIC, ["1+2=3\n", "a*(b-2)=10\nc=1\n"], ["1+2=3", "=3\n"]),
    ],
)
def test_gbnf_means_what_llama_cpp_says(source: str, right: list[str], wrong: list[str]) -> None:
    grammar = compile_grammar(TINY, "gbnf", source)
    assert all(fits(grammar, encode(TINY, text)) for text in right)
    assert not any(fits(grammar, encode(TINY, text)) for text in wrong)


def test_lark_may_name_special_tokens_and_embed_a_schema() -> None:
    grammar = compile_grammar(TINY, "lark", 'start: <think> %json {"enum": ["a"]}')
    assert fits(grammar, [OPEN, *encode(TINY, '"a"')])
    assert not fits(grammar, encode(TINY, '<think>"a"'))


# --- thoughts

OPEN, CLOSE = (TINY.vocabulary.control[tag] for tag in ("<think>", "</think>"))


def test_what_a_schema_says_in_words_is_no_grammar() -> None:
    schema = {"type": "integer", "description": "units [temperature = C], or %json {like this}"}
    grammar = compile_grammar(TINY, "lark", f"start: %json {json.dumps(schema)}")
    assert fits(grammar, encode(TINY, "12"))
    with pytest.raises(RequestError, match="temperature"):
        compile_grammar(TINY, "lark", f"start: a %json {json.dumps(schema)}\na[temperature=0.5]: /a/")


def test_a_thought_that_the_prompt_opened_is_free_and_must_be_closed() -> None:
    grammar = compile_grammar(TINY, "regex", "yes").behind(THINK, is_open=True)
    constraint = grammar.start((OPEN,))
    for id in encode(TINY, "no {}\n"):
        mask = constraint.allowed()
        assert mask[[id, CLOSE, *encode(TINY, "q")]].all()
        assert not mask[sorted(TINY.end_ids)].any()
        constraint.accept(id)
    constraint.accept(CLOSE)
    assert not constraint.allowed()[encode(TINY, "q")].any()
    assert fits(grammar, [*encode(TINY, "hm"), CLOSE, *encode(TINY, "\nyes")], (OPEN,))
    assert not fits(grammar, [CLOSE, *encode(TINY, "\n \nyes")], (OPEN,))
    assert not fits(grammar, encode(TINY, "yes"), (OPEN,))


def test_a_thought_may_come_first_or_not() -> None:
    grammar = compile_grammar(TINY, "regex", "yes").behind(THINK)
    assert fits(grammar, encode(TINY, "yes"))
    thought = [OPEN, *encode(TINY, "hm"), CLOSE, *encode(TINY, "yes")]
    assert fits(grammar, thought)
    assert not fits(grammar, [*encode(TINY, "yes"), OPEN])
    assert split_reasoning(TINY.decode(thought, keep_special={OPEN, CLOSE}), THINK) == ("hm", "yes")


def test_without_tags_nothing_changes() -> None:
    grammar = compile_grammar(TINY, "regex", "yes")
    assert grammar.behind(None) is grammar
    assert not fits(grammar, [OPEN, *encode(TINY, "hm"), CLOSE, *encode(TINY, "yes")])


def test_gemmas_channel_is_spelled_out_once_it_opens() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(GEMMA4, GEMMA4_ADDED, eos_token_id="<eos>"))
    grammar = compile_grammar(tokenizer, "regex", "yes").behind(CHANNEL)
    open_id, close_id = (tokenizer.vocabulary.control[tag] for tag in ("<|channel>", "<channel|>"))
    spelled = encode(tokenizer, "thought")
    constraint = grammar.start((0,))
    constraint.accept(open_id)
    assert np.flatnonzero(constraint.allowed()).tolist() == spelled[:1]
    assert fits(grammar, [open_id, *spelled, *encode(tokenizer, "\nhm"), close_id, *encode(tokenizer, "yes")])


def test_a_thought_whose_end_is_no_token_cannot_be_followed() -> None:
    grammar = compile_grammar(PIECES, "regex", "yes")
    with pytest.raises(RequestError, match="turn thinking off"):
        grammar.behind(THINK, is_open=True)
    assert grammar.behind(THINK) is grammar


# --- an answer's place can be found again


def test_an_answer_taken_up_again_goes_on_alike(tokenizer: Tokenizer) -> None:
    grammar = compile_grammar(tokenizer, "json_schema", SCHEMA)
    ids, _, _ = answer(grammar, 1, n_most=40)
    constraint = grammar.start((0,))
    for n, id in enumerate(ids[:-1]):
        constraint.accept(id)
        if n % 9 == 0:
            assert (grammar.start((0,), ids[: n + 1]).allowed() == constraint.allowed()).all()


def test_a_token_that_is_not_allowed_is_refused() -> None:
    constraint = compile_grammar(TINY, "regex", "yes").start((0,))
    with pytest.raises(RequestError, match="'n'"):
        constraint.accept(encode(TINY, "n")[0])


def test_a_grammar_that_grows_too_large_ends_in_an_error_and_not_in_freedom() -> None:
    constraint = compile_grammar(TINY, "regex", "(.{0,500}a){200}").start((0,))

    def follow() -> None:
        for id in encode(TINY, "abbababa" * 100):
            constraint.allowed()
            constraint.accept(id)

    with pytest.raises(RequestError, match="cannot be followed: lexer error"):
        follow()
    assert not constraint.is_complete
