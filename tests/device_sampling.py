"""What tests of sampling on a device share: parameters for every stage, a sampler driven by hand, a small tokenizer."""

import re

import numpy as np
import pytest
import torch

from bytefloor.engine.cache import CachePlan
from bytefloor.engine.device_cuts import highest
from bytefloor.engine.device_sampler import DeviceSampler
from bytefloor.engine.planner import DeviceMemory
from bytefloor.engine.sampler import Sampler
from bytefloor.text.stream import StreamDecoder

STAGES = {
    "defaults": {},
    "greedy": {"temperature": 0.0},
    "greedy, adjusted": {"temperature": 0.0, "repetition_penalty": 1.4, "logit_bias": {3: 2.0}},
    "nothing": {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0},
    "temperature first": {"temperature_first": True, "temperature": 1.6, "top_p": 0.9},
    "top_k 1": {"top_k": 1},
    "typical": {"typical_p": 0.7},
    "typical over all": {"typical_p": 0.7, "top_k": 0},
    "top_p": {"top_k": 0, "min_p": 0.0, "top_p": 0.8},
    "top_p 0": {"top_p": 0.0, "typical_p": 0.5},
    "min_p": {"top_k": 0, "top_p": 1.0, "min_p": 0.2},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.04, "temperature": 1.2},
    "xtc over all": {"xtc_probability": 1.0, "xtc_threshold": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "repetition": {"repetition_penalty": 1.3, "penalty_window": 5},
    "repetition over all": {"repetition_penalty": 0.7, "penalty_window": -1},
    "presence and frequency": {"presence_penalty": 0.8, "frequency_penalty": -0.3, "penalty_window": 7},
    "frequency over all": {"frequency_penalty": 0.5, "penalty_window": -1},
    "no window": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "penalty_window": 0},
    "bias": {"logit_bias": {1: 3.0, 2: -100.0, 5: -4.0, 20: 1e-9}},
    "mirostat": {"mirostat_tau": 3.0, "temperature": 1.3},
    "mirostat, narrow": {"mirostat_tau": 0.5, "mirostat_eta": 0.9, "repetition_penalty": 1.2},
    "all": {
        "typical_p": 0.95, "top_p": 0.97, "temperature": 1.4, "xtc_probability": 0.4, "xtc_threshold": 0.06,
        "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.1, "logit_bias": {4: 2.0},
    },
}  # fmt: skip


def assert_alike(found, wanted):
    assert found is not None
    assert found.id == wanted.id
    assert found.logprob == pytest.approx(wanted.logprob, abs=1e-6)
    assert [token for token, _ in found.top] == [token for token, _ in wanted.top]
    assert [value for _, value in found.top] == pytest.approx([value for _, value in wanted.top], abs=1e-6)


def rows_of(kind, n_rows, n_vocabulary, seed):
    rng = np.random.default_rng(seed)
    rows = (3 * rng.normal(size=(n_rows, n_vocabulary))).astype(np.float32)
    # Whole numbers, -0 among them, are full of ties; sixteenths are so at the border of the k-th.
    return {"smooth": rows, "ties": np.round(rows), "some ties": np.round(16 * rows) / 16}[kind]


def memory_for(n_vocabulary, capacity=600, device="cpu", banned=()):
    """What the logits kernel and the sampler share; no cache."""
    mask = torch.zeros(n_vocabulary, dtype=torch.uint8)
    mask[list(banned)] = 1
    return DeviceMemory(
        plan=CachePlan(capacity, 64),
        device=torch.device(device),
        pools={},
        tables={},
        state=torch.zeros(4, dtype=torch.int32, device=device),
        history=torch.zeros(capacity + 1, dtype=torch.int32, device=device),
        banned=mask.to(device),
        logits=torch.zeros(n_vocabulary, device=device),
    )


def kernel(memory, logits):
    """What the logits kernel leaves behind."""
    memory.logits.copy_(torch.as_tensor(logits))
    open_logits = memory.logits.masked_fill(memory.banned.bool(), -torch.inf)
    best = -1 if bool(open_logits.isnan().any()) else int(open_logits.argmax())
    memory.history[int(memory.state[1])] = best
    memory.state[0] = best
    memory.state[1] += 1


class Driven:
    """A device sampler with the host's sampler beside it, both at the end of the same history."""

    def __init__(
        self,
        params,
        prompt,
        written=(),
        banned=(),
        n_vocabulary=64,
        device="cpu",
        takes_best=False,
        find_highest=highest,
    ):
        self.host = Sampler(params, prompt, frozenset(banned))
        for token in written:
            self.host.accept(token)
        self.ids = [*prompt, *written]
        self.memory = memory_for(n_vocabulary, device=device, banned=banned)
        self.sampler = DeviceSampler(self.host.params, self.host.banned_ids, self.memory, takes_best, find_highest)
        self.load(len(prompt))

    def load(self, n_prompt):
        """Put the device's sampler where the host's is."""
        self.sampler.load(self.host, self.ids, n_prompt)
        self.position = len(self.ids) - 1
        self.memory.state[1] = self.position

    def by_device(self, logits, run=None):
        """The next token, by the device; ``run`` in place of the sampler's step."""
        self.sampler.foresee(self.position)
        kernel(self.memory, logits)
        (run or self.sampler.step)()
        self.position += 1
        return self.sampler.read(self.sampler.record.tolist())

    def by_host(self, logits):
        """The same token, by the host."""
        return self.host.sample(np.asarray(logits, np.float32), self.position - 1)


class Numbers:
    """A tokenizer whose tokens are their own numbers in writing."""

    suppressed_ids = frozenset({3, 4})
    control_ids = frozenset()
    add_space_prefix = False

    def __init__(self, n_tokens):
        self.n_tokens = n_tokens
        self.end_ids = frozenset()

    def token_bytes(self, id):
        return f"<{id}>".encode()

    def encode(self, text, **_):
        return [int(number) for number in re.findall("<([0-9]+)>", text)]

    def stream(self, prompt_ids, keep_special=False):
        return StreamDecoder(self, prompt_ids)
