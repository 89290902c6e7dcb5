"""`pshard-export`, also as `python -m export_tools`."""

from __future__ import annotations

from langchain_pshard.core.interrupts import end_quietly_when_interrupted


def main() -> None:
    """Entry point: what it needs is imported when an interrupt has a quiet end already."""
    end_quietly_when_interrupted()
    from export_tools.cli import main as command

    command(prog_name="pshard-export")


if __name__ == "__main__":
    main()
