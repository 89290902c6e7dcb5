"""Who asked for a generation, where a test looks at what it was told."""

from __future__ import annotations

from dataclasses import dataclass, field

from langchain_pshard.core.errors import PShardError
from langchain_pshard.pipeline.stream import Delivery


@dataclass
class Caller:
    """What one caller was told."""

    tokens: list[int] = field(default_factory=list)
    ends: list[object] = field(default_factory=list)

    def take(self, item: Delivery | PShardError) -> bool:
        assert not self.ends, "something came after the end"
        if isinstance(item, PShardError):
            self.ends.append(item)
            return True
        self.tokens += item.tokens
        if item.finish_reason is not None:
            self.ends.append(item.finish_reason)
        return True
