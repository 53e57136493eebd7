"""Text: lines or whole files, JSON Lines, or a column of a table; kept as strings or turned into tokens."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from lightning_fastio.convert.files import COMPRESSED_SUFFIXES, JSON_SUFFIXES, TEXT_SUFFIXES, kind_suffix, walk
from lightning_fastio.convert.manifest import escape_name, fingerprint
from lightning_fastio.convert.records import Column, ColumnTypes, to_columns
from lightning_fastio.convert.source import Loaded, Skipped, Source, Task
from lightning_fastio.convert.tokens import end_token, load_tokenizer, token_dtype
from lightning_fastio.errors import ConfigError, CorruptFileError, FormatError

_PIECE_BYTES = 1 << 20
_NAME_OF_COMPRESSION = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}


@dataclass(frozen=True)
class Piece:
    """Documents of one file, undecoded."""

    file: str
    """For messages."""
    first: int
    """Number of the first line, from 1; 0 when the piece is a whole file."""
    documents: list[bytes]


@dataclass(frozen=True)
class LoadText:
    """Decodes, parses and tokenises the documents of a task."""

    columns: Mapping[str, Column] | None
    """Columns of JSON records; None for plain text."""
    text_field: str
    tokenizer: str | None
    end: int | None
    """Token after every document."""
    dtype: str
    """Of tokens."""

    def __call__(self, pieces: list[Piece]) -> Loaded:
        documents: list[Any] = []
        skipped: list[Skipped] = []
        for piece in pieces:
            for offset, data in enumerate(piece.documents):
                name = f"{piece.file}:{piece.first + offset}" if piece.first else piece.file
                if data.strip() or not piece.first:
                    try:
                        documents.append(self._parse(data))
                    except ValueError as error:
                        skipped.append(Skipped(name, str(error)))
        if not documents:
            return Loaded({}, skipped)
        if self.tokenizer is not None:
            texts = documents if self.columns is None else [record[self.text_field] for record in documents]
            return Loaded({"tokens": self.tokenize(texts)}, skipped)
        rows = {self.text_field: documents} if self.columns is None else to_columns(documents, self.columns)
        return Loaded(rows, skipped)

    def tokenize(self, texts: list[str]) -> list[Any]:
        """Token numbers of each text, with the end token."""
        assert self.tokenizer is not None
        ends = [] if self.end is None else [self.end]
        encoded = load_tokenizer(self.tokenizer).encode(texts)
        return [np.concatenate([np.asarray(tokens, self.dtype), np.array(ends, self.dtype)]) for tokens in encoded]

    def _parse(self, data: bytes) -> Any:
        """Text, or a record; ValueError says what is wrong with it."""
        text = data.decode("utf-8")
        if self.columns is None:
            if self.tokenizer is None:
                _refuse_nul(self.text_field, text)
            return text
        record = parse_record(text)
        if self.tokenizer is not None:
            if not isinstance(record.get(self.text_field), str):
                raise ValueError(f"no text under the key {self.text_field!r}; the keys are {list(record)}")
            return record
        for key, value in record.items():
            if isinstance(value, str):
                _refuse_nul(key, value)
        return record


@dataclass(frozen=True)
class TokenizeColumn:
    """Tokenises one column of what another function loads."""

    load: Callable[[Any], Loaded]
    text: LoadText

    def __call__(self, payload: Any) -> Loaded:
        loaded = self.load(payload)
        return replace(loaded, rows={"tokens": self.text.tokenize(loaded.rows[self.text.text_field])})


@dataclass(kw_only=True)
class Text(Source):
    """Text files; see `open_text`."""

    files: list[tuple[str, Path]]
    documents: Literal["line", "file"]

    def tasks(self) -> Iterator[Task]:
        """Runs of documents."""
        if self.documents == "line":
            for name, file in self.files:
                for piece, num_bytes in read_lines(name, file):
                    yield Task([piece], len(piece.documents), num_bytes)
            return
        pieces: list[Piece] = []
        size = 0
        for name, file in self.files:
            pieces.append(Piece(name, 0, [b"".join(_read(file))]))
            size += len(pieces[-1].documents[0])
            if size >= _PIECE_BYTES:
                yield Task(pieces, len(pieces), size)
                pieces, size = [], 0
        if pieces:
            yield Task(pieces, len(pieces), size)


def open_text(
    source: Path | list[Path],
    *,
    tokenizer: str | None = None,
    text_field: str = "text",
    documents: Literal["line", "file"] = "line",
    end_of_text: int | str | None = None,
    null_fill: Any = None,
) -> Text:
    """Open text.

    Lines with nothing but white space are left out. A JSON Lines file without a tokenizer is read twice: once for
    the types of its keys, which later records may widen.

    Args:
        source: Text or JSON Lines files, compressed or not, or a folder of them.
        tokenizer: See `load_tokenizer`; None keeps text.
        text_field: Name of the field, and the key of JSON records that is tokenised.
        documents: Whether a row is a line or a whole file.
        end_of_text: Token after every document.
        null_fill: In place of what JSON records lack.

    Raises:
        FormatError: There are no text files, or both plain text and JSON Lines.
        ConfigError: The tokenizer has no such end token.
    """
    files = _list_files(source)
    num_json = sum(kind_suffix(file) in JSON_SUFFIXES for _, file in files)
    if num_json not in (0, len(files)):
        raise FormatError(
            f"{source}: {num_json} of {len(files)} files are JSON Lines, the others are not; convert one kind"
        )
    columns: Mapping[str, Column] | None = None
    if num_json:
        columns = {} if tokenizer is not None else scan_types(files).columns(null_fill)
        documents = "line"
    stats = [(name, os.stat(file)) for name, file in files]
    plain = all(file.suffix not in COMPRESSED_SUFFIXES for _, file in files)
    return Text(
        load=load_text(columns, text_field, tokenizer, end_of_text),
        fingerprint=fingerprint(stats, {"tokenizer": _identity(tokenizer)}),
        num_items=len(files) if documents == "file" else None,
        num_bytes=sum(stat.st_size for _, stat in stats) if plain else None,
        files=files,
        documents=documents,
    )


def load_text(
    columns: Mapping[str, Column] | None, text_field: str, tokenizer: str | None, end_of_text: int | str | None
) -> LoadText:
    """The work on each piece of text, its tokenizer tried once in this process.

    Raises:
        ConfigError: The tokenizer has no such end token, or there is no tokenizer to end documents with.
    """
    if tokenizer is None:
        if end_of_text is not None:
            raise ConfigError("end_of_text needs a tokenizer=; text that is kept as strings has its ends already")
        return LoadText(columns, text_field, None, None, "")
    loaded = load_tokenizer(tokenizer)
    end = end_token(loaded, end_of_text)
    dtype = np.dtype(token_dtype(max(loaded.vocab_size, 0 if end is None else end + 1))).name
    return LoadText(columns, text_field, tokenizer, end, dtype)


def read_lines(name: str, file: Path) -> Iterator[tuple[Piece, int]]:
    """Pieces of whole lines, with their sizes in bytes.

    Raises:
        CorruptFileError: A compressed file is damaged.
    """
    number, rest = 1, b""
    for data in _read(file):
        whole, newline, tail = (rest + data).rpartition(b"\n")
        rest = tail
        if newline:
            lines = whole.split(b"\n")
            yield Piece(name, number, [line.removesuffix(b"\r") for line in lines]), len(whole)
            number += len(lines)
    if rest:
        yield Piece(name, number, [rest.removesuffix(b"\r")]), len(rest)


def scan_types(files: list[tuple[str, Path]]) -> ColumnTypes:
    """The keys of all records, and what lies under them; lines that are no records are left to the conversion."""
    types = ColumnTypes()
    for name, file in files:
        for piece, _ in read_lines(name, file):
            for line in piece.documents:
                if line.strip():
                    try:
                        record = parse_record(line.decode("utf-8"))
                    except ValueError:
                        continue
                    types.add(record)
    return types


def parse_record(text: str) -> dict[str, Any]:
    """One JSON object.

    Raises:
        ValueError: It is something else.
    """
    record = json.loads(text)
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}, where a JSON object with named fields was expected")
    return record


def _refuse_nul(field: str, text: str) -> None:
    if "\0" in text:
        raise ValueError(
            f"field {field!r} contains a NUL character at position {text.index(chr(0))}, which HDF5 cannot store"
        )


def _read(file: Path) -> Iterator[bytes]:
    try:
        with pa.OSFile(str(file)) as raw:
            stream = raw
            if file.suffix in _NAME_OF_COMPRESSION:
                stream = pa.CompressedInputStream(raw, _NAME_OF_COMPRESSION[file.suffix])
            first = True
            while data := stream.read(_PIECE_BYTES):
                yield data.removeprefix(b"\xef\xbb\xbf") if first else data
                first = False
    except (pa.ArrowException, OSError) as error:
        raise CorruptFileError(f"{file}: {error}") from error


def _list_files(source: Path | list[Path]) -> list[tuple[str, Path]]:
    """Names for messages, and paths."""
    if isinstance(source, list):
        return [entry for path in source for entry in _list_files(path)]
    if source.is_dir():
        found = [
            (escape_name(name), source / name) for name in walk(source) if kind_suffix(Path(name)) in TEXT_SUFFIXES
        ]
        if not found:
            raise FormatError(f"{source}: no files of {', '.join(TEXT_SUFFIXES)} in it, compressed or not")
        return found
    return [(escape_name(source.name), source)]


def _identity(tokenizer: str | None) -> str | None:
    """The tokenizer by its content, so that a changed file is another source."""
    if tokenizer is None or not os.path.isfile(tokenizer):
        return tokenizer
    return Path(tokenizer).read_text(encoding="utf-8")
