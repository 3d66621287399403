"""``perplexity`` for people: the running estimate while it is measured, and the lines at the end."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from bytefloor.tools.divergence import Divergence, Estimate
from bytefloor.tools.perplexity import PerplexityRow


class RunningEstimate:
    """``[1]23.6472,[2]21.2416,...`` as llama.cpp has it, on standard error; on a terminal with a bar until the end."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
        is_shown = self._console.is_interactive
        self._bar = Progress(*columns, console=self._console, transient=True, disable=not is_shown)
        self._task = self._bar.add_task("", visible=False)
        self._said: list[str] = []
        self._is_line_open = False

    def __enter__(self) -> RunningEstimate:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar.live.is_started:
            self._bar.stop()
        if self._said:
            self._write("".join(self._said))
        if self._is_line_open:
            self._write("\n")

    def __call__(self, number: int, n: int, perplexity: float) -> None:
        """After each window."""
        piece = f"[{number}]{perplexity:.4f},"
        if not self._console.is_interactive:
            self._write(piece)
            return
        self._said.append(piece)
        if not self._bar.live.is_started:
            self._bar.start()
        told = f"[{number}/{n}] {perplexity:.4f}"
        self._bar.update(self._task, description=told, completed=number, total=n, visible=True, refresh=True)

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()
        self._is_line_open = not text.endswith("\n")


def lines_of(row: PerplexityRow) -> list[str]:
    """The result, with what has to be the same before two of them are compared."""
    how = {
        "chunks": f"chunks of {row.context}, the second half of each",
        "stride": f"windows of {row.context} every {row.stride} tokens, the last {row.stride} of each",
        "chat": f"windows of conversations, at most {row.context} long, the assistant's turns",
    }[row.protocol]
    kept = "" if row.kv_budget is None else f", of which {row.kv_budget} positions of what goes before are kept"
    begins = {True: "; BOS in place of each one's first token", False: "; no BOS", None: ""}[row.bos]
    return [
        f"{row.model}, {row.format}: perplexity {_number(row.perplexity, 4)}",
        f"{row.n_predictions} predictions in {row.n_windows} {how}{begins}; by {row.by}; "
        f"cache {row.kv}{kept}; {row.executor} on {row.card}; {row.seconds:.1f} s",
        *(_divergence_lines(row.divergence, row.base or "") if row.divergence is not None else []),
    ]


def _divergence_lines(found: Divergence, base: str) -> list[str]:
    marks = {"50": "median"}
    percentiles = ", ".join(f"{marks.get(key, key + ' %')} {kl:.3g}" for key, kl in found.kl_percentiles.items())
    correlation = (
        "" if found.correlation is None else f", correlation of log-probabilities {100 * found.correlation:.4f} %"
    )
    return [
        f"beside {base}, perplexity {_number(found.base_perplexity, 4)}:",
        f"KL divergence, nats: mean {_small(found.kl)}; {percentiles}, largest {found.kl_largest:.3g}",
        f"same best token: {_percent(found.same_best)}",
        f"p of the right token: {_percent(found.p_difference)} on average, "
        f"root mean square {_percent(found.p_difference_rms)}",
        f"ratio of perplexities {_number(found.ratio, 6)}, its logarithm {_small(found.log_ratio)}{correlation}",
    ]


def _number(estimate: Estimate, digits: int) -> str:
    error = "" if estimate.error is None else f" +/- {estimate.error:.{digits + 1}f}"
    return f"{estimate.value:.{digits}f}{error}"


def _small(estimate: Estimate) -> str:
    error = "" if estimate.error is None else f" +/- {estimate.error:.2g}"
    return f"{estimate.value:.4g}{error}"


def _percent(estimate: Estimate) -> str:
    error = "" if estimate.error is None else f" +/- {100 * estimate.error:.3f}"
    return f"{100 * estimate.value:.3f}{error} %"
