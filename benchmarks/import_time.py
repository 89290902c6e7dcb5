"""What importing the chat model adds to importing LangChain's own base class, in fresh interpreters.

Taken off is `import langchain_core.language_models.chat_models` and what that imports: no chat model of LangChain goes without. Everything
else counts as ours, other parts of langchain-core too, and also the parts that are imported only at the first call (pyzmq, tokenizers).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from rich.console import Console
from rich.progress import Progress

from benchmarks.report import Figure, Report, Samples

TARGET_S = 0.6
REPETITIONS = 7

_PROGRAM = """
import time
began = time.perf_counter()
import langchain_core.language_models.chat_models
base = time.perf_counter()
from langchain_pshard import ChatPShard
model = time.perf_counter()
from langchain_pshard import PipelineClient
client = time.perf_counter()
print(base - began, model - base, client - model)
"""
PARTS = ("langchain-core alone", "ChatPShard beyond it", "PipelineClient, at the first call")


def import_times_s(repetitions: int, advance: Callable[[], None] = lambda: None) -> dict[str, list[float]]:
    """Seconds of each part, one fresh interpreter a repetition. The first one, which may have to compile, is left out."""
    found: dict[str, list[float]] = {part: [] for part in PARTS}
    for repetition in range(repetitions + 1):
        done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=120)
        if repetition:
            for part, value in zip(PARTS, done.stdout.split(), strict=True):
                found[part].append(float(value))
        advance()
    return found


def run(console: Console) -> Report:
    """Import of the chat model beyond langchain-core's own (seconds)."""
    with Progress(console=console) as progress:
        measuring = progress.add_task(f"{REPETITIONS} interpreters", total=REPETITIONS + 1)
        found = import_times_s(REPETITIONS, lambda: progress.advance(measuring))
    samples = tuple(Samples(name=part, unit="s", values=tuple(values)) for part, values in found.items())
    both = [model + client for model, client in zip(found[PARTS[1]], found[PARTS[2]], strict=True)]
    whole = Samples(name="both of ours", unit="s", values=tuple(both))
    return Report(
        bench="import-time",
        question="importing ChatPShard and PipelineClient beyond langchain_core.language_models.chat_models",
        figures=(Figure(key="seconds", value=whole.median, at_most=TARGET_S), Figure(key="langchain_core_s", value=samples[0].median)),
        samples=(*samples, whole),
        settings={"interpreters": REPETITIONS, "taken off": "langchain_core.language_models.chat_models and what it imports"},
    )
