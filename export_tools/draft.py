"""The draft model of a bundle: a small model that guesses what the bundle's own will say, exported unsplit beside its stages.

It speaks in token ids with the other one, so both must mean the same by each of them. That is compared first, on the tokenizers alone.
"""

from __future__ import annotations

from typing import Any

from export_tools.compress import WeightModes, activation_group_size
from export_tools.progress import Progress
from export_tools.shards import Cut
from export_tools.source import Source, TextParts, open_weights
from langchain_pshard.core.bundle import DRAFT_DIR, DraftEntry, LayerSpan, StageEntry, Verification
from langchain_pshard.core.errors import InvalidOptionError


def check_same_tokens(target: Source, target_tokenizer: Any, draft: Source, draft_tokenizer: Any) -> None:
    """Refuse a draft model whose token ids mean something else.

    Raises:
        InvalidOptionError: the vocabularies or special tokens differ; it names the first difference with both values.
    """
    difference = _vocabulary_difference(target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()) or _special_difference(
        target_tokenizer, draft_tokenizer
    )
    if difference is None:
        return
    what, own, other = difference
    raise InvalidOptionError(
        f"--draft {draft.name} cannot draft for {target.name}: {what} is {own} in {target.name} and {other} in {draft.name}:"
        " choose a model of the same family, with the same tokenizer"
    )


def _vocabulary_difference(own: dict[str, int], other: dict[str, int]) -> tuple[str, str, str] | None:
    """What differs first, by id, with both values."""
    if own == other:
        return None
    by_id, other_by_id = ({idx: token for token, idx in vocabulary.items()} for vocabulary in (own, other))
    different = [idx for idx in sorted(by_id.keys() | other_by_id.keys()) if by_id.get(idx) != other_by_id.get(idx)]
    if not different:  # two tokens of one id
        return "the number of tokens", str(len(own)), str(len(other))
    first = different[0]
    sizes = f"the first of {len(different)} differences between vocabularies of {len(own)} and {len(other)} tokens"
    return f"token {first} ({sizes})", _shown(by_id.get(first)), _shown(other_by_id.get(first))


def _special_difference(own: Any, other: Any) -> tuple[str, str, str] | None:
    own_roles, other_roles = own.special_tokens_map, other.special_tokens_map
    for role in sorted(own_roles.keys() | other_roles.keys()):
        if own_roles.get(role) != other_roles.get(role):
            return f"the special token {role}", _shown(own_roles.get(role)), _shown(other_roles.get(role))
    own_ids, other_ids = set(own.all_special_ids), set(other.all_special_ids)
    if own_ids == other_ids:
        return None
    first = min(own_ids ^ other_ids)
    kinds = ("special", "ordinary") if first in own_ids else ("ordinary", "special")
    return f"token {first}", *kinds


def _shown(token: Any) -> str:
    return "missing" if token is None else repr(token)


def cut_draft(source: Source, text: TextParts, modes: WeightModes, progress: Progress) -> Cut:
    """The draft model as one shard; opens its weights.

    Raises:
        SourceError: missing, incomplete or damaged weight files.
    """
    reader = open_weights(source, progress)
    return Cut(
        source=source,
        weights=reader,
        sizes=reader.sizes(),
        text=text,
        spans=(LayerSpan(0, source.shape.num_layers),),
        folders=(DRAFT_DIR,),
        modes=modes,
        is_draft=True,
    )


def draft_entry(cut: Cut, shard: StageEntry, verification: Verification | None) -> DraftEntry:
    """What the manifest says of the draft model."""
    shape, modes = cut.source.shape, cut.modes
    return DraftEntry(
        model_name=cut.source.name,
        architecture=shape.architecture,
        span=shard.span,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        context_length=shape.context_length,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        attention_windows=shape.attention_windows,
        weight_mode=modes.layers,
        embedding_mode=modes.embedding,
        head_mode=modes.head,
        group_size=modes.group_size if modes.has_int4 else None,
        activation_group_size=activation_group_size(cut.sizes.channel_counts, modes),
        files=shard.files,
        runners=shape.runners,
        verification=verification,
    )
