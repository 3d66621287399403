"""The model as the protocol sees it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from bytefloor.engine.engine import Engine
from bytefloor.engine.loading import Opened
from bytefloor.errors import RequestError
from bytefloor.files.stored import count_formats
from bytefloor.server.refusal import Refusal, bad_field
from bytefloor.server.structured import Grammars
from bytefloor.text.chat import ChatTemplate
from bytefloor.text.tokenizer import Tokenizer

_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True)
class Served:
    """What never changes while the server runs; any thread may read it.

    name: what requests call the model. template: None where there is none, and `template_advice` says what to do.
    facts: what /props tells. Its ``token_bytes`` are what a token must read at the beginning and at the end of the
    context: the weights it needs, in the file's own encoding, and its cache.
    """

    name: str
    tokenizer: Tokenizer
    engine: Engine
    template: ChatTemplate | None
    template_advice: str
    detects_loops: bool
    facts: dict[str, Any]
    grammars: Grammars

    @classmethod
    def of(cls, opened: Opened, name: str | None = None) -> Served:
        """name: None takes the file's own, without its ending."""
        template, advice = None, ""
        try:
            template = opened.chat_template()
        except RequestError as error:
            advice = str(error)
        config, plan = opened.model.config, opened.engine.executor.plan
        checkpoint, step = opened.model.checkpoint, opened.engine.executor.step
        counts = count_formats(checkpoint)
        n_weights, n_bytes = sum(count.n_weights for count in counts), sum(count.n_bytes for count in counts)
        facts = {
            "family": config.family,
            "title": config.name,
            "container": checkpoint.container,
            "n_weights": n_weights,
            "n_bytes": n_bytes,
            "bits_per_weight": 8 * n_bytes / max(1, n_weights),
            "formats": {count.name: count.n_bytes for count in counts},
            "token_bytes": {
                "empty": sum(step.token_bytes(0)),
                "full": sum(step.token_bytes(opened.engine.capacity - 1)),
            },
            "context": opened.engine.capacity,
            "n_sequences": plan.n_sequences,
            "chunk": plan.chunk,
            "kv": opened.kv,
            "kv_budget": plan.budget,
            "device": str(opened.device),
            "card": torch.cuda.get_device_name(opened.device) if opened.device.type == "cuda" else None,
            "vocabulary_size": opened.engine.vocabulary_size,
            "n_tokens": opened.tokenizer.n_tokens,
            "chat_template": template.source if template else None,
            "supports_thinking": bool(template and template.supports_thinking),
            "notices": [*opened.notices, *(template.notices if template else ())],
        }
        name = name or _own_name(opened)
        return cls(
            name,
            opened.tokenizer,
            opened.engine,
            template,
            advice,
            opened.detects_loops,
            facts,
            Grammars(opened.tokenizer),
        )

    def check_name(self, name: str | None) -> None:
        """Refusal 404 for another model's name; a request need not name one."""
        if name is not None and name != self.name:
            message = f"model {name!r} is not here; this server has {self.name!r} (--alias gives it another name)"
            raise Refusal(404, message, "model", "model_not_found")

    def check_ids(self, ids: list[int], at: str) -> None:
        """Refusal unless every id is a token's."""
        n = self.tokenizer.n_tokens
        if not ids or (min(ids) >= 0 and max(ids) < n):
            return
        place = next(place for place, token in enumerate(ids) if not 0 <= token < n)
        raise bad_field(f"{at}[{place}]", f"{at}[{place}] = {ids[place]}: expected a token id from 0 to {n - 1}")


def _own_name(opened: Opened) -> str:
    path = opened.model.checkpoint.path
    if path.suffix == ".gguf":
        return _SHARD.sub("", path.stem)
    return path.resolve().name if path.is_dir() else path.resolve().parent.name
