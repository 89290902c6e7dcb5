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
Weights = npt.NDArray[np.float32]

MAX_TOP_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
_MIN_TEMPERATURE = 1e-30
"""Below, float32 has no such number, and nothing changes: all but the highest logits have weight 0 long before."""


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
        for name in self.__struct_fields__:
            _check_kind(name, getattr(self, name))
        _check("temperature", self.temperature, 0.0 <= self.temperature <= 100.0, "0 to 100")
        _check("top_k", self.top_k, 0 <= self.top_k <= MAX_TOP_K, f"0 (off) to {MAX_TOP_K}")
        _check("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0, at most 1")
        _check("min_p", self.min_p, 0.0 <= self.min_p < 1.0, "0 or more, below 1")
        _check("repetition_penalty", self.repetition_penalty, 0.01 <= self.repetition_penalty <= 10.0, "0.01 to 10")
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

    @property
    def is_narrowed(self) -> bool:
        """Whether only some of the tokens may be drawn."""
        return self.top_k != 0 or self.top_p != 1.0 or self.min_p != 0.0


_WHOLE = frozenset({"top_k", "seed", "top_logprobs"})


def _check_kind(name: str, value: object) -> None:
    """Only numbers that every worker reads as what they are: it would drop a message with anything else unseen."""
    if name == "top_logprobs" and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int if name in _WHOLE else int | float):
        raise InvalidOptionError(f"{name}={value!r} is no {'whole ' if name in _WHOLE else ''}number")


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


def sample(logits: Logits, params: SamplingParams, *, position: int, history: History, draw_idx: int = 0) -> int:
    """Choose the token that follows `position`.

    Args:
        logits: [vocab] float32, not modified.
        params: how to choose.
        position: logical position of the token whose logits these are; with the seed it decides the draw.
        history: tokens up to and including `position`; read only when a penalty is set.
        draw_idx: which of the position's independent draws.
    """
    if params.has_penalties:
        logits = penalized(logits, params, history)
    if params.is_greedy:
        return int(np.argmax(logits))
    draw = uniform(params.seed, position, draw_idx)
    if params.top_k == 0 and params.top_p == 1.0:
        return _drawn(_weights(logits, logits.max(), params), draw)
    candidates, weights = _ranked_candidates(logits, params)
    cumulative = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(cumulative, draw * cumulative[-1], side="right"))
    return int(candidates[min(index, len(candidates) - 1)])


def uniform(seed: int, position: int, draw_idx: int = 0) -> float:
    """The random numbers of (seed, position), in [0, 1), by their index."""
    return float(np.random.Generator(np.random.Philox(key=np.array([seed, position], dtype=np.uint64))).random(draw_idx + 1)[draw_idx])


def penalized(logits: Logits, params: SamplingParams, history: History) -> Logits:
    """A copy of `logits` with repetition, presence and frequency penalties applied."""
    result = logits.copy()
    seen = np.unique(np.asarray([*history.prompt, *history.generated], dtype=np.int64))
    values = result[seen]
    result[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    generated, counts = np.unique(np.asarray(history.generated, dtype=np.int64), return_counts=True)
    result[generated] -= (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)
    return result


def _weights(logits: Logits, highest: np.float32, params: SamplingParams) -> Weights:
    """Each token's probability relative to that of the most likely one, whose logit is `highest`; 0 for those that min_p drops."""
    weights = logits - highest
    weights /= np.float32(max(params.temperature, _MIN_TEMPERATURE))
    np.exp(weights, out=weights)
    if params.min_p > 0.0:
        weights *= weights >= np.float32(params.min_p)
    return weights


_BLOCK = 512
"""Tokens of a block: sums and maxima of 512 blocks say in which of them a vocabulary of 262,144 is worth a closer look. One cumulative
sum over all of it in float64 takes 1.5 ms, sums of blocks 0.2."""


def _drawn(weights: Weights, draw: float) -> int:
    """The token, in order of ids, at which the cumulative weight first exceeds the fraction `draw` of the whole."""
    num_whole = len(weights) - len(weights) % _BLOCK
    sums = weights[:num_whole].reshape(-1, _BLOCK).sum(axis=1, dtype=np.float64)
    cumulative = np.cumsum(np.append(sums, weights[num_whole:].sum(dtype=np.float64)))
    target = draw * cumulative[-1]
    last = int(np.searchsorted(cumulative, cumulative[-1]))  # the last block with any weight: `target` may be rounded up to the whole
    block = min(int(np.searchsorted(cumulative, target, side="right")), last)
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK].astype(np.float64)
    index = int(np.searchsorted(np.cumsum(inside), target - (cumulative[block - 1] if block else 0.0), side="right"))
    # A block's own cumulative sum may end a rounding below the block's sum; the token is then its last one that has any weight.
    return block * _BLOCK + min(index, int(np.flatnonzero(inside)[-1]))


def _ranked_candidates(logits: Logits, params: SamplingParams) -> tuple[npt.NDArray[np.int64], Weights]:
    """Ids that top_k and top_p leave and their weights, most likely first."""
    vocab = logits.shape[0]
    num_ranked = min(params.top_k or _RANK_FIRST, vocab)
    ids = _ranked_ids(logits, num_ranked)
    highest = logits[ids[0]]
    weights = _weights(logits[ids], highest, params)
    cumulative = np.cumsum(weights, dtype=np.float64)
    # The nucleus is taken of what top_k left, of the whole vocabulary without it.
    enough = params.top_p * (cumulative[-1] if params.top_k else _weights(logits, highest, params).sum(dtype=np.float64))
    while not params.top_k and num_ranked < vocab and cumulative[-1] < enough:
        num_ranked = min(num_ranked * 8, vocab)
        ids = _ranked_ids(logits, num_ranked)
        weights = _weights(logits[ids], highest, params)
        cumulative = np.cumsum(weights, dtype=np.float64)
    keep = len(ids) if params.top_p == 1.0 else min(len(ids), int(np.searchsorted(cumulative, enough)) + 1)
    return ids[:keep], weights[:keep]


_RANK_FIRST = 64
"""A nucleus is often smaller than this; sorting a whole vocabulary of 262,144 takes 38 ms."""


def _ranked_ids(logits: Logits, k: int) -> npt.NDArray[np.int64]:
    """Ids of the k highest logits, highest first, the lower id among equals."""
    ids = _contenders(logits, k)
    if k < len(ids):
        values = logits[ids]
        threshold = np.partition(values, len(ids) - k)[len(ids) - k]
        above = ids[values > threshold]
        ids = np.concatenate([above, ids[values == threshold][: k - len(above)]])
    return ids[np.lexsort((ids, -logits[ids]))]


def _contenders(logits: Logits, k: int) -> npt.NDArray[np.int64]:
    """Ids, in order, among which are the k highest logits and all that equal the last of them: those of the blocks with high maxima.

    The k highest maxima are k different logits, so the k-th highest logit is no lower than the k-th highest maximum.
    """
    vocab = logits.shape[0]
    num_whole = vocab - vocab % _BLOCK
    if k >= num_whole // _BLOCK:
        return np.arange(vocab)
    maxima = logits[:num_whole].reshape(-1, _BLOCK).max(axis=1)
    blocks = np.flatnonzero(maxima >= np.partition(maxima, len(maxima) - k)[len(maxima) - k])
    ids = (blocks[:, None] * _BLOCK + np.arange(_BLOCK)).reshape(-1)
    return np.concatenate([ids, np.arange(num_whole, vocab)])


def token_logprobs(logits: Logits, chosen: int, params: SamplingParams, history: History) -> TokenLogprobs:
    """Log-probabilities of the chosen token and the `params.top_logprobs` most likely ones.

    Args:
        logits: [vocab] float32, before penalties.
    """
    if params.has_penalties:
        logits = penalized(logits, params, history)
    highest = float(logits.max())
    log_total = highest + math.log(float(np.exp(logits - np.float32(highest)).sum(dtype=np.float64)))
    ids = _ranked_ids(logits, min(params.top_logprobs, logits.shape[0])) if params.top_logprobs else np.arange(0)
    return TokenLogprobs(
        float(logits[chosen]) - log_total, tuple((int(i), float(logits[i]) - log_total) for i in ids if logits[i] > -math.inf)
    )
