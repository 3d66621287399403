"""A Python twin of every kernel, and a device that runs them: the device executor's wiring without a GPU.

A twin gets the very arguments that the kernel would get, and does to them what the kernel's header says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bytefloor.engine import device as device_module
from bytefloor.engine import planner as planner_module
from bytefloor.engine import row_planner as row_planner_module
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.kernels import KernelSpec
from bytefloor.engine.launches import STORAGES
from bytefloor.engine.sampler import Sampler
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.ops import OPS
from bytefloor.ops.pages import page_shape
from bytefloor.ops.round_to import round_to
from flash_twin import FlashTwin
from row_twins import RowTwins, planes_of

MULTIPROCESSORS = 5


class TwinDevice:
    """Launches record while a graph is captured and run otherwise."""

    def __init__(self) -> None:
        self.recording: list | None = None
        self.matrices: dict[int, Tensor] = {}

    def know(self, executor: DeviceExecutor) -> None:
        """What each packed matrix decodes to, gate and up by turns as they are packed."""
        for group in executor.weights._groups:
            dense = [weight.load() for weight in group]
            rows = dense[0] if len(dense) == 1 else torch.stack(dense, dim=1).flatten(0, 1)
            missing = -rows.shape[0] % 16
            self.matrices[executor.weights.packed(group[0]).data_ptr()] = torch.nn.functional.pad(
                rows, (0, 0, 0, missing)
            )

    def load_kernels(self, specs: Sequence[KernelSpec], architecture: str, progress: object = None) -> Mapping:
        return {kernel: TwinKernel(self, kernel) for kernel in specs}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the twins where the executor looks for kernels, streams and graphs."""
        monkeypatch.setattr(device_module, "load_kernels", self.load_kernels)
        monkeypatch.setattr(device_module, "device_architecture", lambda device: "sm_90a")
        properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS, shared_memory_per_multiprocessor=228 * 1024)
        for module in (planner_module, row_planner_module):
            monkeypatch.setattr(module.torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: TwinStream())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: TwinStream())
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nothing())
        monkeypatch.setattr(torch.cuda, "Event", TwinEvent)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", TwinGraph)
        monkeypatch.setattr(torch.cuda, "graph", self._capture)

    @contextmanager
    def _capture(self, graph: TwinGraph, stream: object) -> Iterator[None]:
        self.recording = graph.launches
        yield
        self.recording = None


@contextmanager
def nothing() -> Iterator[None]:
    yield


class TwinStream:
    cuda_stream = 0

    def synchronize(self) -> None: ...

    def wait_stream(self, other: object) -> None: ...


class TwinEvent:
    def record(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...


class TwinGraph:
    def __init__(self) -> None:
        self.launches: list = []

    def replay(self) -> None:
        for run, arguments in self.launches:
            run(*arguments)


class TwinKernel(RowTwins, FlashTwin):
    def __init__(self, device: TwinDevice, kernel: KernelSpec) -> None:
        self.device, self.d = device, dict(kernel.defines)
        self.twin = getattr(self, kernel.name)

    def prepare(self, stream: int, grid: tuple[int, int], arguments: Sequence[Any]) -> Callable[[], None]:
        return lambda: self.launch(stream, grid, arguments)

    def launch(self, stream: int, grid: tuple[int, int], arguments: Sequence[Any]) -> None:
        if self.device.recording is not None:
            self.device.recording.append((self.twin, arguments))
        else:
            self.twin(*arguments)

    def n(self, name: str) -> int:
        return int(self.d[name])

    def f(self, name: str) -> float:
        return float(self.d[name].removesuffix("f"))

    def matrix(self, packed: Tensor) -> Tensor:
        return self.device.matrices[packed.data_ptr()]

    def embed(self, table: Tensor, state: Tensor, out: Tensor) -> None:
        tokens = state.view(-1, 4)[:, 0].long()
        out.copy_((self.matrix(table)[tokens] * self.f("SCALE")).flatten())

    def highest(self, values: Tensor, maxima: Tensor, best: Tensor, places: Tensor, n: int, length: int) -> None:
        found, order = (values.view(-1, length) + 0.0).sort(descending=True, stable=True)
        best.view(-1, n)[: len(found)] = found[:, :n]
        places.view(-1, n)[: len(found)] = order[:, :n]

    def row_mass(
        self,
        planes: Tensor,
        n_planes: int,
        plane_stride: int,
        cap: float,
        logits: Tensor,
        maxima: Tensor,
        parts: Tensor,
    ) -> None:
        n, v = logits.shape
        y = planes_of(planes, n_planes, plane_stride, n, v, v)
        logits.copy_(torch.tanh(y / cap) * cap if cap else y)
        rows, n_blocks = logits.double(), self.n("BLOCKS")
        share = -(-self.n("N") // 64 // n_blocks) * 64
        for i, part in enumerate(rows.split(share, dim=-1)):
            best = part.amax(-1, keepdim=True)
            parts[: len(rows), i, 0] = best[:, 0]
            parts[: len(rows), i, 1] = (part - best).exp().sum(-1)
        n_used = -(-rows.shape[1] // share)
        parts[: len(rows), n_used:, 0] = -torch.inf
        parts[: len(rows), n_used:, 1] = 0

    def sample_rows(
        self, best: Tensor, ids: Tensor, parts: Tensor, banned: Tensor, asked: Tensor, tokens: Tensor, records: Tensor
    ) -> None:
        """By the host's sampler, of a row that has the best few and nothing else."""
        n_tops = self.n("TOPS")
        for i, words in enumerate(asked.numpy().view(np.uint64)):
            seed, position, top_k, flags = words[:4].tolist()
            if top_k == 0:
                continue  # a row that nobody asked anything of
            temperature, top_p, log_min_p, xtc, threshold = words[4:9].view(np.float64).tolist()
            params = SamplingParams(
                temperature=temperature, top_k=top_k, top_p=top_p, min_p=math.exp(log_min_p), xtc_probability=xtc,
                xtc_threshold=threshold, temperature_first=bool(flags & 2), seed=seed,
            )  # fmt: skip
            row = np.full(len(banned), -np.inf, np.float32)
            row[ids[i]] = best[i]
            is_told = int((row[~banned.bool().numpy()] > -np.inf).sum()) >= top_k
            shift = float(best[i, 0])
            total = float((parts[i, :, 1] * (parts[i, :, 0] - shift).exp()).nan_to_num(nan=torch.nan).sum())
            token = 0
            if is_told and math.isfinite(shift):
                token = Sampler(params, [0], banned.bool().numpy()).sample(row, position).id
            record = [token, total, shift, float(row[token]), 1.0 if is_told else math.nan]
            tops = [*ids[i, :n_tops].tolist(), *best[i, :n_tops].tolist()]
            records[i] = torch.tensor([*record, *tops], dtype=torch.float64)
            tokens[i] = token

    def unpack(self, packed: Tensor, rows: Tensor | None, first: int, step: int, n: int, out: Tensor) -> None:
        at = rows[:n] if rows is not None else first + step * torch.arange(n)
        values = self.matrix(packed)[at] * self.f("SCALE")
        out.view(-1)[: values.numel()] = values.flatten()

    def unpack_bf16(self, packed: Tensor, n: int, out: Tensor) -> None:
        values = self.matrix(packed)[:n].to(torch.bfloat16)
        out.view(-1)[: values.numel()] = values.flatten()

    def product(
        self, w0: Tensor, w1: Tensor | None, w2: Tensor | None, x_in: Tensor, delta: Tensor | None, post: Tensor | None,
        norm: Tensor | None, scalar: Tensor | None, x_out: Tensor | None, y: Tensor, tickets: Tensor, state: Tensor,
        factor: Tensor | None,
    ) -> None:  # fmt: skip
        x = round_to(self._input(x_in, delta, post, norm, scalar, x_out), "int16_g32")
        self._multiply((w0, w1, w2), x, y, factor)

    def product_tokens(
        self, w0: Tensor, w1: Tensor | None, w2: Tensor | None, x_in: Tensor, delta: Tensor | None, post: Tensor | None,
        norm: Tensor | None, scalar: Tensor | None, x_out: Tensor | None, y: Tensor, tickets: Tensor, state: Tensor,
        factor: Tensor | None, places: Tensor,
    ) -> None:  # fmt: skip
        n_tokens, k = self.n("TOKENS"), self.n("K_IN") * self.n("PARTS")
        assert x_in.numel() == n_tokens * self.n("X_STRIDE")
        assert places.nbytes == 4 * n_tokens * self.n("K") * self.n("PARTS")
        assert y.stride(0) == self.n("Y_STRIDE")
        assert factor is None or factor.stride(0) == self.n("FACTOR_STRIDE")
        for token in range(n_tokens):
            own = None if delta is None else delta.view(n_tokens, self.n("DELTA_STRIDE"))[token]
            kept = None if x_out is None else x_out.view(n_tokens, -1)[token]
            x = self._input(x_in.view(n_tokens, -1)[token, :k], own, post, norm, scalar, kept)
            by = None if factor is None else factor[token]
            self._multiply((w0, w1, w2), round_to(x, "int16_g32"), y[token], by)

    def _multiply(self, packed: Sequence[Tensor | None], x: Tensor, y: Tensor, factor: Tensor | None) -> None:
        weights = [self.matrix(w)[: self._rows(i)] for i, w in enumerate(packed) if w is not None]
        result = torch.cat(weights) @ x
        assert result.shape[0] == self.n("N")
        if self.n("GLU"):
            activation = {1: "silu", 2: "gelu_tanh"}[self.n("GLU")]
            pair = (result, factor) if self.n("FACTOR") else (result[0::2], result[1::2])
            y.copy_(OPS["glu"].reference(*pair, activation))
        else:
            planes = y.view(self.n("PARTS"), self.n("N"))
            planes.zero_()
            planes[0] = result

    def _rows(self, segment: int) -> int:
        return 16 * int(self.d["SEGMENTS"].split("S(")[segment + 1].split(",")[0])

    def _input(self, x_in, delta, post, norm, scalar, x_out) -> Tensor:
        x, eps = x_in.clone(), self.f("EPS")
        if self.n("DELTA_PLANES"):
            # Rows of a product are whole tiles; a plane of one may be longer than what is added to.
            d = delta.view(self.n("DELTA_PLANES"), -1).sum(0)[: x.numel()]
            x = x + (OPS["rms_norm"].reference(d, eps, post) if self.n("POST_NORM") else d)
            x = x * scalar if self.n("SCALAR") else x
            assert x_out.data_ptr() != x_in.data_ptr()
            x_out.copy_(x)
        return OPS["rms_norm"].reference(x, eps, norm) if self.n("NORM") else x

    def per_layer(self, projected: Tensor, weight: Tensor, table: Tensor, state: Tensor, out: Tensor) -> None:
        n_layers, width = self.n("L"), self.n("P")
        for token, row in enumerate(state.view(-1, 4)[:, 0].tolist()):
            own_projected = projected.view(state.numel() // 4, self.n("PLANES"), -1)[token]
            planes = own_projected[:, : n_layers * width].sum(0) * self.f("PROJECTED_SCALE")
            normed = OPS["rms_norm"].reference(planes.view(n_layers, width), self.f("EPS"), weight)
            own = self.matrix(table)[row].view(n_layers, width) * self.f("OWN_SCALE")
            out.view(-1, n_layers * width)[token] = ((normed + own) * self.f("SCALE")).flatten()

    def attention(
        self, qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, frequencies: Tensor | None, cache: Tensor,
        table: Tensor, n_table: int, state: Tensor, parts: Tensor, sums: Tensor, call: int, n_calls: int, out: Tensor,
    ) -> None:  # fmt: skip
        assert 0 <= call < n_calls
        n_tokens = state.numel() // 4
        for token, (_, position, _, dropped) in enumerate(state.view(-1, 4)):
            own_table = table.view(n_tokens, n_table)[token]
            rows = qkv.view(n_tokens, -1)[token]
            slot = position if self.n("WINDOW") else position - dropped
            own_out = out.view(n_tokens, -1)[token]
            self._attend(rows, q_weight, k_weight, frequencies, cache, own_table, position, slot, own_out)

    def _attend(self, qkv, q_weight, k_weight, frequencies, cache, table, position, slot, out) -> None:
        e, n_heads, j = self.n("E"), self.n("H"), self.n("J")
        storage = {number: name for name, number in STORAGES.items()}[self.n("STORAGE")]
        rotated, read_norm = self.n("ROTATED"), k_weight if self.n("ROTATED") else None
        page, dtype = page_shape(storage, j, self.n("PAGE"), e, rotated)
        assert cache.shape[1:] == page
        assert cache.dtype == dtype
        heads = qkv.view(self.n("PLANES_IN"), self.n("N_IN")).sum(0).view(-1, e)
        position, slot = position[None].long(), slot[None].long()
        first, rows = torch.zeros(1, dtype=torch.int64), table[None].long()
        q = self._turned(heads[:n_heads], q_weight, frequencies, position)
        if self.n("OWNS_KV") or self.n("MODE") == 1:
            k = heads[n_heads : n_heads + j]
            v = k if self.n("V_FROM_K") else heads[n_heads + j :]
            k = self._turned(k, k_weight, frequencies, position)
            if self.n("V_NORM"):
                v = OPS["rms_norm"].reference(v, self.f("EPS"))
            OPS["cache_write"].reference(k[None], v[None], slot, first, rows, cache, storage, rotated)
        if self.n("MODE") == 1:
            return
        window = self.n("WINDOW") or None
        mixed = OPS["attention"].reference(
            q[None], slot, first, rows, cache, self.f("SCALE"), window, storage, rotated, read_norm
        )
        out.copy_(mixed.flatten())

    def _turned(self, heads: Tensor, weight: Tensor | None, frequencies: Tensor | None, position: Tensor) -> Tensor:
        if self.n("QK_NORM"):
            heads = OPS["rms_norm"].reference(heads, self.f("EPS"), weight)
        if self.n("ROPE"):
            assert frequencies is not None
            style = {1: "split", 2: "interleaved"}[self.n("ROPE")]
            heads = OPS["rope"].reference(heads[None], position, style, frequencies.tolist())[0]
        return heads

    def logits(
        self, y: Tensor, banned: Tensor, out: Tensor, bests: Tensor, counter: Tensor, state: Tensor, history: Tensor
    ) -> None:
        n_tokens, cap = state.numel() // 4, self.f("CAP")
        assert history.shape[-1] == self.n("HISTORY")
        for token, own in enumerate(state.view(-1, 4)):
            values = y.view(n_tokens, self.n("PLANES"), self.n("ROWS"))[token].sum(0)[: self.n("V")]
            out.view(n_tokens, -1)[token] = OPS["soft_cap"].reference(values, cap) if cap else values
            best = int(out.view(n_tokens, -1)[token].masked_fill(banned.bool(), float("-inf")).argmax())
            history.view(n_tokens, -1)[token, int(own[1])] = best
            own[0] = best
            own[1:3] += 1
