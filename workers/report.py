"""What a worker process tells whoever started it: one ready line on standard output, everything else on standard error.

Two formats: text for people, one JSON object a line for programs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from langchain_pshard.core.bundle import Manifest
from langchain_pshard.core.errors import PShardError
from langchain_pshard.transport.address import Address
from workers.worker import Identity


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps({"event": "log", "level": record.levelname.lower(), "message": record.getMessage()})


class Report:
    """Reports of one process."""

    def __init__(self, *, is_json: bool) -> None:
        self._is_json = is_json
        self._console = Console(stderr=True)
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_JsonLines() if is_json else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger = logging.getLogger("pshard")
        logger.handlers = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False

    @contextlib.contextmanager
    def progress(self, what: str, num_bytes: int) -> Iterator[Progress]:
        """A bar over `num_bytes`, drawn on a terminal only; its one task has id 0."""
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
        with Progress(*columns, console=self._console, disable=self._is_json or not self._console.is_terminal, transient=True) as progress:
            progress.add_task(what, total=num_bytes)
            yield progress

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """A sign of life while something without a measure goes on, drawn on a terminal only."""
        if self._is_json or not self._console.is_terminal:
            yield
            return
        with self._console.status(what):
            yield

    def ready(self, identity: Identity, address: str) -> None:
        """All engines are warm and served at `address`."""
        stages = [offer.stage_idx for offer in identity.offers]
        manifest = identity.manifest
        if self._is_json:
            line = {
                "event": "ready",
                "address": address,
                "stages": stages,
                "draft": identity.draft.model_name if identity.draft else None,
                "fingerprint": manifest.fingerprint,
                "worker": identity.worker,
                "pid": os.getpid(),
            }
            print(json.dumps(line), flush=True)
            return
        served = [f"stage {offer.stage_idx} (layers {offer.span}, {offer.num_bytes / 2**20:.0f} MiB)" for offer in identity.offers]
        if identity.draft is not None:
            served.append(f"draft {identity.draft.model_name} ({identity.draft.num_bytes / 2**20:.0f} MiB)")
        print(f"ready: {manifest.model_name}, {', '.join(served)} at {address}")
        print(_paste_line(manifest, stages, address), flush=True)

    def warn(self, message: str) -> None:
        """Something the user should know before anything happens."""
        logging.getLogger("pshard.worker").warning(message)

    def error(self, error: PShardError) -> None:
        """Why the process ends."""
        if self._is_json:
            print(json.dumps({"event": "error", "code": error.code, "message": str(error)}), flush=True)
        print("error: " + " ".join(str(error).split()), file=sys.stderr, flush=True)


def _paste_line(manifest: Manifest, stages: list[int], address: str) -> str:
    line = f'ChatPShard(workers=["{_dialable(address)}"])'
    others = [str(stage_idx) for stage_idx in range(manifest.num_stages) if stage_idx not in stages]
    if not others:
        return line
    return f"{line}  # and the address{'es' if len(others) > 1 else ''} of stage{'s' if len(others) > 1 else ''} {', '.join(others)}"


def _dialable(address: str) -> str:
    """An address that others can dial: where we listen on every interface, this machine's name stands in for it."""
    parsed = Address.parse(address)
    return str(replace(parsed, host=socket.gethostname())) if parsed.host in {"0.0.0.0", "::"} else address  # noqa: S104  # compared only
