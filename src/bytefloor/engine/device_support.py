"""What a device and a list must be like for there to be kernels."""

from __future__ import annotations

import importlib.util

import torch

from bytefloor.engine.kernels import ARCHITECTURES
from bytefloor.engine.launches import STORAGES
from bytefloor.errors import UnsupportedError
from bytefloor.model.step import Step


def check_list(step: Step) -> None:
    """UnsupportedError for a list whose roundings are not those of the kernels."""
    activations = {call.attributes["to"] for call in step.calls if call.op.name == "round_to"}
    storages = {kind.storage for kind in step.kinds} if step.storage in STORAGES else {step.storage}
    if activations != {"int16_g32"} or len(storages) != 1 or not storages <= set(STORAGES):
        found = f"activations {sorted(activations) or 'as they are'}, cache {sorted(storages)}"
        raise UnsupportedError(
            f"the kernels round activations to int16_g32 and keep a cache of one of {', '.join(STORAGES)}; "
            f"the list says {found}"
        )


def device_architecture(device: torch.device) -> str:
    """The compiler's name of the device. UnsupportedError for a kind that no card has run, and without the compiler."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        raise UnsupportedError("no CUDA compiler: cuda-core is not installed (pip install 'bytefloor[cuda]')")
    major, minor = torch.cuda.get_device_capability(device)
    name = f"sm_{major}{minor}a"
    if name not in ARCHITECTURES:
        card = torch.cuda.get_device_name(device)
        raise UnsupportedError(f"{card} (sm_{major}{minor}): kernels compile for it, but no such card has run them yet")
    return name
