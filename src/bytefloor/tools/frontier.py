"""``frontier``: a model in several recipes, each with its size, its speed and its distance from the source.

The source is scored once; its probabilities wait in a file (`saved_base.py`) for every recipe. Each recipe is written
as ``quantize`` writes it, opened from its file, scored over the same tokens, timed as ``bench`` times it, and removed.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bytefloor.engine.loading import choose_device
from bytefloor.engine.stream_limit import StreamLimit
from bytefloor.errors import BytefloorError, FileError, RequestError, UnsupportedError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.files.stored import Checkpoint, count_formats
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.families import load_model
from bytefloor.quantize.job import Job, carry_out, prepare
from bytefloor.quantize.recipes import BUILT_IN, SOURCE, Recipe, check_is_itself, substitutes_of
from bytefloor.quantize.write import Loss
from bytefloor.tools.bench import BenchOptions, bench
from bytefloor.tools.bench_rows import Row, free_memory, measure_limit, origin
from bytefloor.tools.frontier_rows import FAILED, MEASURED, REFUSED, SOURCE_ROW, FrontierRow, speed_of
from bytefloor.tools.models import SHARD, find_model
from bytefloor.tools.perplexity import CONTEXT, PerplexityOptions, PerplexityRow, measure
from bytefloor.tools.quantize import say_progress, total_error


@dataclass(frozen=True)
class FrontierOptions:
    """context, n_windows: as ``PerplexityOptions`` has them. depth: one more depth of the cache to be timed at, beside
    an empty one. n_tokens, repeats: of a timing, see ``BenchOptions``. keep: a folder where what is written stays, each
    under its recipe's name.
    """

    recipes: tuple[Recipe, ...]
    context: int | None = None
    n_windows: int | None = None
    depth: int | None = None
    n_tokens: int = 128
    repeats: int = 5
    keep: Path | None = None
    device: str = "auto"


def frontier(name: str | None, text: str, options: FrontierOptions) -> Iterator[FrontierRow]:
    """The source's row, then one of each recipe, as they are measured.

    What is wrong with a recipe is its row's reason; what is wrong with the source, or with what was asked, is raised.
    FileError where something is already at the place of what is to be kept.
    """
    device = choose_device(options.device)
    path = find_model(name)
    targets = {recipe.name: recipe.target() for recipe in options.recipes}
    places = {name: path_of(options.keep, name, target.container == "gguf") for name, target in targets.items()}
    for place in places.values():
        if options.keep is not None and place.exists():
            raise FileError(f"--keep-files: {place}: there is something already; it is not overwritten")
    for recipe in options.recipes:
        if recipe not in BUILT_IN:
            _refuse_slips(path, recipe)
    with tempfile.TemporaryDirectory(prefix="bytefloor-frontier-") as folder:
        found = _Frontier(path, text, options, device, Path(folder))
        yield found.source()
        for recipe in options.recipes:
            free_memory(device)
            yield found.recipe(recipe)


def _refuse_slips(path: Path, recipe: Recipe) -> None:
    """RequestError for a pattern that fits nothing, say, before the source is scored. What a container cannot hold is a
    row's reason."""
    try:
        prepare(path, recipe.target())
    except UnsupportedError:
        pass
    except RequestError as error:
        raise RequestError(f"recipe {recipe.name}: {error}") from None


def path_of(folder: Path | None, name: str, is_gguf: bool) -> Path:
    """Where a recipe's model lies in a folder; None: in the one that is removed."""
    return (folder or Path()) / (f"{name}.gguf" if is_gguf else name)


class _Frontier:
    def __init__(self, path: Path, text: str, options: FrontierOptions, device: torch.device, folder: Path) -> None:
        self._path, self._text, self._options, self._device, self._folder = path, text, options, device, folder
        self._base = folder / "base"
        self._limit: StreamLimit | None = None
        self._checkpoint = open_checkpoint(path)

    def source(self) -> FrontierRow:
        """Scored, its probabilities saved; timed like all others."""
        start = time.perf_counter()
        scored = measure(str(self._path), self._text, self._perplexity(is_base=True))
        free_memory(self._device)
        self._limit = measure_limit(self._device)
        blank = self._blank(Recipe(SOURCE, ""))
        return self._timed(blank, SOURCE_ROW, self._path, scored, time.perf_counter() - start)

    def recipe(self, recipe: Recipe) -> FrontierRow:
        """Written, opened, scored and timed; or why not."""
        blank = self._blank(recipe)
        start = time.perf_counter()
        try:
            job = prepare(self._path, recipe.target())
            check_is_itself(job.plan)
        except (RequestError, UnsupportedError) as error:
            return replace(blank, reason=str(error))
        out = path_of(self._options.keep or self._folder, recipe.name, job.is_gguf)
        written = replace(blank, substitutes=substitutes_of(job.plan))
        try:
            losses = self._write(job, out, recipe)
            written = replace(
                written,
                weight_error=total_error(job.plan, losses),
                quantise_s=round(time.perf_counter() - start, 3),
            )
            start = time.perf_counter()
            scored = measure(str(out), self._text, self._perplexity(is_base=False))
            free_memory(self._device)
            return self._timed(written, MEASURED, out, scored, time.perf_counter() - start)
        except (BytefloorError, OSError) as error:
            return replace(written, state=FAILED, reason=str(error))
        finally:
            if self._options.keep is None:
                out.unlink(missing_ok=True) if job.is_gguf else shutil.rmtree(out, ignore_errors=True)

    def _perplexity(self, is_base: bool) -> PerplexityOptions:
        options = self._options
        return PerplexityOptions(
            options.context,
            n_windows=options.n_windows,
            base=None if is_base else str(self._base),
            save_base=self._base if is_base else None,
            device=options.device,
        )

    def _write(self, job: Job, out: Path, recipe: Recipe) -> list[Loss]:
        losses: list[Loss] = []

        def told(loss: Loss, number: int, count: int) -> None:
            losses.append(loss)
            say_progress(f"{recipe.name}: writing {number} of {count} tensors", is_last=number == count)

        # On the CPU whatever the device is, so that a recipe is the same file everywhere.
        carry_out(job, out, {}, torch.device("cpu"), told)
        return losses

    def _timed(self, row: FrontierRow, state: str, path: Path, scored: PerplexityRow, score_s: float) -> FrontierRow:
        """The row with all that was measured of a file. What goes wrong with its timing alone costs no quality."""
        options, start, reason = self._options, time.perf_counter(), None
        depths = (0,) if options.depth is None else (0, options.depth)
        asked = BenchOptions((), options.n_tokens, depths, options.repeats, options.device, is_sampled=False)
        rates: list[Row] = []
        try:
            rates += bench(str(path), asked, self._limit)
        except (BytefloorError, OSError) as error:
            state, reason = FAILED, str(error)
        checkpoint = open_checkpoint(path)
        counts = count_formats(checkpoint)
        n_weights, n_bytes = (sum(values) for values in zip(*((c.n_weights, c.n_bytes) for c in counts), strict=True))
        return replace(
            row,
            state=state,
            reason=reason,
            formats={count.name: count.n_bytes for count in counts},
            n_weights=n_weights,
            n_bytes=n_bytes,
            disk_bytes=disk_bytes(checkpoint.path),
            bits_per_weight=round(8 * n_bytes / n_weights, 4),
            token_bytes=token_bytes(checkpoint),
            n_windows=scored.n_windows,
            n_predictions=scored.n_predictions,
            kv=scored.kv,
            perplexity=scored.perplexity,
            divergence=scored.divergence,
            speeds=tuple(speed_of(rate) for rate in rates),
            score_s=round(score_s, 3),
            speed_s=round(time.perf_counter() - start, 3),
            executor=scored.executor,
            notes=tuple(dict.fromkeys((*scored.notes, *(note for rate in rates for note in rate.notes)))),
        )

    def _blank(self, recipe: Recipe) -> FrontierRow:
        """Of a recipe of which nothing is known yet."""
        return FrontierRow(
            verb="frontier",
            model=load_model(self._checkpoint).config.name,
            source=self._path.name,
            source_formats=matrix_formats(self._checkpoint),
            recipe=recipe.name,
            words=recipe.words,
            state=REFUSED,
            context=self._options.context or CONTEXT,
            **origin(self._device),
        )


def matrix_formats(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Formats that matrices have, most bytes first."""
    matrices = {name: tensor for name, tensor in checkpoint.tensors.items() if len(tensor.shape) == 2}
    return tuple(count.name for count in count_formats(replace(checkpoint, tensors=matrices)))


def token_bytes(checkpoint: Checkpoint) -> int:
    """The weights that a token reads, in the file's own encoding."""
    model = load_model(checkpoint)
    return build_step(model.config, model.weights, Rounding()).token_bytes(0)[0]


def disk_bytes(path: Path) -> int:
    """Of a file, all shards of a split one, or everything that lies in a folder."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    shards = path.parent.glob(SHARD.sub("-*.gguf", path.name)) if SHARD.search(path.name) else [path]
    return sum(file.stat().st_size for file in shards)
