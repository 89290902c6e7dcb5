"""Sources and targets that no bundle can come of: one line names file, value and remedy, and the target is left alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner, Result

from export_tools.cli import main
from langchain_pshard.core.bundle import load_manifest
from tests.support.models import build_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    """A copy to spoil, beside a target that must stay as it is."""
    (tmp_path / "target").mkdir()
    return Path(shutil.copytree(tiny, tmp_path / "mödel 1"))


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [*(str(argument) for argument in arguments), "--no-measure"], prog_name="pshard-export")


def assert_refused(model: Path, *words: str, options: tuple[str, ...] = ()) -> None:
    target = model.parent / "target"
    before = sorted(path.relative_to(model.parent) for path in model.parent.rglob("*"))
    result = run(model, "-o", target / "bundle", *options)
    assert result.exit_code == 1, result.output
    last_line = result.stderr.strip().splitlines()[-1]
    assert last_line.startswith("error: ")
    assert all(word in last_line for word in words), last_line
    assert "Traceback" not in result.stderr
    assert sorted(path.relative_to(model.parent) for path in model.parent.rglob("*")) == before


def change_tensor(model: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = safetensors.torch.load_file(model / "model.safetensors")
    tensors[name] = change(tensors[name])
    safetensors.torch.save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def change_config(model: Path, **changes: object) -> None:
    path = model / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value != "gone"}), encoding="utf-8")


@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size"])
def test_a_config_without_a_size(model: Path, field: str) -> None:
    """transformers would quietly take Llama 7B's."""
    change_config(model, **{field: "gone"})
    assert_refused(model, "mödel 1", "config.json", f"lacks {field}", "download the model again")


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", ["cannot be read"]), ("[]", ["no JSON object"]), ('{"hidden_size": 64}', ["names no model_type"])],
)
def test_a_config_that_is_none(model: Path, text: str, words: list[str]) -> None:
    (model / "config.json").write_text(text, encoding="utf-8")
    assert_refused(model, "mödel 1", *words)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8], ids=str)
def test_weights_that_are_quantized_already(model: Path, dtype: torch.dtype) -> None:
    name = "model.layers.3.mlp.up_proj.weight"
    change_tensor(model, name, lambda tensor: tensor.to(dtype))
    assert_refused(model, "model.safetensors", name, "already quantized", "export from the original weights")


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(model: Path, name: str, value: float) -> None:
    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        tensor[3, 5] = value
        return tensor

    change_tensor(model, name, spoil)
    assert_refused(model, "mödel 1", name, "infinite or undefined", "download it again")


def test_a_part_of_the_weights_that_is_cut_off(model: Path) -> None:
    whole = safetensors.torch.load_file(model / "model.safetensors")
    names = sorted(whole)
    placed = {name: f"part-{idx % 2}.safetensors" for idx, name in enumerate(names)}
    for part in sorted(set(placed.values())):
        safetensors.torch.save_file({name: whole[name] for name in names if placed[name] == part}, model / part)
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}), encoding="utf-8")
    assert run(model, "-o", model.parent / "whole", "--no-verify").exit_code == 0
    shutil.rmtree(model.parent / "whole")
    (model / "part-1.safetensors").write_bytes((model / "part-1.safetensors").read_bytes()[:-4])
    assert_refused(model, "part-1.safetensors", "cut off", "download it again")
    (model / "part-1.safetensors").unlink()
    assert_refused(model, "part-1.safetensors is missing", "download that file")


def test_a_model_without_a_tokenizer(model: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    assert_refused(model, "the tokenizer of", "mödel 1", "download its files again")


def test_a_tokenizer_that_is_damaged(model: Path) -> None:
    (model / "tokenizer.json").write_text("{", encoding="utf-8")
    assert_refused(model, "the tokenizer of", "mödel 1", "download its files again")


def test_more_stages_than_layers(model: Path) -> None:
    assert_refused(model, "5 stages", "4 layers", options=("--stages", "5"))


def test_names_with_spaces_and_letters_of_any_alphabet(model: Path) -> None:
    bundle = model.parent / "target" / "バンドル #1 'new'"
    result = run(model, "-o", bundle, "--no-verify")
    assert result.exit_code == 0, result.output
    assert load_manifest(bundle).model_name == "mödel 1"


def test_a_target_below_a_file(model: Path) -> None:
    (model.parent / "target").rmdir()
    (model.parent / "target").write_bytes(b"x")
    assert_refused(model, "cannot write the bundle", "target", "choose another path")


@pytest.mark.skipif(sys.platform != "linux", reason="a folder that not even an administrator may write to")
def test_a_target_that_is_read_only(model: Path) -> None:
    result = run(model, "-o", "/sys/bundle")
    assert result.exit_code == 1
    assert "error: cannot write the bundle /sys/bundle" in result.stderr
    assert "choose another path" in result.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="RLIMIT_FSIZE")
def test_a_disk_that_is_full_half_way(model: Path) -> None:
    """A limit on the size of files, which weights run into and graphs do not."""
    bundle = model.parent / "target" / "bundle"
    script = (
        "import resource, sys; from export_tools.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000)); main(sys.argv[1:])"
    )
    options = ["--weights", "fp32", "--no-measure", "--json"]
    done = subprocess.run([sys.executable, "-c", script, str(model), "-o", str(bundle), *options], capture_output=True, timeout=100)
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert document["error"] == "usage"
    assert "cannot write" in document["message"]
    assert "free some space there, or choose another path" in document["message"]
    assert list((model.parent / "target").iterdir()) == []
