"""`python -m benchmarks NAME [--json FILE]`: run one benchmark, print its report, exit with 1 when it misses its target."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from benchmarks import (
    activation,
    balance,
    call_latency,
    constrained,
    exactness,
    export_memory,
    export_time,
    huge_pages,
    import_time,
    memory,
    overhead,
    parity,
    perplexity,
    prefill,
    prefix,
    reply_bytes,
    speculation,
    split,
    users,
    wan,
)
from benchmarks.processes import ProcessError
from benchmarks.report import Report, show, write_json
from langchain_pshard.core.errors import PShardError

BENCHES: dict[str, Callable[[Console], Report]] = {
    "activation": activation.run,
    "balance": balance.run,
    "call-latency": call_latency.run,
    "constrained": constrained.run_constrained,
    "exactness": exactness.run,
    "export-memory": export_memory.run,
    "export-time": export_time.run,
    "forced": constrained.run_forced,
    "huge-pages": huge_pages.run,
    "import-time": import_time.run,
    "memory": memory.run,
    "overhead": overhead.run,
    "parity": parity.run,
    "perplexity": perplexity.run,
    "prefill": prefill.run,
    "prefix": prefix.run,
    "reply-bytes": reply_bytes.run,
    "scripted": speculation.run_scripted,
    "speculation": speculation.run_ngram,
    "split": split.run,
    "users16": users.run_many,
    "users16-cb": users.run_many_batching,
    "users2": users.run_two,
    "wan": wan.run,
}
"""Name to function. Each takes the console for its progress and returns its report; its docstring's first line is its description."""


def _description(function: Callable[[Console], Report]) -> str:
    return (function.__doc__ or "").strip().splitlines()[0]


def main() -> int:
    """Run the benchmark named on the command line; returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("name", choices=[*BENCHES, "list"], metavar="NAME", help=f"one of: {', '.join(BENCHES)}; or `list`")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args()
    console = Console()
    if options.name == "list":
        for name, function in BENCHES.items():
            console.print(f"{name:14} {_description(function)}", highlight=False)
        return 0
    if options.json is not None:
        try:
            options.json.open("a").close()  # before minutes of work, not after them
        except OSError as error:
            parser.error(f"--json {options.json}: cannot be written ({error.strerror})")
    try:
        report = BENCHES[options.name](Console(stderr=True))
    except (PShardError, ProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    show(report, console)
    if options.json is not None:
        write_json(report, options.json)
    return 0 if report.is_met else 1


if __name__ == "__main__":
    sys.exit(main())
