"""From a path to an engine that answers: the one place where files, text, model and executor are put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bytefloor.engine.cache import Room
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.engine import Engine
from bytefloor.engine.executor import Executor
from bytefloor.engine.launches import STORAGES
from bytefloor.engine.memory import Advice
from bytefloor.engine.progress import Progress
from bytefloor.engine.reference import Precision, ReferenceExecutor
from bytefloor.engine.sampler import never_sampled
from bytefloor.engine.speculation import Speculation
from bytefloor.errors import RequestError, UnsupportedError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.files.stored import Checkpoint
from bytefloor.model.config import ModelConfig, Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.families import Model, load_model
from bytefloor.ops.eviction import OBSERVED
from bytefloor.ops.page_codes import CODED
from bytefloor.text.chat import ChatTemplate
from bytefloor.text.tokenizer import Tokenizer

DEFAULT_CONTEXT = 8192
"""Where the user names none: the model's own context, but no more than this. What is used is always shown."""
KERNEL_CHUNK, REFERENCE_CHUNK, CODED_CHUNK = 2048, 512, 128
"""Rows of a step where nobody asks for another number. Tensor cores want many: each block unpacks weights for all of
them. On a CPU more rows are hardly faster, and what holds the scores of attention grows with them; where pages are
coded, so does the room for those that are not yet."""
MOST_DRAFT_ROWS = 16
"""Of one sequence in a step of the kernels that computes drafts along."""
DEVICE_ROUNDING = Rounding(activations="int16_g32", cache="bf16")
"""What the kernels round: activations of a product to 16-bit codes in groups of 32, the cache to bf16 or to codes."""
KERNEL_KV_TYPES = tuple(STORAGES)
KV_TYPES = (*KERNEL_KV_TYPES, CODED)
"""What a user may ask the cache to keep, the last of the reference executor alone; without a word kernels keep bf16 and
the reference executor float32."""
WEIGHT_TYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class EngineOptions:
    """How to open a model. ``weights`` is for the reference executor; kernels read weights as the file has them.

    context: positions of prompt and answer together, None for the default. device: ``auto``, ``cpu`` or ``cuda``.

    weights: ``float32``, or ``bf16`` to halve what a token reads on a CPU. n_sequences: how many run at once.
    chunk: most rows of a step, 1 or more; None for KERNEL_CHUNK, REFERENCE_CHUNK or CODED_CHUNK, as it may be. kv: one
    of KV_TYPES, None for the default. n_snapshots: how many prefixes are kept. positions: of all sequences and prefixes
    together, None for n_sequences full contexts; where they run out, sequences wait for each other. speculates: whether
    what a text has said before is computed ahead, where that pays. kv_budget: of a longer prompt layers without a
    window keep so many positions, those that its last rows attend to most; None for all of them.
    """

    context: int | None = None
    device: str = "auto"
    weights: str = "float32"
    n_sequences: int = 1
    chunk: int | None = None
    kv: str | None = None
    n_snapshots: int = 4
    positions: int | None = None
    speculates: bool = True
    kv_budget: int | None = None


@dataclass(frozen=True)
class Legible:
    """A model but for its weights. template is None for a file that brings no chat template."""

    model: Model
    tokenizer: Tokenizer
    template: ChatTemplate | None

    @property
    def detects_loops(self) -> bool:
        """Whether answers end that only repeat themselves: on for Gemma's instruct models, which fall into loops."""
        return self.template is not None and self.model.config.family.startswith("gemma")

    def chat_template(self) -> ChatTemplate:
        """The file's template, or a built-in one for its turn tokens. RequestError where there are none either."""
        if self.template is not None:
            return self.template
        config = self.model.config
        return ChatTemplate.for_tokenizer(self.tokenizer, config.family, bare_model_turn=config.per_layer_width > 0)


@dataclass(frozen=True)
class Opened(Legible):
    """A model ready to answer. kv: what the cache keeps."""

    engine: Engine
    device: torch.device
    notices: tuple[str, ...]
    kv: str


Look = Callable[[Legible, int], None]
"""What is told of a model, and of the positions that a sequence may have, before weights are read."""


def check_kv(kv: str | None, known: tuple[str, ...] = KV_TYPES) -> None:
    """RequestError for what no cache keeps, or none that is known to who asks."""
    if kv is not None and kv not in known:
        raise RequestError(f"--kv {kv}: expected {', '.join(known[:-1])} or {known[-1]}")


def check_budget(budget: int | None, kv: str | None) -> None:
    """RequestError for one that leaves nothing to choose, and for a cache that single positions cannot leave."""
    if budget is not None and budget <= OBSERVED:
        raise RequestError(
            f"--kv-budget {budget}: expected more than {OBSERVED}, the last rows of a prompt, which choose"
        )
    if budget is not None and kv == CODED:
        raise RequestError(
            f"--kv-budget {budget}: --kv {CODED} codes pages as a whole, and keeps all positions of them"
        )


def check_has_positions_to_drop(budget: int | None, config: ModelConfig) -> None:
    """RequestError for a model all of whose layers have windows: they hold no more than those already."""
    windows = [layer.window for layer in config.layers]
    if budget is not None and None not in windows:
        raise RequestError(
            f"--kv-budget {budget}: every layer of {config.name} has a window and keeps no more than that"
        )


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The checkpoint's own tokenizer."""
    if checkpoint.container == "gguf":
        return Tokenizer.from_gguf(checkpoint.metadata)
    return Tokenizer.from_directory(checkpoint.directory or checkpoint.path.parent, checkpoint.metadata)


def open_engine(
    source: Path | Checkpoint, options: EngineOptions, progress: Progress | None = None, look: Look | None = None
) -> Opened:
    """Reads headers, builds the tokenizer, loads the weights. Refuses before it allocates what does not fit.

    look: raises where what is to be asked makes no sense to this model: nobody waits for weights to hear that.
    """
    device = choose_device(options.device)
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    model = load_model(checkpoint)
    tokenizer = open_tokenizer(checkpoint)
    context = choose_context(options.context, model)
    has_template = tokenizer.chat_template is not None
    template = ChatTemplate.for_tokenizer(tokenizer, model.config.family) if has_template else None
    if look is not None:
        look(Legible(model, tokenizer, template), context)
    room = Room(context, options.chunk, options.n_sequences, options.n_snapshots, options.positions, options.kv_budget)
    banned = never_sampled(tokenizer, model.config.vocabulary_size)
    shorter = "a shorter context (-c)" if options.n_sequences == 1 else "a shorter context (-c), fewer at once"
    narrower = f"{shorter} or --weights bf16 needs less"
    has_codes = options.kv in ("int8", "fp8", CODED)
    fewer = f"{shorter} needs less" if has_codes else f"{shorter} or --kv int8 needs less"
    advice = Advice(kernels=fewer, reference=narrower if options.weights == "float32" else f"{shorter} needs less")
    executor, notices = make_executor(
        model, room, device, WEIGHT_TYPES[options.weights], banned, progress, advice, options.kv,
        MOST_DRAFT_ROWS if options.speculates else 1,
    )  # fmt: skip
    speculation = Speculation(executor.most_draft_rows) if options.speculates else None
    engine = Engine(executor, tokenizer, model.config.vocabulary_size, speculation)
    told = (*checkpoint.notices, *tokenizer.notices, *notices)
    return Opened(model, tokenizer, template, engine, device, told, executor.step.storage)


def make_executor(
    model: Model,
    room: Room,
    device: torch.device,
    weights: torch.dtype = torch.float32,
    banned_ids: frozenset[int] = frozenset(),
    progress: Progress | None = None,
    advice: Advice | None = None,
    kv: str | None = None,
    draft_rows: int = 1,
) -> tuple[Executor, tuple[str, ...]]:
    """The kernels where they can run this model, otherwise the reference executor; and what the user should be told.

    Chunks are KERNEL_CHUNK, REFERENCE_CHUNK or CODED_CHUNK long where the room leaves that open. draft_rows: see
    ``DeviceExecutor``.
    """
    check_kv(kv)
    check_budget(room.budget, kv)
    check_has_positions_to_drop(room.budget, model.config)
    notices: tuple[str, ...] = ()
    advice = advice or Advice()
    if device.type == "cuda":
        try:
            step = build_step(model.config, model.weights, replace(DEVICE_ROUNDING, cache=kv or DEVICE_ROUNDING.cache))
            executor = DeviceExecutor(
                step,
                room.plan(KERNEL_CHUNK),
                device=device,
                banned_ids=banned_ids,
                progress=progress,
                advice=advice.kernels,
                draft_rows=draft_rows,
            )
            told = "--weights has no effect: the kernels read weights as the file has them"
            return executor, () if weights == torch.float32 else (told,)
        except UnsupportedError as error:
            notices = (f"{error}; running the reference executor on the GPU instead, which is slow",)
        # Not in the handler: there the error's traceback still holds what the refused executor had allocated.
        torch.cuda.empty_cache()
    step = build_step(model.config, model.weights, Rounding(cache=kv or Rounding.cache))
    precision = Precision(weights=weights)
    plan = room.plan(CODED_CHUNK if kv == CODED else REFERENCE_CHUNK)
    found = ReferenceExecutor(
        step, plan, device=device, precision=precision, progress=progress, advice=advice.reference
    )
    return found, notices


def choose_device(name: str) -> torch.device:
    """``auto`` takes a CUDA device where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("--device cuda: torch sees no CUDA device here")
    if name not in ("cpu", "cuda"):
        raise UnsupportedError(f"--device {name}: expected auto, cpu or cuda")
    return torch.device(name)


def choose_context(asked: int | None, model: Model) -> int:
    """The capacity of a sequence. More than the model was made for is refused, not stretched."""
    most = model.config.context_length
    if asked is None:
        return min(most, DEFAULT_CONTEXT)
    if not 2 <= asked <= most:
        raise RequestError(f"context {asked} is out of range: the model was made for 2 to {most} positions")
    return asked
