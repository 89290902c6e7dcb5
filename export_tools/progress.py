"""How long work tells what it is doing; the exporter knows this seam, only the command line knows rich."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Progress(Protocol):
    """Shows tasks that take longer than a second."""

    def task(self, description: str, *, total: int | None = None) -> AbstractContextManager[Callable[[int], None]]:
        """Show `description` while the block runs.

        Args:
            description: what is being done, for a person.
            total: bytes there are to do; None when nobody knows, then only the elapsed time shows.

        Returns:
            A context manager whose value advances the task by so many bytes.
        """
        ...

    def note(self, text: str) -> None:
        """Tell something that happened."""
        ...


class SilentProgress:
    """Shows nothing; for callers that are programs."""

    @contextmanager
    def task(self, description: str, *, total: int | None = None) -> Iterator[Callable[[int], None]]:  # noqa: ARG002  # the seam's names
        """See `Progress.task`."""
        yield lambda _: None

    def note(self, text: str) -> None:
        """See `Progress.note`."""
