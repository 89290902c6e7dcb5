"""Questions about a folder of text files: `python -m examples.retrieval --bundle PATH --folder docs "How is a worker started?"`.

Everything stays on this machine, and nothing is downloaded: passages are found by how they are spelled, not by what they mean. A passage
becomes a vector of its words' letter groups (3 to 5 letters, hashed), so "starting" finds "started", but "begin" does not. Where meaning
counts, put an embedding model in the place of `SpellingEmbeddings`; the rest stays.
"""

from __future__ import annotations

import math
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore

from examples.fleet_option import parser, run
from langchain_pshard import ChatPShard

SUFFIXES = (".md", ".rst", ".txt")
PASSAGE_CHARS = 400
NUM_PASSAGES = 3
PROMPT = ChatPromptTemplate.from_template("Answer in one sentence, from these notes alone.\n\n{notes}\n\nQuestion: {question}")


class SpellingEmbeddings(Embeddings):
    """Texts as counts of their words' letter groups, hashed into a vector of length 1. The same everywhere and always."""

    size = 2_048
    _lengths = (3, 4, 5)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        counts = Counter(
            zlib.crc32(gram.encode()) % self.size for word in re.findall(r"\w+", text.lower()) for gram in self._grams(f" {word} ")
        )
        vector = [0.0] * self.size
        for place, count in counts.items():
            vector[place] = 1 + math.log(count)
        length = math.hypot(*vector) or 1.0
        return [value / length for value in vector]

    def _grams(self, word: str) -> Iterator[str]:
        for length in self._lengths:
            yield from (word[at : at + length] for at in range(len(word) - length + 1))


def passages(folder: Path) -> Iterator[Document]:
    """Paragraphs of the text files in and below `folder`, joined up to `PASSAGE_CHARS` characters; longer ones are cut."""
    for path in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file()):
        text = ""
        for paragraph in [*path.read_text(encoding="utf-8").split("\n\n"), ""]:
            if text and (not paragraph or len(text) + len(paragraph) > PASSAGE_CHARS):
                yield from (
                    Document(text[at : at + PASSAGE_CHARS], metadata={"source": path.relative_to(folder).as_posix()})
                    for at in range(0, len(text), PASSAGE_CHARS)
                )
                text = ""
            text = f"{text}\n\n{paragraph.strip()}".strip()


def retriever_of(folder: Path) -> BaseRetriever:
    """Finds the `NUM_PASSAGES` passages of the folder that are spelled most like a question."""
    store = InMemoryVectorStore(SpellingEmbeddings())
    store.add_documents(list(passages(folder)))
    return store.as_retriever(search_kwargs={"k": NUM_PASSAGES})


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser("retrieval", "Ask about a folder of text files.")
    options.add_argument("question", nargs="?", default="How is a worker started?")
    options.add_argument("--folder", type=Path, default=Path("docs"), help=f"searched below, for files that end in {', '.join(SUFFIXES)}")
    asked = options.parse_args(arguments)
    if not asked.question.strip():
        options.error("the question is empty")
    found = retriever_of(asked.folder).invoke(asked.question)
    if not found:
        print(f"error: no text in {asked.folder}; it is searched for {', '.join(SUFFIXES)}", file=sys.stderr)
        return 1

    def answer(model: ChatPShard) -> None:
        chain = PROMPT | model | StrOutputParser()
        notes = "\n\n".join(document.page_content for document in found)
        for piece in chain.stream({"notes": notes, "question": asked.question}):
            print(piece, end="", flush=True)
        print(f"\n\nFrom: {', '.join(dict.fromkeys(document.metadata['source'] for document in found))}")

    return run(asked, answer)


if __name__ == "__main__":
    sys.exit(main())
