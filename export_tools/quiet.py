"""Libraries that talk to people who train models, kept quiet. What goes wrong in them is raised; only advice, tables and bars are lost."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator

from transformers.utils import logging as transformers_logging


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No advice and no bars."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def quiet_nncf() -> Iterator[None]:
    """No tables at INFO and no bars on standard output, for which NNCF has no switch."""
    logger = logging.getLogger("nncf")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)
