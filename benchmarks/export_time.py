"""How long an export takes, tokenizer aside."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.report import Figure, Report, Samples
from langchain_pshard.core.errors import UsageError

TARGET_S = 45.0
LAYERS = (16, 2)


def run(console: Console) -> Report:
    """Seconds to export Gemma 3 270M into two int4 shards, tokenizer and the libraries' imports aside.

    Raises:
        UsageError: the export failed.
    """
    with Progress(console=console) as progress, tempfile.TemporaryDirectory(prefix="pshard-export-") as temporary:
        progress.add_task("exporting twice (the first run fetches the model into the cache)", total=None)
        events = [_export(Path(temporary) / str(attempt)) for attempt in range(2)][-1]
    seconds = {event["task"]: event["elapsed_s"] for event in events if event.get("event") == "end"}
    parts = tuple(Samples(name=task, unit="s", values=(value,)) for task, value in seconds.items())
    return Report(
        bench="export-time",
        question="Gemma 3 270M into two int4 shards, measured and verified, tokenizer aside",
        figures=(
            Figure(key="seconds", value=sum(value for task, value in seconds.items() if _counts(task)), at_most=TARGET_S),
            Figure(key="stages_seconds", value=seconds["export"]),
        ),
        samples=parts,
        settings={"model": "Gemma 3 270M", "weights": "int4", "layers": "+".join(map(str, LAYERS))},
    )


def _counts(task: str) -> bool:
    """All but the tokenizer, and the single steps of stages, which `export` adds up."""
    return not task.startswith(("stage ", "loading the tokenizer"))


def _export(bundle: Path) -> list[dict[str, Any]]:
    layers = ",".join(map(str, LAYERS))
    command = [sys.executable, "-m", "export_tools", "demo", "-o", str(bundle), "--layers", layers, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    if done.returncode != 0:
        raise UsageError(f"the export failed: {done.stdout[-2000:]}")
    return [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
