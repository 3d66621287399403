"""From the mapped file to the device, through two pinned buffers by turns: reading, copying and packing overlap.

Three queues take part: the host, which reads the file into a pinned buffer; the copy stream, which carries that buffer
to a buffer on the device; the current stream, which works on the latter. A slot is one pair of buffers and two events:

    host            waits for ``sent``, then writes the pinned buffer        (its last copy has left)
    copy stream     waits for ``used``, copies, records ``sent``             (no work is left on that buffer)
    current stream  waits for ``sent``, works, records ``used``              (the bytes have arrived)

So nobody writes what somebody still reads, the host is never more than two slots ahead, and memory is these buffers.
An event that was never recorded holds nobody up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

STAGING_BYTES = 64 << 20
"""Of one buffer. There are two on the host and two on the device."""
ALIGNMENT = 16


class _Slot:
    def __init__(self, device: torch.device) -> None:
        self.pinned = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.landing = torch.empty(STAGING_BYTES, dtype=torch.uint8, device=device)
        self.sent = torch.cuda.Event()
        self.used = torch.cuda.Event()


class Staging:
    """Tensors that lie in host memory, on a CUDA device for as long as they are worked on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots = [_Slot(device) for _ in range(2)]
        self._copies = torch.cuda.Stream(device)
        # Memory of the buffers may have been another tensor's, with work on it still under way.
        self._copies.wait_stream(torch.cuda.current_stream(device))

    @contextmanager
    def on_device(self, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """The tensors on the device, for work that is put on the current stream within the block.

        Together they take no more than STAGING_BYTES, each begun on a multiple of ALIGNMENT.
        """
        slot = self._slots[0]
        self._slots.reverse()
        slot.sent.synchronize()
        there, end = [], 0
        for tensor in tensors:
            begin, end = end, end + tensor.nbytes
            _typed(slot.pinned[begin:end], tensor).copy_(tensor)
            there.append(_typed(slot.landing[begin:end], tensor))
            end = -(-end // ALIGNMENT) * ALIGNMENT
        self._copies.wait_event(slot.used)
        with torch.cuda.stream(self._copies):
            slot.landing[:end].copy_(slot.pinned[:end], non_blocking=True)
            slot.sent.record(self._copies)
        current = torch.cuda.current_stream(self._device)
        current.wait_event(slot.sent)
        yield there
        slot.used.record(current)


def _typed(buffer: Tensor, like: Tensor) -> Tensor:
    """Bytes as a tensor of that dtype and shape."""
    return buffer.view(like.dtype).view(like.shape)
