"""Sampling parameters from a body, each checked with the field's name at hand."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from bytefloor.engine.sampling_params import BAN_AT, SamplingParams, check_number
from bytefloor.errors import RequestError
from bytefloor.server.bodies import SamplingFields
from bytefloor.server.refusal import bad_field
from bytefloor.server.served import Served

MAX_BIASES = 4096
SAMPLING_NAMES = tuple(field.name for field in fields(SamplingParams) if field.name in SamplingFields.__struct_fields__)


def in_range(name: str, value: float | None, kind: type, low: float, high: float) -> None:
    """Refusal with the field's name, unless the value is None or a number of the kind within the bounds."""
    if value is None:
        return
    try:
        check_number(name, value, kind, low, high)
    except RequestError as error:
        raise bad_field(name, str(error)) from None


def sampling_params(body: SamplingFields, n_logprobs: int, served: Served) -> SamplingParams:
    """What the body asks; what it leaves out keeps SamplingParams' own default."""
    given: dict[str, Any] = {name: value for name in SAMPLING_NAMES if (value := getattr(body, name)) is not None}
    if "logit_bias" in given:
        given["logit_bias"] = _bias(given["logit_bias"], served)
    try:
        return SamplingParams(**given, n_logprobs=n_logprobs)
    except RequestError as error:
        refused = error
    for name, value in given.items():
        try:
            SamplingParams(**{name: value})
        except RequestError as error:
            raise bad_field(name, str(error)) from None
    # Two that contradict each other; the message begins with one's name.
    raise bad_field(str(refused).split(" ", 1)[0], str(refused)) from None


def _bias(bias: dict[str, float], served: Served) -> dict[int, float]:
    """Token ids are the keys of a JSON object, hence text. At least one token must be left to choose."""
    if len(bias) > MAX_BIASES:
        raise bad_field("logit_bias", f"logit_bias has {len(bias)} entries: expected at most {MAX_BIASES}")
    vocabulary_size = served.engine.vocabulary_size
    found: dict[int, float] = {}
    for key, value in bias.items():
        name = f"logit_bias.{key}"
        if re.fullmatch(r"[0-9]{1,10}", key) is None or int(key) >= vocabulary_size:
            raise bad_field(name, f"{name}: expected a token id from 0 to {vocabulary_size - 1}")
        found[int(key)] = value
    banned = {token for token, value in found.items() if value <= BAN_AT}
    if banned and len(banned | served.engine.banned_ids) >= vocabulary_size:
        raise bad_field("logit_bias", "logit_bias bans every token: at least one must be left to choose from")
    return found
