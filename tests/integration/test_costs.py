"""Costs end to end: measured at export, planned with, and a node's own figures from `pshard-worker measure`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from click.testing import CliRunner, Result

import export_tools.export
from benchmarks.fleet import running_worker
from export_tools.cli import main
from export_tools.display import as_json
from export_tools.export import export_bundle
from export_tools.fleet import parse_fleet
from langchain_pshard.core.bundle import ModelCosts, WeightMode, load_manifest
from langchain_pshard.core.errors import UsageError
from langchain_pshard.core.kv import BLOCK_TOKENS, max_stream_blocks
from tests.support.bundles import TinyBundle
from tests.support.models import WINDOW, build_tiny

FLEET = """
[[nodes]]
name = "a"
memory_gib = 0.5
decode_speed = 1.0

[[nodes]]
name = "b"
memory_gib = 0.5
decode_speed = 1.0
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Layers of 5 MiB and no head to speak of: slow enough to be told from noise, and balanced when they are dealt evenly.
    folder = tmp_path_factory.mktemp("models") / "wide"
    return build_tiny("llama", folder, hidden_size=256, intermediate_size=1536, num_hidden_layers=6)


@pytest.fixture(scope="module")
def bundle(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "measured"
    export_bundle(str(model), folder, num_stages=2, weights=WeightMode.FP32, measure=True)
    return folder


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text(FLEET, encoding="utf-8")
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="pshard-export")


def test_measured_costs_are_in_the_manifest_and_balance_the_stages(bundle: Path) -> None:
    manifest = load_manifest(bundle)
    costs = manifest.costs
    assert costs is not None
    assert len(costs.layers) == 6
    assert len(set(costs.layers)) == 1  # all of one kind
    assert costs.layers[0].decode_ms > 0
    assert costs.layers[0].num_bytes >= 4 << 20
    assert costs.machine.decode > 0
    assert costs.machine.prefill > 0
    assert [stage.cost for stage in manifest.stages] == [costs.stage(stage.span) for stage in manifest.stages]
    first, second = (costs.stage(stage.span).decode_ms for stage in manifest.stages)
    assert abs(first - second) <= costs.layers[0].decode_ms + 1e-3  # one layer more or less would not help


def test_what_memory_cannot_hold_is_refused_before_measuring(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object, **__: object) -> None:
        pytest.fail("measured first")

    monkeypatch.setattr(export_tools.export, "measure_costs", measured)
    for available, words in ((1 << 20, "not enough memory: stage 0 of 1"), (900 << 20, "measured first")):
        monkeypatch.setattr(export_tools.export.psutil, "virtual_memory", lambda available=available: SimpleNamespace(available=available))
        with pytest.raises((UsageError, pytest.fail.Exception), match=words):
            export_bundle(str(model), tmp_path / "bundle", measure=True)
    assert list(tmp_path.iterdir()) == []


def test_a_program_reads_the_costs(bundle: Path) -> None:
    manifest = load_manifest(bundle)
    document = json.loads(as_json(manifest, bundle))
    assert msgspec.convert(document["costs"], ModelCosts) == manifest.costs
    assert [stage["decode_ms"] for stage in document["stages"]] == [stage.cost and stage.cost.decode_ms for stage in manifest.stages]


def test_a_plan_from_a_measured_bundle(bundle: Path, fleet: Path) -> None:
    result = run("plan", bundle, "--fleet", fleet, "--users", "many", "--json")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["costs"] == "measured"
    assert {stage["node"] for stage in plan["stages"]} == {"a", "b"}
    assert plan["stages"][0]["layers"][0] == 0
    assert plan["stages"][1]["layers"] == [plan["stages"][0]["layers"][1], 6]
    assert plan["slowest_ms"] < plan["alone"]["slowest_ms"]
    assert plan["tokens_per_s"] == pytest.approx(1e3 / plan["slowest_ms"], rel=1e-3)


def test_a_plan_of_a_bundle_keeps_its_weights(bundle: Path, fleet: Path) -> None:
    mode = load_manifest(bundle).weight_mode.value
    result = run("plan", bundle, "--fleet", fleet, "--weights", mode)
    assert f"pshard-export MODEL -o BUNDLE --weights {mode} --layers " in result.stdout
    result = run("plan", bundle, "--fleet", fleet, "--weights", "fp16")
    assert result.exit_code == 1
    assert f"--weights fp16 is not what this bundle has, which is {mode}" in result.output


def test_a_plan_for_a_model_that_is_not_exported(model: Path, fleet: Path) -> None:
    result = run("plan", model, "--fleet", fleet)
    assert result.exit_code == 0, result.output
    assert "a alone is the fastest" in result.stdout
    assert "left out, because the others are better without: b" in result.stdout
    assert "estimated" in result.stdout
    assert result.stdout.splitlines()[-2:] == [
        "  pshard-export MODEL -o BUNDLE --weights int4 --layers 6",
        "  a: pshard-worker BUNDLE --stage 0 --kv-memory 3MiB --listen tcp://ADDRESS:7000",
    ]


def test_plans_count_what_windows_leave(tiny_bundle: TinyBundle, fleet: Path, tmp_path: Path) -> None:
    source = build_tiny("mistral", tmp_path / "model")
    bundle = tiny_bundle("mistral", num_stages=2)
    stage_tokens = max_stream_blocks(WINDOW)
    assert stage_tokens is not None
    for model in (source, bundle):
        kept = [
            json.loads(run("plan", model, "--fleet", fleet, "--context", "99000", "--json", *more).stdout)
            for more in ([], ["--streams", "3"])
        ]
        assert [plan["streams"] for plan in kept] == [1, 3]
        for plan in kept:
            (stage,) = plan["stages"]
            position_bytes = 4 * 2 * 2 * 16 * 2  # layers, keys and values, heads, values, bytes of f16
            assert stage["kv_bytes"] == plan["streams"] * stage_tokens * BLOCK_TOKENS * position_bytes


def test_plans_that_cannot_be_made(model: Path, fleet: Path, tmp_path: Path) -> None:
    for arguments, words in (
        ((model, "--fleet", tmp_path / "none.toml"), ["none.toml", "pshard-worker measure"]),
        ((tmp_path / "nowhere", "--fleet", fleet), ["nowhere", "does not exist"]),
        ((model, "--fleet", fleet, "--context", "99000000"), ["the fleet cannot hold", "99000000 tokens", "--context"]),
    ):
        result = run("plan", *arguments)
        assert result.exit_code == 1
        assert result.stderr.startswith("error: ")
        assert all(word in result.stderr for word in words), result.stderr


def test_the_command_without_measuring_says_so(model: Path, tmp_path: Path) -> None:
    result = run(model, "-o", tmp_path / "bundle", "--weights", "fp32", "--no-measure")
    assert result.exit_code == 0
    assert "costs were not measured" in result.stdout
    assert load_manifest(tmp_path / "bundle").costs is None
    for arguments, words in ((["--help"], ["--no-measure", "pshard-export plan --help"]), (["plan", "--help"], ["--fleet", "--users"])):
        result = run(*arguments)
        assert result.exit_code == 0
        assert all(word in result.stdout for word in words)


def measure_command(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "workers", "measure", "--threads", "1", *options]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=100, stdin=subprocess.DEVNULL)


def test_a_worker_measures_its_node_and_the_way_to_another(tiny_bundle: TinyBundle) -> None:
    with running_worker(tiny_bundle("llama"), 0) as worker:
        done = measure_command("--name", "here", "--to", worker.address)
    assert done.returncode == 0, done.stderr
    (node,) = parse_fleet(done.stdout, origin="printed").nodes
    assert node.name == "here"
    assert node.memory_bytes > 1 << 20
    assert node.decode_speed > 0
    assert 0 < node.link.latency_ms < 1000


def test_what_cannot_be_measured() -> None:
    done = measure_command("--device", "ABACUS")
    assert done.returncode == 1
    assert done.stderr.startswith("error: device 'ABACUS' does not exist on this machine; available: CPU")
