"""Fields out of free text: `python -m examples.structured --bundle PATH`, with files of invoices as further arguments.

The answer is an `Invoice` whatever the model: the fleet generates nothing that is none.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from langchain_core.exceptions import OutputParserException
from pydantic import BaseModel, Field

from examples.fleet_option import model_options, parser
from langchain_pshard import ChatPShard
from langchain_pshard.core.errors import PShardError

SAMPLE = "Invoice no. 2026-118, Lantern & Sons. Two brass lamps at 40.00 EUR each, one wick at 3.50 EUR. Total 83.50 EUR, paid."


class Item(BaseModel):
    """One line of an invoice."""

    name: str = Field(max_length=40)
    count: int = Field(ge=1, le=999)
    price: float = Field(ge=0, le=100_000)


class Invoice(BaseModel):
    """What an invoice says."""

    number: str = Field(max_length=20)
    seller: str = Field(max_length=40)
    items: list[Item] = Field(max_length=4)
    currency: Literal["EUR", "USD", "GBP"]
    is_paid: bool


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser("structured", "Read invoices.")
    options.add_argument("files", nargs="*", type=Path, help="text files; without any, a sample")
    asked = options.parse_args(arguments)
    texts = [path.read_text(encoding="utf-8") for path in asked.files] or [SAMPLE]
    try:
        with ChatPShard(**model_options(asked)) as model:
            reader = model.with_structured_output(Invoice)
            for invoice in reader.batch([f"Read this invoice as JSON.\n\n{text}" for text in texts]):
                print(invoice.model_dump_json(indent=1))
    except (PShardError, OutputParserException) as error:  # the second when max_tokens cut the answer
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
