"""Which software this is, as it is said to peers."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def software_version() -> str:
    """Version of the installed package; `source` when it runs from a source tree that is not installed."""
    try:
        return version("langchain-pshard")
    except PackageNotFoundError:
        return "source"
