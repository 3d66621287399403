"""Entry point of the ``bytefloor`` command, and of ``python -m bytefloor``."""

from __future__ import annotations

from bytefloor.tools import interrupt


def main() -> None:
    """The command line. To import even that takes a moment, in which Ctrl-C is no error either."""
    with interrupt.at_once():
        from bytefloor import cli
    cli.main()


if __name__ == "__main__":
    main()
