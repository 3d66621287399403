"""How far a long prompt has been read: a bar on a terminal, which goes when the answer begins."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock, Timer
from types import TracebackType

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from bytefloor.engine.request import Reading

AFTER_S = 1.0
"""A prompt that takes longer is shown while its first step is still under way."""
LOOK_S = 0.1
"""Between two looks: each waits for the device, which has nothing to do then until it is given the next chunk."""


class ReadingBar:
    """Shown where a prompt takes several steps and more than LOOK_S, or more than AFTER_S. Nowhere but on a terminal:
    elsewhere, and where nothing that was written can be taken away, it asks nothing and waits for nothing.

    ask: how far the prompt has been read, None once it has been. device: what is waited for before that is shown.
    """

    def __init__(self, console: Console, ask: Callable[[], Reading | None], device: torch.device) -> None:
        self._ask, self._device = ask, device
        # Whoever prints the answer does so when the bar is gone: nobody's stream needs to be caught.
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not console.is_interactive,
        )
        self._task = self._bar.add_task("reading the prompt", total=None)
        self._is_over = not console.is_interactive
        self._looked_at = time.monotonic()
        self._lock = Lock()
        self._timer = Timer(AFTER_S, self._show)
        self._timer.daemon = True

    def __enter__(self) -> ReadingBar:
        if not self._is_over:
            self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def look(self) -> None:
        """Between two steps."""
        if self._is_over:
            return
        if self._ask() is None:
            self.close()
        elif time.monotonic() - self._looked_at >= LOOK_S:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._show()
            self._looked_at = time.monotonic()

    def _show(self) -> None:
        with self._lock:  # the timer's thread comes here too
            reading = self._ask()
            if self._is_over or reading is None:
                return
            cached = f", {reading.n_cached} of them from the cache" if reading.n_cached else ""
            text = f"reading the prompt {reading.n_done}/{reading.n_prompt}{cached}"
            self._bar.update(
                self._task, description=text, completed=reading.n_done, total=reading.n_prompt, refresh=True
            )
            self._bar.start()  # nothing where it is shown already

    def close(self) -> None:
        """Take it away. Nothing shows it again."""
        with self._lock:
            self._is_over = True
            self._timer.cancel()
            if self._bar.live.is_started:  # otherwise some versions of rich end a line where there is no terminal
                self._bar.stop()
