"""pshard-export as a user meets it: what it prints, what it refuses, what it leaves behind."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner, Result

import export_tools.export
import export_tools.shards
from export_tools.cli import main
from langchain_pshard.core.bundle import MODEL_BIN, load_manifest, stage_dir
from tests.support.models import build_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


def run(*arguments: str | Path) -> Result:
    """Without measuring, which takes seconds; tests/integration/test_costs.py is about that."""
    return CliRunner().invoke(main, [*(str(argument) for argument in arguments), "--no-measure"], prog_name="pshard-export")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_refused(result: Result, *words: str) -> None:
    assert result.exit_code == 1
    last_line = result.stderr.strip().splitlines()[-1]
    assert last_line.startswith("error: ")
    assert all(word in last_line for word in words), last_line
    assert "Traceback" not in result.stderr


def test_export_names_the_workers_to_start(model: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "my bundle"
    result = run(model, "-o", bundle, "--stages", "2")
    assert result.exit_code == 0
    manifest = load_manifest(bundle)
    lines = result.stdout.splitlines()
    assert lines[0] == f"tiny-llama (llama, int4, group 128) in 2 stages, fingerprint {manifest.fingerprint[:12]}"
    assert lines[-2:] == [f"  pshard-worker '{bundle}' --stage {idx}" for idx in (0, 1)]
    assert [path.name for path in tmp_path.iterdir()] == ["my bundle"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--layers", "3,2"], ["3,2", "adds up to 5", "4 layers"]),
        (["--layers", "4,0"], ["4,0", "without layers"]),
        (["--layers", "2,2", "--stages", "3"], ["2 stages", "3 were asked"]),
        (["--stages", "5"], ["5 stages", "4 layers"]),
        (["--group-size", "100"], ["group size 100", "power of two"]),
        (["--awq", "--weights", "int8"], ["--awq", "int8", "int4 only"]),
    ],
)
def test_options_that_contradict_the_model(model: Path, tmp_path: Path, options: list[str], words: list[str]) -> None:
    assert_refused(run(model, "-o", tmp_path / "bundle", *options), *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [["--weights", "int5"], ["--layers", "two,2"], ["--stages", "0"], ["--colour"]])
def test_options_that_mean_nothing_exit_with_2(model: Path, tmp_path: Path, options: list[str]) -> None:
    result = run(model, "-o", tmp_path / "bundle", *options)
    assert result.exit_code == 2
    assert options[-1] in result.stderr


def test_help_names_every_option() -> None:
    text = run("--help").stdout
    assert all(
        option in text for option in ("--output", "--stages", "--layers", "--weights", "--group-size", "--overwrite", "demo", ".gguf")
    )


def test_an_existing_bundle_is_replaced_only_on_request(model: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    assert run(model, "-o", bundle).exit_code == 0
    before = contents(bundle)
    assert_refused(run(model, "-o", bundle, "--weights", "fp32"), "already holds a bundle", "--overwrite")
    assert contents(bundle) == before
    assert run(model, "-o", bundle, "--weights", "fp32", "--overwrite").exit_code == 0
    assert load_manifest(bundle).weight_mode.value == "fp32"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("converter defect")])
def test_a_failure_in_the_second_stage_leaves_the_target_and_is_gone_on_from(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    bundle = tmp_path / "bundle"
    assert run(model, "-o", bundle).exit_code == 0
    before = contents(bundle)
    save = export_tools.shards.save_stage

    def failing_save(stage: object, xml: Path, mode: object) -> None:
        if xml.parent.name.startswith(stage_dir(1)):
            raise error
        save(stage, xml, mode)

    monkeypatch.setattr(export_tools.shards, "save_stage", failing_save)
    result = run(model, "-o", bundle, "--stages", "2", "--overwrite")
    if isinstance(error, OSError):
        assert_refused(result, "No space left on device", str(bundle))
    else:
        assert result.exception is error  # a defect of ours is not dressed up as a user's error
    assert contents(bundle) == before
    monkeypatch.undo()
    result = run(model, "-o", bundle, "--stages", "2", "--overwrite")
    assert "stage 0 of 2, layers 0-1: kept from the interrupted export" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    whole = tmp_path / "uninterrupted"
    assert run(model, "-o", whole, "--stages", "2").exit_code == 0
    assert contents(bundle) == contents(whole)


def damaged_copy(model: Path, folder: Path) -> Path:
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    assert_refused(run(tmp_path / "nowhere", "-o", tmp_path / "bundle"), "nowhere", "does not exist", "'demo'")
    (tmp_path / "empty").mkdir()
    assert_refused(run(tmp_path / "empty", "-o", tmp_path / "bundle"), "config.json")
    (tmp_path / "notes.txt").write_text("x", encoding="utf-8")
    assert_refused(run(tmp_path / "notes.txt", "-o", tmp_path / "bundle"), "notes.txt", ".gguf")


def test_a_gguf_that_is_cut_off(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(20))
    assert_refused(run(tmp_path / "broken.gguf", "-o", tmp_path / "bundle"), "broken.gguf", "download it again")
    gc.collect()  # the reader maps the file and lives on in the cycle of its own error


def test_damaged_weights(model: Path, tmp_path: Path) -> None:
    folder = damaged_copy(model, tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert_refused(run(folder, "-o", tmp_path / "bundle"), str(folder), "cut off", "download it again")
    weights.unlink()
    assert_refused(run(folder, "-o", tmp_path / "bundle"), str(folder), "model.safetensors", "missing")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    assert_refused(run(folder, "-o", tmp_path / "bundle"), str(folder), "pytorch_model.bin", "can run code", "safetensors")
    (folder / "pytorch_model.bin").unlink()
    weights.write_bytes(b"not a header")
    assert_refused(run(folder, "-o", tmp_path / "bundle"), str(weights), "damaged", "download it again")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"model.norm.weight": "model-00001-of-00002.safetensors"}, ["model-00001-of-00002.safetensors is missing"]),
        ({"model.norm.weight": "../model.safetensors"}, ["points outside its folder"]),
        ({"no.such.tensor": "model.safetensors"}, ["does not hold the tensor no.such.tensor"]),
        ([], ["cannot be read as an index"]),
    ],
)
def test_an_index_that_points_nowhere(model: Path, tmp_path: Path, weight_map: object, words: list[str]) -> None:
    folder = damaged_copy(model, tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    assert_refused(run(folder, "-o", tmp_path / "bundle"), str(folder), "download", *words)


def test_weights_stored_as_integers(model: Path, tmp_path: Path) -> None:
    folder = damaged_copy(model, tmp_path / "model")
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].to(torch.int8)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    assert_refused(run(folder, "-o", tmp_path / "bundle"), "model.layers.1.mlp.up_proj.weight", "I8", "already quantized")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, ["hidden_size"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers = 0"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads = 4", "num_key_value_heads = 3"]),
        ({"intermediate_size": 96}, ["model.layers.0.mlp.down_proj.weight", "(64, 128)", "(64, 96)"]),
        ({"num_hidden_layers": 6}, ["lacks the tensor model.layers.4", "incomplete"]),
    ],
)
def test_a_config_that_does_not_fit(model: Path, tmp_path: Path, changes: dict[str, object], words: list[str]) -> None:
    folder = damaged_copy(model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    assert_refused(run(folder, "-o", tmp_path / "bundle", "--stages", "2"), *words)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(("target", "words"), [("memory", ["GiB", "available", "more stages"]), ("disk", ["GiB", "free", "another path"])])
def test_memory_and_disk_are_checked_first(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, words: list[str]
) -> None:
    if target == "memory":
        monkeypatch.setattr(export_tools.export.psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    else:
        monkeypatch.setattr(export_tools.export.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    assert_refused(run(model, "-o", tmp_path / "bundle"), f"not enough {target}", *words)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_lacks_a_tensor(model: Path, tmp_path: Path) -> None:
    folder = damaged_copy(model, tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"model.layers.2.mlp.down_proj.weight", b"model.layers.2.mlp.upxx_proj.weight"))
    assert_refused(run(folder, "-o", tmp_path / "bundle"), "model.layers.2.mlp.down_proj.weight", "incomplete")


def test_undefined_numbers_in_the_weights(model: Path, tmp_path: Path) -> None:
    folder = damaged_copy(model, tmp_path / "model")
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-4:] = b"\xff\xff\xff\xff"  # a float32 NaN in the last tensor of the file
    weights.write_bytes(bytes(data))
    assert_refused(run(folder, "-o", tmp_path / "bundle"), "undefined numbers", "damaged")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, ["mamba", "MambaForCausalLM", "supported: gemma"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["already quantized", "awq"]),
        (
            {"model_type": "homemade", "auto_map": {"AutoModelForCausalLM": "evil.Model"}},
            ["homemade", "evil.Model", "all your rights", "--trust-remote-code"],
        ),
        ({"model_type": "gemma3n_text"}, ["gemma3n_text", "share keys and values"]),
        ({"model_type": "t5", "is_encoder_decoder": True}, ["t5", "encoder-decoder"]),
        ({"model_type": "deepseek_v3"}, ["deepseek_v3", "latent attention"]),
    ],
)
def test_an_unsupported_model_is_refused_before_its_weights(
    model: Path, tmp_path: Path, changes: dict[str, object], words: list[str]
) -> None:
    folder = damaged_copy(model, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "evil.py").write_text("raise SystemExit('executed')", encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    assert_refused(run(folder, "-o", tmp_path / "bundle"), str(folder), *words)


def test_the_same_export_twice_has_the_same_bytes(model: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        assert run(model, "-o", tmp_path / name).exit_code == 0
    weights = Path(stage_dir(0)) / MODEL_BIN
    assert (tmp_path / "first" / weights).read_bytes() == (tmp_path / "second" / weights).read_bytes()
