"""`pshard-export plan`: reads a model and a fleet file, shows the best placement. The decisions are in `placement.py`."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from export_tools.fleet import load_fleet
from export_tools.placement import ModelProfile, Plan, Users, plan_fleet
from export_tools.profile import profile_of_manifest
from langchain_pshard.core.bundle import MANIFEST_NAME, WeightMode, load_manifest
from langchain_pshard.core.errors import InvalidOptionError, MissingExtraError, PShardError

_DEFAULT_CONTEXT_TOKENS = 4096
_HEAVY_PACKAGES = frozenset({"gguf", "safetensors", "torch", "transformers"})


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("model", metavar="MODEL|BUNDLE")
@click.option("--fleet", required=True, type=click.Path(path_type=Path), metavar="FILE", help="Fleet file (TOML); see docs/planning.md.")
@click.option(
    "--users",
    type=click.Choice([users.value for users in Users]),
    default=Users.ONE.value,
    show_default=True,
    help="one: what a single stream's token takes is smallest; many: the slowest stage is fastest.",
)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    default=_DEFAULT_CONTEXT_TOKENS,
    show_default=True,
    metavar="N",
    help="KV positions that must fit, over all streams.",
)
@click.option(
    "--streams",
    type=click.IntRange(min=1),
    metavar="N",
    help="How many streams share the context, at most. A stage whose layers all have windows then needs no more KV than these keep."
    "  [default: 1 for one user, any number for many]",
)
@click.option(
    "--weights",
    type=click.Choice([mode.value for mode in WeightMode]),
    help="Weight mode of a MODEL; a BUNDLE has its own.  [default: int4]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one JSON object.")
def plan(model: str, fleet: Path, users: str, context: int, streams: int | None, weights: str | None, as_json: bool) -> None:
    """Find the layers and the order of the nodes of a fleet that serve MODEL (or the model of a BUNDLE) best.

    A bundle exported on any machine holds measured costs; for a model that is not exported yet they are estimated from its config, and
    no weights are read.
    """
    try:
        machines = load_fleet(fleet)
        profile, mode = _profile(model, None if weights is None else WeightMode(weights))
        whom = Users(users)
        num_streams = 1 if streams is None and whom is Users.ONE else streams
        best = plan_fleet(profile, machines.nodes, machines.client, users=whom, context_tokens=context, num_streams=num_streams)
    except PShardError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    if as_json:
        click.echo(json.dumps(as_data(profile, best), indent=1))
        return
    Console().print(_table(best))
    for line in remarks(profile, best):
        click.echo(line)
    click.echo("\n".join(["", *next_steps(best, mode)]))


def _profile(model: str, weights: WeightMode | None) -> tuple[ModelProfile, WeightMode]:
    """The model's profile, and how its layers are stored."""
    if (Path(model) / MANIFEST_NAME).is_file():
        manifest = load_manifest(Path(model))
        mode = manifest.weight_mode
        if weights not in (None, mode):
            raise InvalidOptionError(
                f"--weights {weights.value} is not what this bundle has, which is {mode.value}: leave it out, or plan the model itself"
            )
        return profile_of_manifest(manifest), mode
    try:
        from export_tools.estimate import profile_of_source
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] in _HEAVY_PACKAGES:
            raise MissingExtraError("planning for a model that is not exported yet", "export") from error
        raise
    mode = weights or WeightMode.INT4
    return profile_of_source(model, mode), mode


def as_data(model: ModelProfile, best: Plan) -> dict[str, Any]:
    """A plan as plain data."""
    return {
        "model": model.name,
        "costs": "measured" if model.is_measured else "estimated",
        "users": best.users.value,
        "context_tokens": best.context_tokens,
        "streams": best.num_streams,
        "stages": [
            {
                "stage": idx,
                "node": stage.node,
                "layers": [stage.span.start, stage.span.end],
                "decode_ms": round(stage.decode_ms, 4),
                "prefill_ms": round(stage.prefill_ms, 4),
                "hop_ms": round(stage.hop_ms, 4),
                "memory_bytes": stage.memory_bytes,
                "weight_bytes": stage.weight_bytes,
                "kv_bytes": stage.kv_bytes,
                "limit": stage.limit.value,
            }
            for idx, stage in enumerate(best.stages)
        ],
        "token_ms": round(best.token_ms, 4),
        "slowest_ms": round(best.slowest_ms, 4),
        "tokens_per_s": round(best.tokens_per_s, 3),
        "unused": list(best.unused),
        "alone": None
        if best.alone is None
        else {"node": best.alone.node, "token_ms": round(best.alone.token_ms, 4), "slowest_ms": round(best.alone.slowest_ms, 4)},
        "layers": _layers(best),
    }


def remarks(model: ModelProfile, best: Plan) -> list[str]:
    """What to know beside the table. Pure."""
    if best.users is Users.ONE:
        total = f"predicted: {best.tokens_per_s:.1f} tok/s for one user, {best.token_ms:.2f} ms a token"
    else:
        total = (
            f"predicted: {best.tokens_per_s:.1f} tok/s for many users at one row a step (rows batched in a step come on top);"
            f" a single user gets {1e3 / best.token_ms:.1f} tok/s"
        )
    lines = [total, _about_alone(best)]
    if best.unused:
        lines.append(f"left out, because the others are better without: {', '.join(best.unused)}")
    if not model.is_measured:
        lines.append("costs are estimated from the weights' bytes: plan with an exported bundle for measured ones (--measure, the default)")
    return lines


def next_steps(best: Plan, weights: WeightMode) -> list[str]:
    """The commands that make the plan real. Pure."""
    lines = [
        "Export it so, and start one worker on each node, at an ADDRESS where the others reach it (no loopback: also with --insecure):",
        f"  pshard-export MODEL -o BUNDLE --weights {weights.value} --layers {_layers(best)}",
    ]
    for idx, stage in enumerate(best.stages):
        kv_mib = max(1, math.ceil(stage.kv_bytes / 2**20))
        lines.append(f"  {stage.node}: pshard-worker BUNDLE --stage {idx} --kv-memory {kv_mib}MiB --listen tcp://ADDRESS:7000")
    return lines


def _about_alone(best: Plan) -> str:
    alone = best.alone
    if alone is None:
        return "no node could hold the model alone"
    if len(best.stages) == 1:
        return f"{alone.node} alone is the fastest: a split would only add to it"
    if alone.token_ms < best.token_ms:
        return f"for a single user {alone.node} alone would be faster: {1e3 / alone.token_ms:.1f} tok/s"
    alone_ms = alone.token_ms if best.users is Users.ONE else alone.slowest_ms
    return f"{alone.node} alone would be slower: {1e3 / alone_ms:.1f} tok/s"


def _layers(best: Plan) -> str:
    return ",".join(str(stage.span.num_layers) for stage in best.stages)


def _table(best: Plan) -> Table:
    table = Table(title="placement", title_justify="left")
    for heading in ("stage", "node", "layers", "ms per token", "hop ms", "ms per prompt token", "memory GiB", "limited by"):
        table.add_column(heading, justify="left" if heading in {"node", "layers", "limited by"} else "right")
    for idx, stage in enumerate(best.stages):
        table.add_row(
            str(idx),
            stage.node,
            str(stage.span),
            f"{stage.decode_ms:.2f}",
            f"{stage.hop_ms:.2f}",
            f"{stage.prefill_ms:.3f}",
            f"{stage.memory_bytes / 2**30:.2f}",
            stage.limit.value,
        )
    return table
