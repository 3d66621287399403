"""The entry point of the command."""

from __future__ import annotations

import subprocess
import sys

PRESSED = """
import signal, sys

class Press:
    def find_spec(self, name, *rest):
        if name == "typer":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Press())
from bytefloor.__main__ import main
main()
"""


def test_ctrl_c_before_there_is_a_command_line_ends_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", PRESSED, "--version"], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "bytefloor", "--version"], capture_output=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.startswith(b"bytefloor ")
