"""``perplexity``: how well a model predicts a text, and how far its predictions are from another's.

docs/perplexity.md says what is computed, and what may be compared with llama.cpp's numbers.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.loading import check_budget, check_kv, choose_context, choose_device
from bytefloor.errors import FileError, RequestError
from bytefloor.tools.bench import main_format
from bytefloor.tools.bench_rows import Measured, origin, say
from bytefloor.tools.divergence import Divergence, Estimate, perplexity_of, summarise
from bytefloor.tools.packages import require
from bytefloor.tools.saved_base import BaseHeader, BaseReader, BaseWriter, check_base, is_saved_base
from bytefloor.tools.scoring import Runner, SavedBase, Scores, Show, Source, open_source, score
from bytefloor.tools.session import as_text
from bytefloor.tools.windows import Windows, cut_in_chunks, cut_with_stride, digest, first_windows

CONTEXT = 512
"""Where nobody asks for another: what llama.cpp takes, and what numbers are told of."""
BY = ("chunk", "token")


@dataclass(frozen=True)
class PerplexityOptions:
    """context: positions of a window, None for CONTEXT, or for conversations all that the model has. stride: tokens
    from one window to the next, None for chunks side by side. n_windows: the first so many, None for all.

    is_chat: the text is conversations, see ``chat_windows``. by: ``chunk``, or ``token``: one row at a time, on a
    device through the graph of decoding. base: a model, or what ``save_base`` wrote. kv, kv_budget: as in
    ``EngineOptions``; a base that is a model has their defaults. With a budget what goes before the first position of a
    window that counts is its prompt, and is cut.
    """

    context: int | None = None
    stride: int | None = None
    n_windows: int | None = None
    is_chat: bool = False
    by: str = "chunk"
    base: str | None = None
    save_base: Path | None = None
    kv: str | None = None
    kv_budget: int | None = None
    device: str = "auto"


SAVED = {
    "n_vocabulary": "the vocabulary's size",
    "context": "-c",
    "stride": "--stride",
    "n_rows": "the number of predictions (the text, --chunks)",
    "digest": "the digest of the text, or of the tokens made of it,",
}
"""What a saved base has to be alike in."""


@dataclass(frozen=True)
class PerplexityRow(Measured):
    """protocol: chunks, stride or chat. context: positions of a window, of conversations of the longest. bos: whether
    each window begins with the model's BOS in place of its own first token; None for conversations, where the template
    says. n_predictions: tokens that count. n_vocabulary: what probabilities are shared among, rows of padding
    included. running: perplexity after each window. base: the name of a model or file. executor: kernels, or reference.
    kv_budget: positions that were kept of what goes before the first that counts; None for all.
    """

    verb: str
    model: str
    format: str
    base: str | None
    protocol: str
    by: str
    context: int
    stride: int | None
    bos: bool | None
    n_windows: int
    n_predictions: int
    n_vocabulary: int
    kv: str
    kv_budget: int | None
    perplexity: Estimate
    divergence: Divergence | None
    running: tuple[float, ...]
    seconds: float
    executor: str
    notes: tuple[str, ...]
    card: str
    clock_mhz: int | None
    commit: str | None
    date: str


def read_text(file: Path | None) -> str:
    """From a file, or from standard input when it is not a terminal. RequestError where there is none."""
    if file is not None:
        try:
            text = as_text(file.read_bytes(), str(file))
        except OSError as error:
            raise FileError(f"{file}: cannot be read: {error.strerror}") from None
    else:
        text = "" if sys.stdin.isatty() else as_text(sys.stdin.buffer.read(), "standard input")
    if not text.strip():
        raise RequestError("there is no text to score: name a file with -f, or pipe one in")
    return text


def measure(name: str | None, text: str, options: PerplexityOptions, show: Show | None = None) -> PerplexityRow:
    """One row. show: is told of each window its number, how many there are, and the perplexity up to it.

    NumericalError, with window, position and token, where logits are not finite. RequestError where a base was asked
    something else than the model.
    """
    _check(options)
    device = choose_device(options.device)
    source = open_source(name)
    windows = _cut(source, text, options)
    _check_windows(options.kv_budget, windows)
    asked = digest(windows)
    with ExitStack() as stack:
        base = _open_base(source, windows, text, options, asked, stack)
        shorter = "a shorter context (-c) needs less"
        runner = Runner(source, windows, device, shorter, options.kv, options.kv_budget)
        chunk = runner.chunk
        beside: SavedBase | Runner | None = None
        if isinstance(base, BaseReader):
            beside = SavedBase(base, device)
        elif base is not None:
            second = Runner(base, windows, device, "a base saved before (--save-base) needs no second model")
            beside, chunk = second, min(chunk, second.chunk)
        writer = None
        if options.save_base is not None:
            writer = stack.enter_context(BaseWriter(options.save_base, _header(source, windows, options, asked)))
        start = time.perf_counter()
        scores = score(runner, windows, 1 if options.by == "token" else chunk, beside, writer, show)
        seconds = time.perf_counter() - start
    return _row(runner, windows, options, scores, seconds)


def _check(options: PerplexityOptions) -> None:
    check_kv(options.kv)
    check_budget(options.kv_budget, options.kv)
    if options.by not in BY:
        raise RequestError(f"--by {options.by}: expected {' or '.join(BY)}")
    if options.base is not None and options.save_base is not None:
        raise RequestError("both --base and --save-base were given: a base is saved of one model alone")
    if options.save_base is not None:
        check_base(options.save_base)
    if options.is_chat and options.stride is not None:
        raise RequestError("--stride says nothing to --chat: each assistant's turn counts once")
    if options.is_chat and options.kv_budget is not None:
        raise RequestError("--kv-budget says nothing to --chat: turns share windows, and each would end a prompt")


def _check_windows(budget: int | None, windows: Windows) -> None:
    """RequestError where nothing would be cut, so that the result would be no measurement of it."""
    n_prompt = max((window.targets[0] for window in windows), default=0)
    if budget is not None and n_prompt <= budget:
        found = f"windows have {n_prompt} tokens before the first that counts"
        raise RequestError(
            f"--kv-budget {budget}: {found}, expected more; a larger -c, or a smaller --stride, has them"
        )


def _cut(source: Source, text: str, options: PerplexityOptions) -> Windows:
    if options.is_chat:
        return _cut_chat(source, text, options)
    context = choose_context(CONTEXT if options.context is None else options.context, source.model)
    ids, bos_id = source.tokenizer.encode(text), source.bos_id
    if options.stride is None:
        return first_windows(cut_in_chunks(ids, context, bos_id), options.n_windows)
    return first_windows(cut_with_stride(ids, context, options.stride, bos_id), options.n_windows)


def _cut_chat(source: Source, text: str, options: PerplexityOptions) -> Windows:
    require(("msgspec",), "perplexity --chat")
    from bytefloor.tools.chat_windows import cut_conversations

    template = source.template()
    say(template.notices)
    windows = cut_conversations(text, template, source.tokenizer)
    if options.n_windows is not None and options.n_windows < 1:
        raise RequestError(f"--chunks {options.n_windows}: expected at least 1")
    windows = windows[: options.n_windows]
    most = source.model.config.context_length
    if options.context is not None:
        most = choose_context(options.context, source.model)
    for window in windows:
        if len(window.ids) > most:
            raise RequestError(f"{window.name}: {len(window.ids)} tokens, the context holds {most}")
    return windows


def _open_base(
    source: Source, windows: Windows, text: str, options: PerplexityOptions, asked: str, stack: ExitStack
) -> Source | BaseReader | None:
    """What --base names. RequestError where it was, or would be, asked something else than the model; asked: the
    digest of what that is."""
    if options.base is None:
        return None
    path = Path(options.base).expanduser()
    if is_saved_base(path):
        saved = stack.enter_context(BaseReader(path))
        expected = _header(source, windows, options, asked)
        for what in ("n_vocabulary", "protocol", "context", "stride", "n_rows", "digest"):
            was, now = getattr(saved.header, what), getattr(expected, what)
            if was != now:
                name = SAVED.get(what, what)
                raise RequestError(f"--base {path}: {name} was {was} when it was saved, and is {now} now")
        return saved
    base = open_source(options.base)
    if base.n_vocabulary != source.n_vocabulary:
        n, n_base = source.n_vocabulary, base.n_vocabulary
        raise RequestError(f"--base {base.name}: a vocabulary of {n_base} rows, that of {source.name} has {n}")
    if digest(_cut(base, text, options)) != asked:
        raise RequestError(f"--base {base.name}: its tokenizer or template makes other tokens of this text")
    return base


def _protocol(options: PerplexityOptions) -> str:
    return "chat" if options.is_chat else "chunks" if options.stride is None else "stride"


def _context(options: PerplexityOptions) -> int | None:
    """Of all windows; None for conversations."""
    return None if options.is_chat else options.context or CONTEXT


def _header(source: Source, windows: Windows, options: PerplexityOptions, asked: str) -> BaseHeader:
    return BaseHeader(
        model=source.model.config.name,
        format=main_format(source.model),
        kv=options.kv,
        by=options.by,
        n_vocabulary=source.n_vocabulary,
        n_rows=sum(len(window.targets) for window in windows),
        protocol=_protocol(options),
        context=_context(options),
        stride=options.stride,
        digest=asked,
    )


def _row(
    runner: Runner,
    windows: Windows,
    options: PerplexityOptions,
    scores: Scores,
    seconds: float,
) -> PerplexityRow:
    source = runner.source
    return PerplexityRow(
        verb="perplexity",
        model=source.model.config.name,
        format=main_format(source.model),
        base=None if options.base is None else Path(options.base).name,
        protocol=_protocol(options),
        by=options.by,
        context=_context(options) or max(len(window.ids) for window in windows),
        stride=options.stride,
        bos=None if options.is_chat else source.bos_id is not None,
        n_windows=len(windows),
        n_predictions=len(scores.nll),
        n_vocabulary=source.n_vocabulary,
        kv=runner.kv,
        kv_budget=runner.budget,
        perplexity=perplexity_of(scores.nll),
        divergence=summarise(scores.rows) if scores.rows else None,
        running=scores.running,
        seconds=round(seconds, 3),
        executor="kernels" if isinstance(runner.executor, DeviceExecutor) else "reference",
        notes=runner.notices,
        **origin(runner.executor.device),
    )
