"""``serve``: the model behind HTTP."""

from __future__ import annotations

import asyncio
import gc
import sys

import torch

from bytefloor.engine.loading import EngineOptions, choose_device
from bytefloor.engine.stream_limit import StreamLimit, measure_stream_limit
from bytefloor.server.log import log_to_stderr
from bytefloor.server.process import bind, serve
from bytefloor.server.service import ServerOptions, Service
from bytefloor.tools.session import open_with_progress


def serve_model(model: str | None, host: str, port: int, options: EngineOptions, allowed: ServerOptions) -> int:
    """Serve until told to stop; the exit status. The address is taken before the model is loaded."""
    bound = bind(host, port)
    limit = device_limit(options.device)
    opened = open_with_progress(model, options)
    service = Service(opened, allowed, limit)
    # What is garbage now would stay, see `process.serve`. It takes a moment, in which the address would not answer yet.
    gc.collect()
    port = bound.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    print(summary(service, f"http://{shown}:{port}"), file=sys.stderr, flush=True)
    log_to_stderr()
    return asyncio.run(serve(service, bound))


def device_limit(name: str) -> StreamLimit | None:
    """The stream limit of a GPU, measured while its memory is still free. None for a CPU.

    There the reference executor reads decoded weights: a share of what the file's bytes allow would say nothing.
    """
    device = choose_device(name)
    if device.type != "cuda":
        return None
    limit = measure_stream_limit(device)
    torch.cuda.empty_cache()
    if limit.notice is not None:
        print(f"note: {limit.notice}", file=sys.stderr, flush=True)
    return limit


def summary(service: Service, address: str) -> str:
    """What is served, where and to whom."""
    facts, allowed = service.served.facts, service.options
    chat = "" if service.served.template else "\nnote: no chat template: only /v1/completions answers"
    budget = f", {facts['kv_budget']} of a longer prompt" if facts["kv_budget"] is not None else ""
    key = "with a key" if allowed.api_key else "without a key"
    return (
        f"{service.served.name} ({facts['family']}) on {facts['device']}: "
        f"{facts['n_sequences']} at once, {facts['context']} positions each, cache {facts['kv']}{budget}{chat}\n"
        f"{address}/v1, {key}; a page to chat at {address}/; Ctrl-C stops it"
    )
