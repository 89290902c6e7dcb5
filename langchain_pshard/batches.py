"""Several calls at once: all side by side unless told otherwise, and Ctrl-C ends them all.

LangChain runs a batch in threads and waits for them whatever happens, so an interrupted batch would go on to the end of every text.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

from langchain_pshard.core.errors import ClosedError

_MAX_THREADS = 256
_LOOK_S = 0.2
"""How often the main thread comes out of its wait: on Windows, Ctrl-C does not wake it."""

T = TypeVar("T")
_stop: ContextVar[threading.Event | None] = ContextVar("pshard_stop", default=None)
"""Set when the batch that this thread is part of was interrupted."""


def all_at_once(config: Any, num_inputs: int) -> Any:
    """`config` with room for every input at once, where it sets no bound: LangChain's own default is the number of cores plus four."""
    bound = {"max_concurrency": min(max(num_inputs, 1), _MAX_THREADS)}
    if config is None or isinstance(config, dict):
        return bound | {name: value for name, value in (config or {}).items() if value is not None}
    return [all_at_once(one, num_inputs) for one in config]


def interruptible(work: Callable[[], T]) -> T:
    """Run `work`, calls in threads of its own, such that Ctrl-C ends them: those that run at their next token, others before their first.

    Only the main thread is interrupted; elsewhere `work` runs as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    stop = threading.Event()
    context = copy_context()
    context.run(_stop.set, stop)
    with ThreadPoolExecutor(1, thread_name_prefix="pshard-batch") as executor:
        running = executor.submit(context.run, work)
        try:
            while not running.done():
                wait([running], timeout=_LOOK_S)
        except BaseException:
            stop.set()
            raise
    return running.result()


def check_interrupted() -> None:
    """For each call, at its beginning and at every token.

    Raises:
        ClosedError: the batch was interrupted. Nobody sees it: whoever called the batch gets what interrupted it.
    """
    stop = _stop.get()
    if stop is not None and stop.is_set():
        raise ClosedError("the batch was interrupted")
