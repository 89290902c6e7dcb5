"""Programs to read and run: `python -m examples.NAME`."""

import sys

from langchain_pshard.core.interrupts import end_quietly_when_interrupted

if sys.argv[0] == "-m":  # Python is about to run one of them: its imports take a second that Ctrl-C may fall into
    end_quietly_when_interrupted()
