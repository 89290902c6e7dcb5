"""`pshard-worker`, also as `python -m workers`."""

from __future__ import annotations

from langchain_pshard.core.interrupts import end_quietly_when_interrupted


def main() -> None:
    """Entry point: what it needs is imported when an interrupt has a quiet end already."""
    end_quietly_when_interrupted()
    from workers.cli import main as command

    command()


if __name__ == "__main__":
    main()
