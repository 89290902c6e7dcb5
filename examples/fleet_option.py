"""What the examples share: the options that say which fleet to talk to, and the way they talk to it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from langchain_pshard import ChatPShard
from langchain_pshard.core.errors import PShardError


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """A parser with `--bundle` and `--workers`, of which one must be given, and `--max-tokens`."""
    made = argparse.ArgumentParser(prog=f"python -m examples.{name}", description=description)
    fleet = made.add_mutually_exclusive_group(required=True)
    fleet.add_argument("--bundle", type=Path, help="start workers for this bundle")
    fleet.add_argument("--workers", nargs="+", metavar="ADDRESS", help="use these running workers")
    made.add_argument("--max-tokens", type=int, default=512)
    made.add_argument("--temperature", type=float, default=0.0)
    made.add_argument("--seed", type=int)
    return made


def model_options(options: argparse.Namespace) -> dict[str, Any]:
    """What of it `ChatPShard` takes."""
    return {name: getattr(options, name) for name in ("bundle", "workers", "max_tokens", "temperature", "seed")}


def run(options: argparse.Namespace, use: Callable[[ChatPShard], None]) -> int:
    """Give `use` a model on the fleet that was asked for; returns the exit code, after telling what went wrong if something did."""
    try:
        with ChatPShard(**model_options(options)) as model:
            use(model)
    except PShardError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
