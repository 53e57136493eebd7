"""Tokenizers: bytes, a ``tokenizer.json`` of Hugging Face, or tiktoken.

Worker processes import this module, so it stays free of torch.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_fastio.errors import ConfigError, FileAccessError, MissingDependencyError

Tokens = npt.NDArray[np.unsignedinteger[Any]]


class Tokenizer(ABC):
    """Text to token numbers."""

    vocab_size: int
    """Token numbers are below this."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[Sequence[int] | npt.NDArray[np.uint8]]:
        """Token numbers of each text, without any that the tokenizer adds around it."""

    @abstractmethod
    def number_of(self, token: str) -> int | None:
        """The number of a token by its text, special ones included; None when there is none."""


class Bytes(Tokenizer):
    """The bytes of the text in UTF-8."""

    vocab_size = 256

    def encode(self, texts: Sequence[str]) -> list[Sequence[int] | npt.NDArray[np.uint8]]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def number_of(self, token: str) -> int | None:
        data = token.encode("utf-8")
        return data[0] if len(data) == 1 else None


class HuggingFace(Tokenizer):
    """A ``tokenizer.json`` file."""

    def __init__(self, file: Path) -> None:
        # The worker processes are the parallelism.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            from tokenizers import Tokenizer as Inner
        except ImportError as error:
            raise MissingDependencyError(
                "a tokenizer.json needs tokenizers: pip install 'lightning_fastio[text]'"
            ) from error
        if not file.is_file():
            raise FileAccessError(f"tokenizer {file}: no such file")
        try:
            self._inner = Inner.from_file(str(file))
        except Exception as error:
            # The library raises nothing narrower.
            raise ConfigError(f"tokenizer {file}: not a tokenizer.json: {error}") from error
        # A tokenizer for a model cuts and pads to its context; a stream of tokens needs neither.
        self._inner.no_truncation()
        self._inner.no_padding()
        self.vocab_size = self._inner.get_vocab_size(with_added_tokens=True)

    def encode(self, texts: Sequence[str]) -> list[Sequence[int] | npt.NDArray[np.uint8]]:
        return [encoding.ids for encoding in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def number_of(self, token: str) -> int | None:
        number: int | None = self._inner.token_to_id(token)
        return number


class TikToken(Tokenizer):
    """An encoding of tiktoken, such as ``gpt2`` or ``o200k_base``."""

    def __init__(self, name: str) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise MissingDependencyError(
                f"tokenizer 'tiktoken:{name}' needs tiktoken: pip install 'lightning_fastio[text]'"
            ) from error
        try:
            self._inner = tiktoken.get_encoding(name)
        except Exception as error:
            # Unknown names are ValueError, a failed download any error of the network.
            raise ConfigError(f"tokenizer 'tiktoken:{name}' cannot be loaded: {error}") from error
        self.vocab_size = self._inner.n_vocab

    def encode(self, texts: Sequence[str]) -> list[Sequence[int] | npt.NDArray[np.uint8]]:
        return list(self._inner.encode_ordinary_batch(list(texts), num_threads=1))

    def number_of(self, token: str) -> int | None:
        try:
            return self._inner.encode_single_token(token)
        except KeyError:
            return None


@lru_cache(maxsize=2)
def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of this process.

    Args:
        name: ``bytes``, the path of a ``tokenizer.json``, or ``tiktoken:NAME``.

    Raises:
        ConfigError: The name is none of these, or the file is no tokenizer.
        FileAccessError: There is no such file.
        MissingDependencyError: The package that reads it is not installed.
    """
    if name == "bytes":
        return Bytes()
    if name.startswith("tiktoken:"):
        return TikToken(name.removeprefix("tiktoken:"))
    path = Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
    if path.suffix != ".json":
        raise ConfigError(f"tokenizer {name!r}: expected 'bytes', a tokenizer.json, or 'tiktoken:NAME'")
    return HuggingFace(path)


def end_token(tokenizer: Tokenizer, end_of_text: int | str | None) -> int | None:
    """The number of the token that ends a document.

    Raises:
        ConfigError: The tokenizer has no such token.
    """
    if end_of_text is None or isinstance(end_of_text, int):
        return end_of_text
    number = tokenizer.number_of(end_of_text)
    if number is None:
        raise ConfigError(f"end_of_text={end_of_text!r}: the tokenizer has no such token; give its number")
    return number


def token_dtype(vocab_size: int) -> npt.DTypeLike:
    """The narrowest of uint16 and uint32 that holds every token."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32
