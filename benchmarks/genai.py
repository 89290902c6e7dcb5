"""openvino_genai as a peer: the same stage folder, in a process of its own on cores of its own, with precisions of its own choosing.

Run as a program it is that process: `python -m benchmarks.genai FOLDER --pipeline SDPA|PA|CB --threads N`. A request is
`{"prompts": [[token, ..], ..], "num_tokens": N}`; it generates greedily past end tokens and answers with its tokens and the seconds of
the call alone, so that nothing of ours is in its time.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.processes import READY_TIMEOUT_S, JsonProcess, serve_requests, started
from langchain_pshard.core.bundle import stage_dir
from langchain_pshard.core.errors import InvalidOptionError

Pipeline = Literal["SDPA", "PA", "CB"]
"""LLMPipeline with its stateful or its paged backend, or ContinuousBatchingPipeline."""
NAMES: dict[Pipeline, str] = {
    "SDPA": "LLMPipeline, stateful backend",
    "PA": "LLMPipeline, paged backend",
    "CB": "ContinuousBatchingPipeline",
}
_CACHE_GB = 1
"""KV of the batching pipeline, which has no default that serves several users; as much as one of our stages has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A running pipeline of openvino_genai."""

    process: JsonProcess
    precisions: str
    """What it computes in, for the report."""

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds and tokens of one call for all prompts; several only for `CB`.

        Raises:
            ProcessError: it ended, or did not answer in time.
        """
        self.process.tell({"prompts": [list(prompt) for prompt in prompts], "num_tokens": num_tokens})
        answer = self.process.answer()
        return float(answer["seconds"]), answer["tokens"]


def check_installed() -> None:
    """Refuse before any work.

    Raises:
        InvalidOptionError: openvino_genai, or what `--genai` needs of it, is not installed.
    """
    for module in ("openvino_genai", "openvino_tokenizers"):
        if importlib.util.find_spec(module) is None:
            raise InvalidOptionError(
                f"this benchmark compares with openvino_genai, and {module} is not installed: `pip install {module.replace('_', '-')}`,"
                " or run it as `python dev.py bench`, which installs both"
            )


@contextlib.contextmanager
def running_peer(bundle: Path, pipeline: Pipeline, *, cores: Sequence[int]) -> Iterator[Peer]:
    """Start a pipeline over the only stage of `bundle`, with one thread for each of `cores`, and stop it at the end.

    Raises:
        ProcessError: it ended early or was not ready in time.
    """
    command = [sys.executable, "-m", "benchmarks.genai", str(bundle / stage_dir(0)), "--pipeline", pipeline, "--threads", str(len(cores))]
    with started(command, name=f"openvino_genai process ({pipeline})", cores=cores) as process:
        ready = process.wait_for("ready", READY_TIMEOUT_S)
        yield Peer(process=process, precisions=str(ready["precisions"]))


def main() -> None:
    """The peer's own process."""
    parser = argparse.ArgumentParser(prog="benchmarks.genai")
    parser.add_argument("folder")
    parser.add_argument("--pipeline", choices=list(NAMES), required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    generate = (_batching if options.pipeline == "CB" else _single)(options.folder, options.pipeline, options.threads)

    def reply(request: dict[str, Any]) -> dict[str, Any]:
        started_s = time.perf_counter()
        tokens = generate(request["prompts"], request["num_tokens"])
        return {"seconds": time.perf_counter() - started_s, "tokens": tokens}

    serve_requests(reply, precisions=_precisions())


_Generate = Callable[[list[list[int]], int], list[list[int]]]


def _single(folder: str, pipeline: str, num_threads: int) -> _Generate:
    import numpy as np
    import openvino as ov
    import openvino_genai

    import export_tools  # noqa: F401  # before openvino: it keeps openvino's usage reports away

    llm = openvino_genai.LLMPipeline(folder, "CPU", ATTENTION_BACKEND=pipeline, INFERENCE_NUM_THREADS=num_threads)

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        (prompt,) = prompts
        return [list(llm.generate(ov.Tensor(np.array([prompt])), _greedy(num_tokens)).tokens[0])]

    return generate


def _batching(folder: str, _: str, num_threads: int) -> _Generate:
    import numpy as np
    import openvino as ov
    import openvino_genai

    import export_tools  # noqa: F401  # as above

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = _CACHE_GB
    batching = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", {"INFERENCE_NUM_THREADS": num_threads})

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        results = batching.generate([ov.Tensor(np.array([prompt])) for prompt in prompts], [_greedy(num_tokens)] * len(prompts))
        return [list(result.m_generation_ids[0]) for result in results]

    return generate


def _greedy(num_tokens: int) -> Any:
    import openvino_genai

    return openvino_genai.GenerationConfig(max_new_tokens=num_tokens, ignore_eos=True, do_sample=False)


def _precisions() -> str:
    """What the device computes in when nobody asks for anything, which is how openvino_genai runs it."""
    import openvino as ov

    core = ov.Core()
    inference, kv, group = (
        core.get_property("CPU", name) for name in ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE")
    )
    return f"its defaults: inference {inference.get_type_name()}, KV {kv.get_type_name()}, activations quantized by {group}"


if __name__ == "__main__":
    main()
