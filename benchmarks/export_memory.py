"""Peak memory of an export against its bound: twice the float weights of the largest stage, and 1.5 GiB."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from rich.console import Console
from rich.progress import Progress

from benchmarks.large_model import CONFIG, write_large_model
from benchmarks.report import Figure, Report, Samples
from langchain_pshard.core.errors import UsageError

NUM_STAGES = 4
_NEEDED_DISK_BYTES = 6 << 30
_POLL_S = 0.02


def run(console: Console) -> Report:
    """Peak memory of exporting a random model of 1.6 billion weights into 4 int4 stages, over its bound (ratio at most 1).

    Raises:
        UsageError: the temporary folder has too little room, or the export failed.
    """
    with tempfile.TemporaryDirectory(prefix="pshard-large-") as temporary:
        folder = Path(temporary)
        free = shutil.disk_usage(folder).free
        if free < _NEEDED_DISK_BYTES:
            raise UsageError(
                f"{folder} has {free >> 30} GiB free, the benchmark needs {_NEEDED_DISK_BYTES >> 30}: set TMPDIR to another disk"
            )
        with Progress(console=console) as progress:
            writing = progress.add_task("writing a random model", total=CONFIG["num_hidden_layers"] + 1)
            num_weights = write_large_model(folder / "model", lambda: progress.advance(writing))
            exporting = progress.add_task(f"exporting {num_weights / 1e9:.2f} billion weights into {NUM_STAGES} int4 stages", total=None)
            started = time.monotonic()
            peak_bytes = _peak_of_export(folder)
            elapsed_s = time.monotonic() - started
            progress.update(exporting, total=1, completed=1)
        bound_bytes = _bound(folder / "model")
    return Report(
        bench="export-memory",
        question="peak resident memory of an export over its bound",
        figures=(
            Figure(key="ratio", value=peak_bytes / bound_bytes, at_most=1.0),
            Figure(key="peak_gib", value=peak_bytes / 2**30),
            Figure(key="bound_gib", value=bound_bytes / 2**30),
            Figure(key="weights", value=num_weights, at_least=1.5e9),
        ),
        samples=(Samples(name="export", unit="s", values=(elapsed_s,)),),
        settings={"stages": NUM_STAGES, "weights": "int4", "checkpoint": "bf16 safetensors", "verified": True},
    )


def _peak_of_export(folder: Path) -> int:
    """Run the export in a process of its own and watch its resident memory."""
    command = [
        sys.executable,
        "-m",
        "export_tools",
        str(folder / "model"),
        "-o",
        str(folder / "bundle"),
        "--stages",
        str(NUM_STAGES),
        "--json",
    ]
    peak_bytes = 0
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            peak_bytes = max(peak_bytes, _resident_peak(watched))
            time.sleep(_POLL_S)
    if process.returncode != 0:
        raise UsageError(f"the export failed: {(folder / 'log').read_text('utf-8', 'replace')[-2000:]}")
    return peak_bytes


def _resident_peak(process: psutil.Process) -> int:
    """The highest resident memory so far where the system keeps it, else the memory now; 0 once the process has ended."""
    try:
        status = Path(f"/proc/{process.pid}/status")
        if status.exists():
            line = next((line for line in status.read_text().splitlines() if line.startswith("VmHWM")), None)
            return int(line.split()[1]) * 1024 if line else 0
        memory = process.memory_info()
        return int(getattr(memory, "peak_wset", memory.rss))
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return 0


def _bound(model: Path) -> int:
    """The promise, from the cut that the export made."""
    bundle = json.loads((model.parent / "bundle" / "manifest.json").read_text(encoding="utf-8"))
    layer = _layer_weights()
    ends = CONFIG["vocab_size"] * CONFIG["hidden_size"]
    spans = [(stage["span"]["start"], stage["span"]["end"]) for stage in bundle["stages"]]
    stages = [(end - start) * layer + ends * (start == 0) + ends * (end == CONFIG["num_hidden_layers"]) for start, end in spans]
    return int(2 * 4 * max(stages) + 1.5 * 2**30)


def _layer_weights() -> int:
    hidden, heads, kv_heads = CONFIG["hidden_size"], CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
    attention = 2 * hidden * hidden + 2 * hidden * hidden // heads * kv_heads
    return int(attention + 3 * hidden * CONFIG["intermediate_size"] + 2 * hidden)
