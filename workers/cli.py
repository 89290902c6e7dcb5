"""`pshard-worker`: options of the command, and how its errors are told. What it does with them is `process`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from langchain_pshard.core.errors import MissingExtraError, PShardError

try:
    import click

    from workers.cadence import SHORTEST_PAUSE_S
    from workers.measure import measure
    from workers.process import Options, serve
    from workers.report import Report
    from workers.shard import DEFAULT_KV_MEMORY_BYTES, Settings
except ModuleNotFoundError as error:  # a base install has the command but not what it needs
    if error.name not in {"click", "rich", "psutil"}:
        raise
    sys.exit(f"error: {MissingExtraError('pshard-worker', 'worker')}")

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_size(text: str) -> int | None:
    """Bytes of a size such as `512MiB` or `1.5 GB`; None when it is no size."""
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    return int(float(match[1]) * unit) if match and unit else None


def _as_bytes(ctx: click.Context, param: click.Parameter, value: str) -> int:
    num_bytes = parse_size(value)
    if not num_bytes:
        raise click.BadParameter(f"{value!r} is not a size; write for example 512MiB or 1.5GiB", ctx, param)
    return num_bytes


def _checked_poll(ctx: click.Context, param: click.Parameter, value: int) -> int:
    shortest, longest = round(1e3 * SHORTEST_PAUSE_S), 1_000
    if value and not shortest <= value <= longest:
        raise click.BadParameter(f"{value} is out of range; valid: 0, or {shortest} to {longest}", ctx, param)
    return value


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    epilog="`pshard-worker measure --help`: this machine's part of a fleet file. A bundle called measure is ./measure.",
)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--stage", "stages", type=int, multiple=True, metavar="I", help="Stage to serve; repeat it for several.")
@click.option("--draft", is_flag=True, help="Serve the bundle's draft model, which guesses tokens ahead: beside stages, or alone.")
@click.option("--listen", default="tcp://127.0.0.1:0", help="Address to serve at; port 0 takes a free one.")
@click.option("--device", default="CPU", help="OpenVINO device.")
@click.option("--runner", type=click.Choice(["paged", "stateful"]), default="paged", help="Engine; paged batches any number of streams.")
@click.option("--numerics", type=click.Choice(["fast", "exact"]), default="fast", help="fast quantizes activations, exact nothing.")
@click.option(
    "--kv-memory",
    metavar="SIZE",
    default=f"{DEFAULT_KV_MEMORY_BYTES >> 20}MiB",
    callback=_as_bytes,
    help="KV memory of each stage, and of the draft.",
)
@click.option(
    "--kv-precision",
    type=click.Choice(["f16", "f32", "u8"]),
    help="Type of the KV. f32 takes twice the memory of f16 and is what exact uses. u8 takes about half of f16; rejected drafts and shared"
    " prompts then change the last bits, so tokens may differ from plain decoding.  [default: f16, under exact f32]",
)
@click.option(
    "--prefix-cache/--no-prefix-cache",
    default=None,
    help="Let prompts that begin alike share the KV of their beginning, which is computed once.  [default: yes, where that is exact:"
    " paged but for u8, stateful under exact]",
)
@click.option(
    "--activation",
    type=click.Choice(["f32", "int8"]),
    default="f32",
    show_default=True,
    help="How hidden states cross from stage to stage. int8 takes about a quarter of the bytes, for thin links; tokens then depend on where"
    " the model is cut. All workers of a chain need the same.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Inference threads.  [default: the device's choice]")
@click.option("--huge-pages/--no-huge-pages", default=True, help="Linux: move the weights to huge pages, which are read faster.")
@click.option(
    "--busy-poll-ms",
    type=int,
    default=0,
    callback=_checked_poll,
    help="For a machine that serves one worker and does little else: wait awake for the next step, for at most so long, where inferences"
    " follow one another with a pause of 3 ms to so many; 20 is a good value. 0: sleep in every pause.",
)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", help="How to report, for people or programs.")
@click.option("--allow-logits", is_flag=True, help="Let clients ask for whole logits, to compare with others. Not for production.")
@click.option("--insecure", is_flag=True, help="Allow an address that other machines can reach, without any protection.")
@click.option("--exit-with-parent", is_flag=True, hidden=True, help="Stop when standard input ends.")
def command(
    *,
    bundle: Path,
    stages: tuple[int, ...],
    draft: bool,
    listen: str,
    device: str,
    runner: Any,
    numerics: Any,
    kv_memory: int,
    kv_precision: Any,
    prefix_cache: bool | None,
    activation: Any,
    threads: int | None,
    huge_pages: bool,
    busy_poll_ms: int,
    log_format: str,
    allow_logits: bool,
    insecure: bool,
    exit_with_parent: bool,
) -> None:
    """Serve one or more stages of BUNDLE, a folder made by pshard-export, or its draft model.

    Prints one line when it is ready. The first Ctrl-C or SIGTERM lets open streams finish, the second stops at once.
    """
    if not stages and not draft:
        raise click.UsageError("nothing to serve: give --stage I, once or more, --draft, or both")
    report = Report(is_json=log_format == "json")
    try:
        settings = Settings(
            device=device,
            runner=runner,
            numerics=numerics,
            kv_precision=kv_precision,
            threads=threads,
            kv_memory_bytes=kv_memory,
            prefix_cache=prefix_cache,
            activation=activation,
        )
        options = Options(
            bundle=bundle,
            stages=stages,
            drafts=draft,
            listen=listen,
            settings=settings,
            is_insecure=insecure,
            allows_logits=allow_logits,
            exits_with_parent=exit_with_parent,
            uses_huge_pages=huge_pages,
            busy_poll_s=busy_poll_ms / 1e3,
        )
        serve(options, report)
    except PShardError as error:
        report.error(error)
        sys.exit(1)


def main() -> None:
    """Entry point of `pshard-worker`: a first word `measure` is that command, all else serves a bundle."""
    if sys.argv[1:2] == [measure.name]:
        measure.main(sys.argv[2:], prog_name=f"pshard-worker {measure.name}")
    command(prog_name="pshard-worker")
