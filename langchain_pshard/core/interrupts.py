"""How a program ends when Ctrl-C comes where nobody waits for it, above all while it still imports: one line, code 130, no traceback.

For programs alone, called before they import anything heavy. Whoever catches KeyboardInterrupt decides as before.
"""

from __future__ import annotations

import sys
from types import TracebackType

EXIT_INTERRUPTED = 130
"""What a shell reports for Ctrl-C."""


def end_quietly_when_interrupted() -> None:
    """Let a KeyboardInterrupt that nobody caught end this program with a line and `EXIT_INTERRUPTED`; other errors show as before."""
    show = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            show(kind, error, trace)
            return
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)  # which Python honours here, too

    sys.excepthook = end
