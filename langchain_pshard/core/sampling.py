"""Logits -> token, as a pure function of (logits, parameters, position, history).

The random draw is counter-based: one uniform number from Philox keyed by (seed, position). A replay, another batching or a verification
of drafts therefore draws the same token, and speculation needs no draft probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from langchain_pshard.core.errors import InvalidOptionError

Logits = npt.NDArray[np.float32]

MAX_TOP_LOGPROBS = 20
MAX_SEED = 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the last stage chooses a token. The defaults are greedy decoding.

    Order of application: penalties, temperature, min_p, top_k, top_p, draw.

    Raises:
        InvalidOptionError: a value outside its range; the message names option, value and range.
    """

    temperature: float = 0.0
    """0 is greedy: the highest logit, the lowest id among equals."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches top_p."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt and output (arXiv:1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already generated."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit as often as it was generated."""
    seed: int = 0
    top_logprobs: int | None = None
    """None: no log-probabilities; n: those of the chosen token and of the n most likely ones."""

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0 <= self.temperature <= 100.0, "0 to 100")
        _check("top_k", self.top_k, self.top_k >= 0, "0 (off) or more")
        _check("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0, at most 1")
        _check("min_p", self.min_p, 0.0 <= self.min_p < 1.0, "0 or more, below 1")
        _check("repetition_penalty", self.repetition_penalty, 0.0 < self.repetition_penalty <= 10.0, "above 0, at most 10")
        _check("presence_penalty", self.presence_penalty, abs(self.presence_penalty) <= 10.0, "-10 to 10")
        _check("frequency_penalty", self.frequency_penalty, abs(self.frequency_penalty) <= 10.0, "-10 to 10")
        _check("seed", self.seed, 0 <= self.seed <= MAX_SEED, f"0 to {MAX_SEED}")
        if self.top_logprobs is not None:
            _check("top_logprobs", self.top_logprobs, 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS, f"0 to {MAX_TOP_LOGPROBS}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _check(name: str, value: float, is_valid: bool, valid: str) -> None:
    if math.isnan(value) or not is_valid:
        raise InvalidOptionError(f"{name}={value!r} is out of range; valid: {valid}")


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probabilities at one position, after penalties and before temperature."""

    chosen: float
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability), most likely first; tokens that cannot be drawn (a grammar forbids them) are left out."""


class History(msgspec.Struct, frozen=True):
    """Tokens before a position, for penalties."""

    prompt: Sequence[int]
    generated: Sequence[int]


def sample(logits: Logits, params: SamplingParams, *, position: int, history: History) -> int:
    """Choose the token that follows `position`.

    Args:
        logits: [vocab] float32, not modified.
        params: how to choose.
        position: logical position of the token whose logits these are; with the seed it decides the draw.
        history: tokens up to and including `position`; read only when a penalty is set.
    """
    if params.has_penalties:
        logits = penalized(logits, params, history)
    if params.is_greedy:
        return int(np.argmax(logits))
    candidates, weights = _candidates(logits, params)
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, uniform(params.seed, position) * cumulative[-1], side="right"))
    return int(candidates[min(index, len(candidates) - 1)])


def uniform(seed: int, position: int) -> float:
    """The one random number of (seed, position), in [0, 1)."""
    return float(np.random.Generator(np.random.Philox(key=np.array([seed, position], dtype=np.uint64))).random())


def penalized(logits: Logits, params: SamplingParams, history: History) -> Logits:
    """A copy of `logits` with repetition, presence and frequency penalties applied."""
    result = logits.copy()
    seen = np.unique(np.asarray([*history.prompt, *history.generated], dtype=np.int64))
    values = result[seen]
    result[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    generated, counts = np.unique(np.asarray(history.generated, dtype=np.int64), return_counts=True)
    result[generated] -= (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)
    return result


def _candidates(logits: Logits, params: SamplingParams) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Token ids that may be drawn and their weights, in id order when every token may be drawn, else most likely first."""
    vocab = logits.shape[0]
    weights = np.exp((logits - logits.max()) / np.float32(params.temperature)).astype(np.float64)  # the highest is 1
    if params.min_p > 0.0:
        weights[weights < params.min_p] = 0.0
    if params.top_k == 0 and params.top_p == 1.0:
        return np.arange(vocab), weights
    num_ranked = min(params.top_k or _RANK_FIRST, vocab)
    while True:
        ids = _ranked_ids(logits, num_ranked)
        ranked = weights[ids]
        # The nucleus is taken of what top_k left, of the whole vocabulary without it.
        total = ranked.sum() if params.top_k else weights.sum()
        cumulative = np.cumsum(ranked)
        if params.top_k or num_ranked == vocab or cumulative[-1] >= params.top_p * total:
            break
        num_ranked = min(num_ranked * 8, vocab)
    keep = len(ids) if params.top_p == 1.0 else min(len(ids), int(np.searchsorted(cumulative, params.top_p * total)) + 1)
    return ids[:keep], ranked[:keep]


_RANK_FIRST = 1024
"""A nucleus is nearly always smaller than this; sorting a whole vocabulary of 262,144 takes 38 ms."""


def _ranked_ids(logits: Logits, k: int) -> npt.NDArray[np.int64]:
    """Ids of the k highest logits, highest first, the lower id among equals."""
    vocab = logits.shape[0]
    if k < vocab:
        threshold = np.partition(logits, vocab - k)[vocab - k]
        above = np.flatnonzero(logits > threshold)
        ids = np.concatenate([above, np.flatnonzero(logits == threshold)[: k - len(above)]])
    else:
        ids = np.arange(vocab)
    return ids[np.lexsort((ids, -logits[ids]))]


def token_logprobs(logits: Logits, chosen: int, params: SamplingParams, history: History) -> TokenLogprobs:
    """Log-probabilities of the chosen token and the `params.top_logprobs` most likely ones.

    Args:
        logits: [vocab] float32, before penalties.
    """
    if params.has_penalties:
        logits = penalized(logits, params, history)
    highest = float(logits.max())
    log_total = highest + math.log(float(np.exp(logits.astype(np.float64) - highest).sum()))
    ids = _ranked_ids(logits, min(params.top_logprobs, logits.shape[0])) if params.top_logprobs else np.arange(0)
    return TokenLogprobs(
        float(logits[chosen]) - log_total, tuple((int(i), float(logits[i]) - log_total) for i in ids if logits[i] > -math.inf)
    )
