"""The most memory that tensors made under it held at once, op by op: what a plan of scratch is compared with."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """most: bytes; storages that existed before do not count, views count once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: weakref.WeakSet = weakref.WeakSet()

    def __torch_dispatch__(
        self, function: OpOverload, types: tuple, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._known.add(tensor.untyped_storage())
        with self:  # under inference mode an op made of others comes whole, and what it holds would not be seen
            made = function.decompose(*args, **(kwargs or {}))
        if made is not NotImplemented:
            return made
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._drop, storage.nbytes())

    def _drop(self, n_bytes: int) -> None:
        self.now -= n_bytes
