"""Eight kinds of prompt, for figures that depend on the text."""

from __future__ import annotations

from collections.abc import Mapping

PROMPTS: Mapping[str, str] = {
    "factual": "The capital of France is Paris. The capital of Italy is Rome. The history of the city of Rome began",
    "reasoning": (
        "Question: A farmer has 17 sheep and buys 5 more. Then he sells 9 of them. How many sheep does he have now?"
        " Let us think step by step.\n"
    ),
    "code": (
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        self.items.append(item)\n\n"
        "    def pop(self):\n        return self.items.pop()\n\n    def"
    ),
    "list": "Ten useful things to pack for a hiking trip:\n1. A map\n2. A compass\n3.",
    "creative": "The lighthouse stood on the last rock before the open sea. Every evening the keeper climbed the stairs and",
    "technical": ("TCP congestion control adjusts the rate at which a sender puts packets into the network. In the slow start phase,"),
    "chat": (
        "User: Hello! Can you recommend a good book?\n\nAssistant: Of course. What kind of books do you like?\n\n"
        "User: I like science fiction.\n\nAssistant:"
    ),
    "translation": (
        "English: Good morning.\nFrench: Bonjour.\n\nEnglish: Where is the station?\nFrench: Où est la gare ?\n\n"
        "English: I would like a coffee, please.\nFrench:"
    ),
}
