"""Text to token ids and back, from the metadata of a GGUF file or from a model directory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from bytefloor.errors import RequestError
from bytefloor.text import ingredients_directory, ingredients_gguf
from bytefloor.text.guide import Guide, make_guide
from bytefloor.text.ingredients import Ingredients
from bytefloor.text.stream import StreamDecoder, Walker
from bytefloor.text.vocabulary import TURN_ENDERS, ControlFinder, Kind, Vocabulary

__all__ = ["StreamDecoder", "Tokenizer"]


@dataclass(frozen=True)
class Tokenizer:
    """What a model's files say about text.

    `control_ids` are the tokens that plain text never becomes. `end_ids` end a reply. `suppressed_ids` must never be
    sampled. Rows of the embedding from `n_tokens` on are padding and must never be sampled either.
    """

    vocabulary: Vocabulary
    backend: Backend = field(repr=False)
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    end_ids: frozenset[int]
    suppressed_ids: frozenset[int]
    control_ids: frozenset[int]
    #: Text starts with a space that is not in the text (Llama 2): encoding adds it, decoding takes it away.
    add_space_prefix: bool
    templates: Mapping[str, str]
    notices: tuple[str, ...]
    finder: ControlFinder = field(repr=False)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the `tokenizer.*` keys of a GGUF file."""
        return cls._from_ingredients(ingredients_gguf.read(metadata))

    @classmethod
    def from_directory(cls, directory: Path, config: Mapping[str, Any]) -> Tokenizer:
        """From tokenizer.json and its companions; `config` is the parsed config.json."""
        return cls._from_ingredients(ingredients_directory.read(directory, config))

    @classmethod
    def _from_ingredients(cls, found: Ingredients) -> Tokenizer:
        vocabulary = found.vocabulary
        enders = {
            id
            for id, (text, kind) in enumerate(zip(vocabulary.texts, vocabulary.kinds, strict=True))
            if kind == Kind.CONTROL and text in TURN_ENDERS
        }
        n_tokens = len(vocabulary)
        missing = vocabulary.missing_bytes()
        if missing:
            listed = ", ".join(f"0x{byte:02X}" for byte in sorted(missing)[:8])
            found.notices.append(f"the vocabulary cannot spell {len(missing)} bytes ({listed}...): text loses them")
        return cls(
            vocabulary=vocabulary,
            backend=found.backend,
            bos_id=found.bos_id,
            eos_id=found.eos_id,
            add_bos=found.add_bos and found.bos_id is not None,
            end_ids=frozenset(id for id in {*found.end_ids, *enders} if 0 <= id < n_tokens),
            suppressed_ids=frozenset(found.suppressed_ids) | vocabulary.unused,
            control_ids=frozenset(id for id, kind in enumerate(vocabulary.kinds) if kind == Kind.CONTROL),
            add_space_prefix=found.add_space_prefix,
            templates=found.templates,
            notices=tuple(found.notices),
            finder=ControlFinder(vocabulary.control),
        )

    @property
    def n_tokens(self) -> int:
        """How many tokens there are; the embedding may have more rows."""
        return len(self.vocabulary)

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the default chat template."""
        return self.templates.get("default")

    @cached_property
    def guide(self) -> Guide:
        """For grammars. Made when it is first asked for, which takes a second or two for a large vocabulary."""
        return make_guide(self.vocabulary, self.end_ids, self.suppressed_ids, self.add_space_prefix)

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool | None = None) -> list[int]:
        """Ids of the text. Control tokens written in it become tokens only with `parse_special`.

        `add_bos` None does what the file asks. One BOS is added, never a second: not where the text begins with it.
        """
        pieces: list[int | str] = self.finder.cut(text) if parse_special else [text]
        return self.encode_pieces(pieces, add_bos=add_bos)

    def encode_pieces(self, pieces: Iterable[int | str], *, add_bos: bool | None = None) -> list[int]:
        """Ids of text already cut at its control tokens: ids stay, text is plain. For text of mixed trust."""
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            elif piece:
                ids.extend(self._encode_plain(piece))
        wants_bos = self.add_bos if add_bos is None else add_bos
        if wants_bos and self.bos_id is None:
            raise RequestError("a beginning-of-text token was asked for, but this tokenizer has none")
        if wants_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Sequence[int], *, keep_special: bool | Collection[int] = False) -> str:
        """Text of the ids: their bytes joined, what is not UTF-8 replaced.

        Control tokens are left out unless `keep_special` is true, or is a collection that names them.
        """
        walker = Walker(self, keep_special)
        return b"".join(walker.step(id) for id in ids).decode("utf-8", errors="replace")

    def token_text(self, id: int) -> str:
        """The token alone, for people to read; control tokens as they are written."""
        return self.token_bytes(id).decode("utf-8", errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """The bytes a token stands for, its leading space included."""
        return self.vocabulary.bytes_of(id)

    def stream(self, prompt_ids: Sequence[int] = (), *, keep_special: bool | Collection[int] = False) -> StreamDecoder:
        """A decoder to push tokens into as they come; `prompt_ids` are those that went before."""
        return StreamDecoder(self, prompt_ids, keep_special)

    def _encode_plain(self, text: str) -> list[int]:
        # Lone surrogates (from a JSON escape) have no UTF-8 form; they count as the replacement character.
        clean = text.encode("utf-8", errors="surrogatepass").decode("utf-8", errors="replace")
        return list(self.backend.encode(clean, add_special_tokens=False).ids)
