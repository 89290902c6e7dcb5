"""Connections of chat models to fleets: opened at first use, shared by models that name the same fleet, closed with the last of them.

A chat model is copied freely (configurable fields make one per call), pickled and sent to other processes. Its connection owns threads,
sockets and, for a local bundle, worker processes. So a model keeps only a `Share`, and equal settings lead to one connection.
"""

from __future__ import annotations

import logging
import threading
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from langchain_pshard.core.errors import ClosedError, PShardError
from langchain_pshard.pipeline.options import ClientOptions
from langchain_pshard.prompt import Prompter

if TYPE_CHECKING:
    from langchain_pshard.pipeline.client import PipelineClient
    from langchain_pshard.pipeline.local import LocalFleet

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """Which fleet, and how a local one is started. Exactly one of `bundle` and `workers` is given."""

    bundle: Path | None
    workers: frozenset[str]
    connect_timeout_s: float
    runner: str | None
    numerics: str
    kv_memory: str | None
    kv_precision: str | None
    num_threads: int | None
    options: ClientOptions
    drafts: bool = False
    """Whether a local one serves the bundle's draft model."""


class Connection:
    """An open client with what a chat model needs beside it. Usable from any thread; closing twice is allowed."""

    def __init__(self, settings: FleetSettings) -> None:
        from langchain_pshard.pipeline.client import PipelineClient

        with ExitStack() as stack:
            self._fleet = None if settings.bundle is None else stack.enter_context(_local_fleet(settings, settings.bundle))
            workers = sorted(settings.workers) if self._fleet is None else list(self._fleet.addresses)
            self.client: PipelineClient = stack.enter_context(
                PipelineClient.connect(
                    workers,
                    connect_timeout_s=settings.connect_timeout_s,
                    on_lost=None if self._fleet is None else self._mend_behind,
                    options=settings.options,
                )
            )
            self.prompter = Prompter(self.client.tokenizer)
            self._parts = stack.pop_all()

    @property
    def is_whole(self) -> bool:
        """Whether no worker that was started here has died. What became of other workers shows when they are asked."""
        return self._fleet is None or self._fleet.is_whole

    def mend(self) -> None:
        """Start dead workers of ours again; the client finds them where they were.

        Raises:
            FleetError, BundleError, ...: what `LocalFleet.revive` raises.
        """
        if self._fleet is not None and not self._fleet.is_whole:
            _log.warning("a local worker has died: starting it again")
            self._fleet.revive()

    def _mend_behind(self, _error: PShardError) -> None:
        """The chain is lost: calls that wait for it can go on only when a dead worker of ours is back, and they start nothing."""
        threading.Thread(target=self._try_to_mend, name="pshard-mend", daemon=True).start()

    def _try_to_mend(self) -> None:
        try:
            self.mend()
        except PShardError as error:
            _log.warning("a local worker has died and could not be started again; the next call tries once more: %s", error)

    def close(self) -> None:
        self._parts.close()


def _local_fleet(settings: FleetSettings, bundle: Path) -> LocalFleet:
    """Workers started here."""
    from langchain_pshard.pipeline.local import LocalFleet

    return LocalFleet(
        bundle,
        num_threads=settings.num_threads,
        runner=settings.runner,
        numerics=settings.numerics,
        kv_memory=settings.kv_memory,
        kv_precision=settings.kv_precision,
        drafts=settings.drafts,
    )


class _Entry:
    """One fleet in the table of this process. `num_holders` belongs to `_table_lock`, the rest to `lock`."""

    def __init__(self, settings: FleetSettings) -> None:
        self.settings = settings
        self.num_holders = 0
        self.lock = threading.RLock()
        self.connection: Connection | None = None
        self.is_released = False

    def open(self) -> Connection:
        with self.lock:
            if self.is_released:
                raise ClosedError("the chat model was closed while a call was connecting")
            if self.connection is not None and not self.connection.client.is_open:
                self.connection.close()  # it failed inside: one bad call must not be the last one
                self.connection = None
            if self.connection is None:
                self.connection = Connection(self.settings)
            self.connection.mend()
            return self.connection

    def release(self) -> None:
        with self.lock:
            self.is_released = True
            if self.connection is not None:
                self.connection.close()
                self.connection = None


_table: dict[FleetSettings, _Entry] = {}
_table_lock = threading.RLock()  # reentrant: the garbage collector may drop a share while its thread is in here


class Share:
    """One model's part in a connection. Copies and pickles of a share are new ones that hold nothing."""

    def __init__(self) -> None:
        self._entry: _Entry | None = None
        self._drop: weakref.finalize[[_Entry], Share] | None = None

    def hold(self, settings: FleetSettings) -> None:
        """Keep the connection of `settings` alive as soon as somebody opens it. No I/O."""
        self._hold(settings)

    def open(self, settings: FleetSettings) -> Connection:
        """The connection of `settings`, opened by the first caller while others wait.

        Raises:
            FleetError, BundleError, ...: what `PipelineClient.connect` and `LocalFleet` raise; the next call tries again.
        """
        return self._hold(settings).open()

    def peek(self) -> Connection | None:
        """The connection if it is open."""
        entry = self._entry
        return None if entry is None else entry.connection

    def close(self) -> None:
        """Let go; the last holder closes the connection. The share can be used again."""
        with _table_lock:
            drop, self._drop, self._entry = self._drop, None, None
        if drop is not None:
            drop()

    def _hold(self, settings: FleetSettings) -> _Entry:
        with _table_lock:
            if self._entry is not None and self._entry.settings == settings:
                return self._entry
        self.close()
        with _table_lock:
            entry = self._entry = _table.setdefault(settings, _Entry(settings))
            entry.num_holders += 1
            self._drop = weakref.finalize(self, _release, entry)
            return entry

    def __reduce__(self) -> tuple[type[Share], tuple[()]]:
        return Share, ()


def _release(entry: _Entry) -> None:
    with _table_lock:
        entry.num_holders -= 1
        if entry.num_holders:
            return
        if _table.get(entry.settings) is entry:
            del _table[entry.settings]
    entry.release()
