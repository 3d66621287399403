"""A device sampler driven by hand, on any torch device: logits in, what the host reads out."""

import numpy as np
import torch

from bytefloor.engine.cache import CachePlan
from bytefloor.engine.device_sampler import DeviceSampler
from bytefloor.engine.planner import DeviceMemory
from bytefloor.engine.sampler import Sampler


def memory_for(n_vocabulary, capacity=600, device="cpu", banned=()):
    """What the logits kernel and the sampler share; no cache."""
    mask = torch.zeros(n_vocabulary, dtype=torch.uint8)
    mask[list(banned)] = 1
    return DeviceMemory(
        plan=CachePlan(capacity, 64),
        device=torch.device(device),
        pools={},
        tables={},
        state=torch.zeros(3, dtype=torch.int32, device=device),
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

    def __init__(self, params, prompt, written=(), banned=(), n_vocabulary=64, device="cpu", takes_best=False):
        self.host = Sampler(params, prompt, frozenset(banned))
        for token in written:
            self.host.accept(token)
        self.ids = [*prompt, *written]
        self.memory = memory_for(n_vocabulary, device=device, banned=banned)
        self.sampler = DeviceSampler(self.host.params, self.host.banned_ids, self.memory, takes_best)
        self.sampler.load(self.host, self.ids, len(prompt))
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
