"""The stages of a bundle run one after another in this process: the plain loop that workers are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import torch
import transformers
from numpy.typing import NDArray

from langchain_pshard.core.bundle import MODEL_XML, load_manifest, stage_dir


class StatefulChain:
    """One stream over all stages of a bundle, stateful graphs, float32 throughout.

    Invariant: `num_tokens` is the number of tokens every stage holds.
    """

    def __init__(self, bundle: Path) -> None:
        core = ov.Core()
        # Two threads: with one, a synchronous infer() swallows exceptions; the async form below raises either way.
        settings = {"EXECUTION_MODE_HINT": "ACCURACY", "INFERENCE_NUM_THREADS": 2}
        folders = [bundle / stage_dir(idx) for idx in range(load_manifest(bundle).num_stages)]
        self.compiled = [core.compile_model(folder / MODEL_XML, "CPU", settings) for folder in folders]
        self._requests = [compiled.create_infer_request() for compiled in self.compiled]
        self.num_tokens = 0

    def step(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Append tokens; returns their logits, [tokens, vocab]."""
        end = self.num_tokens + len(token_ids)
        shared = {
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(self.num_tokens, end)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        values: NDArray[Any] = np.array([token_ids], np.int64)
        for request in self._requests:
            request.start_async({0: values, **shared})
            request.wait()
            values = request.get_output_tensor(0).data.copy()
        self.num_tokens = end
        return values[0]


def reference_logits(model_folder: Path, token_ids: Sequence[int]) -> NDArray[np.float32]:
    """Logits of the unsplit transformers model, eager attention, float32: [tokens, vocab]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    with torch.no_grad():
        return model.eval()(torch.tensor([list(token_ids)])).logits[0].numpy()
