"""The whole thing on one machine: export a real model into two shards, start two workers, stream an answer through a LangChain chain.

Run by `python dev.py demo`. The last line of output is one line of JSON.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.prompts import ChatPromptTemplate
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from export_tools.locks import turn_to_make
from langchain_pshard import ChatPShard
from langchain_pshard.core.bundle import Manifest, load_manifest, verify_files
from langchain_pshard.core.errors import BundleError, PShardError
from langchain_pshard.core.version import software_version
from langchain_pshard.pipeline.local import LocalFleet

SOURCE = "demo"
NUM_STAGES = 2
WEIGHTS = "int8"
"""The smallest mode within 6 % of float32's perplexity on a fixed text (docs/export.md has the figures of all modes)."""
EXAMPLE = ("Name the days of the week.", "1. Monday\n2. Tuesday\n3. Wednesday\n4. Thursday\n5. Friday\n6. Saturday\n7. Sunday")
"""The model is a small base model that nobody taught to answer: one example in the prompt shows it what an answer looks like."""
QUESTION = "Name the months of the year."
MAX_TOKENS = 96
EXPORT_STOP_S = 10.0
"""How long an interrupted export may take to remove what it has begun."""

console = Console(stderr=True)


class LastReply(BaseCallbackHandler):
    """Keeps the whole reply of the model, whose text alone reaches the end of the chain."""

    message: AIMessage

    def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        generation = response.generations[0][0]
        assert isinstance(generation, ChatGeneration)
        assert isinstance(generation.message, AIMessage)
        self.message = generation.message


def main() -> int:
    """Run the demo; 0 when everything worked."""
    try:
        bundle = demo_bundle()
        with waiting(f"starting {NUM_STAGES} workers (load, compile, warm up)"):
            fleet = LocalFleet(bundle)
        with fleet, ChatPShard(workers=list(fleet.addresses), max_tokens=MAX_TOKENS) as model:
            with waiting("connecting to them"):
                model.get_num_tokens(QUESTION)  # the first use of a model connects it
            reply = answer(model)
            show_stages(load_manifest(bundle), fleet, reply)
        print(json.dumps(figures(reply)))
    except PShardError as error:
        console.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        return 1
    return 0


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A spinner with the seconds at a terminal; a line before and one after elsewhere."""
    if console.is_terminal:
        with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True) as line:
            line.add_task(what, total=None)
            yield
    else:
        console.print(f"{what} ...", highlight=False)
        began = time.monotonic()
        yield
        console.print(f"{what}: {time.monotonic() - began:.1f} s", highlight=False)


# --- the bundle --------------------------------------------------------------------------------------------------------


def demo_bundle() -> Path:
    """The exported model: from the cache when this version made it before and it is whole, else exported now.

    Two demos at once make it once: the second waits for the first, and goes on in its place should it die.
    """
    bundle = platformdirs.user_cache_path("pshard", appauthor=False) / "demo" / f"gemma3-270m-{WEIGHTS}-{software_version()}"
    with turn_to_make(bundle, waiting("waiting for another process that makes the same bundle")) as turn:
        try:
            check_bundle(bundle)
        except BundleError as error:
            if bundle.exists():
                console.print(f"making the bundle again: {error}", highlight=False, markup=False, soft_wrap=True)
                shutil.rmtree(bundle)
            console.print(f"exporting Gemma 3 270M into {NUM_STAGES} shards at {bundle}", highlight=False, markup=False, soft_wrap=True)
            export([SOURCE, "-o", str(bundle), "--stages", str(NUM_STAGES), "--weights", WEIGHTS, "--no-measure"], turn)
    return bundle


def check_bundle(bundle: Path) -> None:
    """Raises BundleError unless every file is there and undamaged; the cache may have been tidied by somebody."""
    manifest = load_manifest(bundle)
    with waiting("checking the bundle"):
        verify_files(bundle, manifest.tokenizer_files + tuple(file for stage in manifest.stages for file in stage.files))


def export(options: Sequence[str], turn: int) -> None:
    """Run `pshard-export` in the foreground, in a process of its own, whose gigabytes go when it ends; its bars go to stderr.

    It holds `turn` as well: should this process be killed, the next one waits until the export is over, too. Windows gives a lock to one
    process alone; there the exporter's own lock refuses a second export with its message.

    Raises:
        PShardError: it failed, after saying why itself.
    """
    command = [sys.executable, "-m", "export_tools", *options]
    inherited = () if sys.platform == "win32" else (turn,)
    program = subprocess.Popen(command, stdout=subprocess.DEVNULL, pass_fds=inherited)  # noqa: S603 - no shell; its summary is for others
    try:
        exit_code = program.wait()
    except BaseException:
        # Ctrl-C reaches it as well: it removes what it has begun, and must not outlive us.
        try:
            program.wait(EXPORT_STOP_S)
        finally:
            program.kill()
            program.wait()
        raise
    if exit_code:
        raise PShardError(f"the export ended with exit code {exit_code}")


# --- the chain and what it took ------------------------------------------------------------------------------------------


def answer(model: ChatPShard) -> AIMessage:
    """Stream the answer of a chain to the terminal; returns the model's whole message."""
    prompt = ChatPromptTemplate.from_messages([("human", EXAMPLE[0]), ("ai", EXAMPLE[1]), ("human", "{question}")])
    chain = prompt | model | StrOutputParser()
    kept = LastReply()
    console.print(f"\n[bold]{QUESTION}[/]")
    for piece in chain.stream({"question": QUESTION}, config={"callbacks": [kept]}):
        print(piece, end="", flush=True)
    print("\n", flush=True)
    return kept.message


def show_stages(manifest: Manifest, fleet: LocalFleet, reply: AIMessage) -> None:
    """One row a stage, and the figures a user asks for first."""
    assert reply.usage_metadata is not None
    timings = reply.response_metadata["timings"]
    table = Table("stage", "worker", "layers", "MiB", "ms per token")
    for idx, stage in enumerate(manifest.stages):
        worker = f"pid {fleet.pids[idx]} at {fleet.addresses[idx]}"
        ms_per_token = timings["stage_compute_ms"][idx] / reply.usage_metadata["output_tokens"]  # a step may bring several
        table.add_row(str(idx), worker, str(stage.span), f"{stage.num_bytes / 2**20:.0f}", f"{ms_per_token:.2f}")
    Console().print(table)
    print(f"{timings['tokens_per_s']:.1f} tok/s, time to first token {timings['first_token_ms']:.0f} ms", flush=True)


def figures(reply: AIMessage) -> dict[str, object]:
    """The machine-readable last line."""
    assert reply.usage_metadata is not None
    timings = reply.response_metadata["timings"]
    return {
        "demo": "ok",
        "stages": NUM_STAGES,
        "tokens": reply.usage_metadata["output_tokens"],
        "tok_s": round(timings["tokens_per_s"], 1),
        "ttft_ms": round(timings["first_token_ms"], 1),
    }


if __name__ == "__main__":
    sys.exit(main())
