"""The whole thing on one machine: export a real model into two shards, start two workers, stream an answer through a LangChain chain.

Run by `python dev.py demo`. The last line of output is one line of JSON.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import platformdirs
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.prompts import ChatPromptTemplate
from rich.console import Console
from rich.table import Table

from langchain_pshard import ChatPShard
from langchain_pshard.core.bundle import Manifest, load_manifest
from langchain_pshard.core.errors import BundleError, PShardError
from langchain_pshard.core.version import software_version
from langchain_pshard.pipeline.local import LocalFleet

NUM_STAGES = 2
WEIGHTS = "int8"
"""The smallest mode within 6 % of float32's perplexity on a fixed text (docs/export.md has the figures of all modes)."""
QUESTION = "What are the four seasons of the year, and what is each of them like?"
MAX_TOKENS = 96

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
        with console.status("starting two workers"):
            fleet = LocalFleet(bundle)
        with fleet, ChatPShard(workers=list(fleet.addresses), max_tokens=MAX_TOKENS) as model:
            reply = answer(model)
            show_stages(load_manifest(bundle), fleet, reply)
        print(json.dumps(figures(reply)))
    except PShardError as error:
        console.print(f"error: {error}", style="red", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    return 0


def demo_bundle() -> Path:
    """The exported model, from the cache when this version made it before."""
    bundle = Path(platformdirs.user_cache_dir("pshard", appauthor=False)) / "demo" / f"gemma3-270m-{WEIGHTS}-{software_version()}"
    try:
        load_manifest(bundle)
    except BundleError:
        console.print(f"exporting Gemma 3 270M into {NUM_STAGES} shards at {bundle}", highlight=False)
        if bundle.exists():
            shutil.rmtree(bundle)
        command = ["demo", "-o", str(bundle), "--stages", str(NUM_STAGES), "--weights", WEIGHTS]
        run([sys.executable, "-m", "export_tools", *command])
    return bundle


def run(command: Sequence[str]) -> None:
    """Run a program of ours in the foreground; what it prints goes to stderr.

    Raises:
        PShardError: it failed, after saying why itself.
    """
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode:
        raise PShardError(f"{command[2]} ended with exit code {done.returncode}")


def answer(model: ChatPShard) -> AIMessage:
    """Stream the answer of a chain to the terminal; returns the model's whole message."""
    prompt = ChatPromptTemplate.from_messages([("human", "{question}")])
    chain = prompt | model | StrOutputParser()
    kept = LastReply()
    console.print(f"\n[bold]{QUESTION}[/]")
    for piece in chain.stream({"question": QUESTION}, config={"callbacks": [kept]}):
        print(piece, end="", flush=True)
    print("\n", flush=True)
    return kept.message


def show_stages(manifest: Manifest, fleet: LocalFleet, reply: AIMessage) -> None:
    """One row a stage, and the figures a user asks for first."""
    timings = reply.response_metadata["timings"]
    table = Table("stage", "worker", "layers", "MiB", "ms per token")
    for idx, stage in enumerate(manifest.stages):
        worker = f"pid {fleet.pids[idx]} at {fleet.addresses[idx]}"
        ms_per_token = timings["stage_compute_ms"][idx] / timings["num_steps"]
        table.add_row(str(idx), worker, str(stage.span), f"{stage.num_bytes / 2**20:.0f}", f"{ms_per_token:.2f}")
    Console().print(table)
    print(f"{timings['tokens_per_s']:.1f} tok/s, first token after {timings['first_token_ms']:.0f} ms")


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
