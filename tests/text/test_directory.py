"""Tokenizers read from model directories."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_vocabularies import GEMMA3, LETTERS, LLAMA3, MERGES, QWEN3, id_of, write_directory
from tokenizers import Tokenizer as Backend

from bytefloor.errors import FileError, UnsupportedError
from bytefloor.text.tokenizer import Tokenizer

FIRST_ADDED = len(LETTERS) + len(MERGES)


def adds(token: str) -> dict:
    """A post-processor that puts a token before the text, inside a sequence as Llama 3 has it."""
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    }
    return {"post_processor": {"type": "Sequence", "processors": [{"type": "ByteLevel"}, template]}}


def test_plain_text_becomes_what_the_library_makes_of_the_file(tmp_path: Path) -> None:
    """T01."""
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path), {})
    library = Backend.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("hello world 333", "é 🦙\n\n\n", ""):
        assert tokenizer.encode(text, add_bos=False) == library.encode(text).ids


@pytest.mark.parametrize(
    ("special", "settings", "tokenizer", "config", "wanted"),
    [
        (GEMMA3, {"bos_token": "<bos>"}, {}, {"model_type": "gemma3_text"}, True),
        (GEMMA3, {"bos_token": "<bos>", "add_bos_token": False}, {}, {"model_type": "gemma3_text"}, False),
        (GEMMA3, {"bos_token": {"content": "<bos>"}}, {}, {"text_config": {"model_type": "gemma4_text"}}, True),
        (LLAMA3, {"bos_token": LLAMA3[0]}, adds(LLAMA3[0]), {"model_type": "llama"}, True),
        (LLAMA3, {"bos_token": LLAMA3[0]}, {}, {"model_type": "llama"}, False),
        (LLAMA3, {"bos_token": LLAMA3[0]}, adds(LLAMA3[4]), {"model_type": "llama"}, False),
        (QWEN3, {"bos_token": None, "add_bos_token": False}, {}, {"model_type": "qwen3", "bos_token_id": 1}, False),
        (QWEN3, {"bos_token": None}, {}, {"model_type": "gemma3"}, False),
    ],
)
def test_bos_follows_settings_then_post_processor_then_family(
    tmp_path: Path, special: tuple, settings: dict, tokenizer: dict, config: dict, wanted: bool
) -> None:
    """T03, T04."""
    write_directory(tmp_path, special=special, tokenizer=tokenizer, tokenizer_config__json=settings)
    found = Tokenizer.from_directory(tmp_path, config)
    assert found.add_bos is wanted
    assert found.encode("hello").count(found.bos_id if found.bos_id is not None else -1) == wanted


SPACES = {
    "added_tokens": [
        {"id": 5, "content": "\u2581\u2581", "special": False, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
    ],
    "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    "pre_tokenizer": None,
    "decoder": {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "Fuse"},
    ]},
    "model": {
        "type": "BPE", "vocab": {"<unk>": 0, "\u2581": 1, "a": 2, "b": 3, "c": 4, "\u2581\u2581": 5},
        "merges": [["\u2581", "\u2581"]], "byte_fallback": False, "ignore_merges": False, "unk_token": "<unk>",
    },
}  # fmt: skip


def test_runs_of_spaces_that_are_tokens_of_their_own_are_spaces(tmp_path: Path) -> None:
    """As Gemma 3's vocabulary has them, which spells spaces in added tokens as it does in others."""
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, special=(), tokenizer=SPACES), {})
    library = Backend.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("a  b", "a b", "a   b", "    c"):
        ids = tokenizer.encode(text, add_bos=False)
        assert ids == library.encode(text).ids
        assert tokenizer.decode(ids) == library.decode(ids) == text
    assert tokenizer.token_bytes(5) == b"  "


@pytest.mark.parametrize("spec", ['{"model": {"vocab": {"a": 10000000000}, "merges": []}}', "[" * 100_000])
def test_a_file_that_would_take_all_memory_is_refused(tmp_path: Path, spec: str) -> None:
    (tmp_path / "tokenizer.json").write_text(spec)
    with pytest.raises(FileError, match=r"expected them from 0 on|nested too deeply"):
        Tokenizer.from_directory(tmp_path, {})


def test_end_ids_are_the_union_of_all_files_and_known_turn_enders(tmp_path: Path) -> None:
    """T07: the list in config.json adds to the tokenizer's, and replaces nothing."""
    special = ("<eos>", "<bos>", "<end_of_turn>", "<a>", "<b>", "<c>")
    write_directory(
        tmp_path,
        special=special,
        tokenizer_config__json={"eos_token": "<eos>"},
        generation_config__json={"eos_token_id": [FIRST_ADDED + 3], "suppress_tokens": [5, 6]},
    )
    config = {"eos_token_id": FIRST_ADDED + 4, "text_config": {"eos_token_id": [FIRST_ADDED + 5]}}
    tokenizer = Tokenizer.from_directory(tmp_path, config)
    assert {tokenizer.token_text(id) for id in tokenizer.end_ids} == {"<eos>", "<end_of_turn>", "<a>", "<b>", "<c>"}
    assert tokenizer.suppressed_ids == {5, 6}
    assert tokenizer.token_text(tokenizer.eos_id or 0) == "<eos>"


def test_plain_text_never_becomes_a_control_token(tmp_path: Path) -> None:
    """T05."""
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path), {"model_type": "gemma3"})
    for token in GEMMA3:
        assert not set(tokenizer.encode(token, add_bos=False)) & tokenizer.control_ids
        assert tokenizer.encode(token, parse_special=True, add_bos=False) == [id_of(tokenizer, token)]


def test_ordinary_added_tokens_keep_their_ids_when_control_tokens_are_taken_out(tmp_path: Path) -> None:
    added = [
        {"id": FIRST_ADDED + i, "content": text, "special": special, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
        for i, (text, special) in enumerate([("<eos>", True), ("<table>", False), ("<think>", False), ("<tr>", False)])
    ]
    write_directory(tmp_path, tokenizer={"added_tokens": added})
    tokenizer = Tokenizer.from_directory(tmp_path, {})
    wanted = [LETTERS.index("a"), FIRST_ADDED + 1, FIRST_ADDED + 3]
    assert tokenizer.encode("a<table><tr>") == wanted
    assert FIRST_ADDED + 2 not in tokenizer.encode("<think>")


A, B, C = ("{{ 'from jinja' }}", "{{ 'from config' }}", "{{ 'from json' }}")


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"chat_template__jinja": A}, A),
        ({"chat_template__jinja": A, "tokenizer_config__json": {"chat_template": B}}, A),
        ({"tokenizer_config__json": {"chat_template": B}, "chat_template__json": {"chat_template": C}}, B),
        ({"chat_template__json": {"chat_template": C}}, C),
        ({"chat_template__jinja": A, "chat_template__json": {"chat_template": C}}, A),
        ({}, None),
    ],
)
def test_the_templates_own_file_wins(tmp_path: Path, files: dict, wanted: str | None) -> None:
    """M13."""
    assert Tokenizer.from_directory(write_directory(tmp_path, **files), {}).chat_template == wanted


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [(b"\xef\xbb\xbf" + A.encode(), A), (b"", None), (b" \n\t", None)],
    ids=["mark", "empty", "blank"],
)
def test_a_template_is_its_text(tmp_path: Path, raw: bytes, wanted: str | None) -> None:
    """G14: a mark of the byte order is no part of it, and one that is blank would leave every message out."""
    write_directory(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(raw)
    assert Tokenizer.from_directory(tmp_path, {}).chat_template == wanted


def test_a_template_that_is_no_text_is_refused_with_its_path(tmp_path: Path) -> None:
    write_directory(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"{{ x }}\xff")
    with pytest.raises(FileError, match=r"chat_template\.jinja: cannot be read as text"):
        Tokenizer.from_directory(tmp_path, {})


@pytest.mark.parametrize("value", ["</s>", [1, "2"], 1.5, True, {"a": 1}])
def test_end_tokens_that_are_no_ids_are_refused(tmp_path: Path, value: object) -> None:
    """T07: an answer would never end."""
    write_directory(tmp_path, generation_config__json={"eos_token_id": value})
    with pytest.raises(FileError, match=r"eos_token_id holds .*, expected a token id"):
        Tokenizer.from_directory(tmp_path, {})


def test_named_templates_are_kept_by_name(tmp_path: Path) -> None:
    """M13."""
    named = [{"name": "default", "template": A}, {"name": "tool_use", "template": B}]
    write_directory(tmp_path, tokenizer_config__json={"chat_template": named})
    tokenizer = Tokenizer.from_directory(tmp_path, {})
    assert tokenizer.chat_template == A
    assert tokenizer.templates == {"default": A, "tool_use": B}


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_directory(tmp_path, {})


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [3]}}', "{}"])
def test_a_broken_tokenizer_file_is_refused_with_its_path(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(FileError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path, {})


def test_other_models_than_bpe_are_refused_by_name(tmp_path: Path) -> None:
    write_directory(tmp_path, tokenizer={"model": {"type": "Unigram", "vocab": []}})
    with pytest.raises(UnsupportedError, match="'Unigram'"):
        Tokenizer.from_directory(tmp_path, {})
