"""What the options of `pshard-worker` come to."""

from __future__ import annotations

import logging

import pytest
from click.testing import CliRunner

from workers import cli
from workers.process import Options
from workers.shard import Settings


@pytest.fixture(autouse=True)
def own_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report takes the process's logger over, and gives it back here."""
    logger = logging.getLogger("pshard")
    for name in ("handlers", "level", "propagate"):
        monkeypatch.setattr(logger, name, getattr(logger, name))


@pytest.mark.parametrize(
    ("options", "precision", "has_prefix_cache"),
    [
        ([], None, True),
        (["--kv-precision", "u8"], "u8", False),
        (["--kv-precision", "u8", "--prefix-cache"], "u8", True),
        (["--kv-precision", "f32", "--no-prefix-cache"], "f32", False),
        (["--runner", "stateful"], None, False),
        (["--runner", "stateful", "--numerics", "exact"], None, True),
        (["--runner", "stateful", "--numerics", "exact", "--kv-precision", "u8"], "u8", False),
        (["--runner", "stateful", "--prefix-cache"], None, True),
    ],
)
def test_kv_options(options: list[str], precision: str | None, has_prefix_cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    def serve(wanted: Options, report: object) -> None:
        seen.append(wanted.settings)

    monkeypatch.setattr(cli, "serve", serve)
    done = CliRunner().invoke(cli.command, ["bundle", "--stage", "0", *options])
    assert done.exit_code == 0, done.output
    assert [(each.kv_precision, each.has_prefix_cache) for each in seen] == [(precision, has_prefix_cache)]


@pytest.mark.parametrize(
    ("options", "uses_huge_pages", "busy_poll_s"),
    [([], True, 0.0), (["--no-huge-pages", "--busy-poll-ms", "0"], False, 0.0), (["--busy-poll-ms", "3"], True, 0.003)],
)
def test_options_of_speed_alone(options: list[str], uses_huge_pages: bool, busy_poll_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Options] = []

    def serve(wanted: Options, report: object) -> None:
        seen.append(wanted)

    monkeypatch.setattr(cli, "serve", serve)
    done = CliRunner().invoke(cli.command, ["bundle", "--stage", "0", *options])
    assert done.exit_code == 0, done.output
    assert [(each.uses_huge_pages, each.busy_poll_s) for each in seen] == [(uses_huge_pages, busy_poll_s)]


@pytest.mark.parametrize("value", ["-1", "1", "2", "1001", "3.5", "nan"])
def test_a_busy_poll_out_of_range_is_a_usage_error(value: str) -> None:
    done = CliRunner().invoke(cli.command, ["bundle", "--stage", "0", "--busy-poll-ms", value])
    assert done.exit_code == 2
    assert "--busy-poll-ms" in done.output
