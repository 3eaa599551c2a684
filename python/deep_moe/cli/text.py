"""Text as input: words and marks become tokens, tokens become embeddings, the same on every machine."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import torch

DEFAULT_TEXT = Path(__file__).resolve().parent.parent / "data" / "prose.txt"

_TOKEN = re.compile(r"\w+(?:['\u2019]\w+)*|[^\w\s]")


def tokenise(text: str) -> list[str]:
    """Splits ``text`` into lower-case words (apostrophes kept inside) and single punctuation marks."""
    return _TOKEN.findall(text.lower())


def load_tokens(path: str | None) -> list[str]:
    """Reads the UTF-8 file ``path`` (None: the text of the package) and returns its tokens, at least one."""
    file = Path(path) if path else DEFAULT_TEXT
    try:
        tokens = tokenise(file.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise ValueError(f"text: cannot read {file}: {error.strerror}") from error
    if not tokens:
        raise ValueError(f"text: {file} holds no word; give a file with at least one word")
    return tokens


def window(tokens: list[str], begin: int, count: int) -> list[str]:
    """Returns ``count`` tokens from position ``begin`` on; the text starts again where it ends."""
    return [tokens[(begin + i) % len(tokens)] for i in range(count)]


def word_vector(word: str, hidden: int) -> torch.Tensor:
    """Returns a word's embedding, ``[hidden] float32``, normal, from a seed that is the word's hash."""
    seed = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little") >> 1
    return torch.randn(hidden, generator=torch.Generator().manual_seed(seed))


def embed(tokens: list[str], hidden: int) -> torch.Tensor:
    """Returns ``[len(tokens), hidden] float32`` of about unit variance.

    A token's row is its word's vector plus half of the word's before it, so that one word in two contexts may
    take two routes, while frequent words still crowd onto the experts that they prefer.
    """
    places: dict[str, int] = {}
    ids = torch.tensor([places.setdefault(token, len(places)) for token in tokens], dtype=torch.int64)
    table = torch.stack([word_vector(word, hidden) for word in places]) if places else torch.zeros(0, hidden)
    before = torch.roll(ids, 1)
    return table[ids].mul_(0.8944).add_(table[before], alpha=0.4472) if tokens else torch.zeros(0, hidden)
