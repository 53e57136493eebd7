"""A user's own items: a function gives the fields of one row for each."""

from __future__ import annotations

import hashlib
import pickle
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from lightning_fastio.convert.source import Loaded, RowBatch, Skipped, Source, Task
from lightning_fastio.errors import ConfigError

ItemFunction: TypeAlias = Callable[[Any], Mapping[str, Any] | None]

_TASK_ITEMS = 64
_MAX_ITEM_TEXT = 200


@dataclass(frozen=True)
class CallOnItems:
    """Calls the user's function on each item of a task."""

    fn: ItemFunction

    def __call__(self, items: list[Any]) -> Loaded:
        rows: list[tuple[str, Mapping[str, Any]]] = []
        skipped: list[Skipped] = []
        for item in items:
            name = _text_of(item)
            try:
                row = self.fn(item)
            except Exception as error:
                # A user's function fails in any way it likes; the policy decides what that means.
                place = traceback.extract_tb(error.__traceback__)[-1]
                skipped.append(
                    Skipped(name, f"fn raised {type(error).__name__}: {error} ({place.filename}:{place.lineno})")
                )
                continue
            if row is not None:
                rows.append((name, row))
        return Loaded(collate(rows), skipped)


@dataclass(kw_only=True)
class Items(Source):
    """Items of the user; see `open_items`."""

    items: Iterable[Any]

    def tasks(self) -> Iterator[Task]:
        """Runs of items."""
        iterator = iter(self.items)
        while items := list(islice(iterator, _TASK_ITEMS)):
            yield Task(items, len(items))


def open_items(items: Any, fn: ItemFunction, *, shuffle_seed: int | None = None) -> Items:
    """Convert items by a function.

    Args:
        items: Any iterable; with a length, progress has a total.
        fn: Gives the fields of one row, or None to leave the item out. An array, tensor or number is a field of
            fixed shape; a list of numbers may differ in length from row to row; str and bytes stay what they are.
        shuffle_seed: Mix the items, by this seed; they are listed for it.

    Raises:
        ConfigError: ``items`` is no iterable of items.
    """
    if not isinstance(items, Iterable) or isinstance(items, (str, bytes, Mapping)):
        raise ConfigError(f"with fn=, source is an iterable of items, such as a list of paths; this is {items!r:.100}")
    if shuffle_seed is not None:
        listed = list(items)
        order = np.random.Generator(np.random.PCG64(shuffle_seed)).permutation(len(listed))
        items = [listed[index] for index in order]
    return Items(
        load=CallOnItems(fn),
        fingerprint=_fingerprint(items),
        num_items=len(items) if isinstance(items, Sequence) else None,
        engine="process" if _is_importable(fn) else "thread",
        items=items,
    )


def collate(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> RowBatch:
    """Rows as one batch.

    Args:
        rows: For each row, the name of its item and its fields.

    Raises:
        ConfigError: Rows differ in their fields, or in dtype or shape of one; the message names the items.
    """
    if not rows:
        return {}
    first_name, first = rows[0]
    for name, row in rows:
        if list(row) != list(first):
            raise ConfigError(f"fn gave the fields {list(first)} for {first_name}, but {list(row)} for {name}")
    return {key: _column(key, [(name, row[key]) for name, row in rows]) for key in first}


def _column(key: str, values: list[tuple[str, Any]]) -> Any:
    first_name, first = values[0]
    if isinstance(first, (str, bytes)):
        for name, value in values:
            if type(value) is not type(first):
                raise ConfigError(
                    f"field {key!r} is {type(first).__name__} for {first_name}, but {type(value).__name__} for {name}"
                )
        return [value for _, value in values]
    arrays = [np.asarray(value) for _, value in values]
    if isinstance(first, list):
        # An empty list says nothing about the dtype of the others.
        dtype = next((array.dtype for array in arrays if array.size), np.dtype(np.int64))
        return [
            array.astype(dtype, casting="same_kind", copy=False) if array.size else array.astype(dtype)
            for array in arrays
        ]
    for (name, _), array in zip(values, arrays, strict=True):
        if array.shape != arrays[0].shape or array.dtype != arrays[0].dtype:
            raise ConfigError(
                f"field {key!r} is {arrays[0].dtype} {arrays[0].shape} for {first_name}, but {array.dtype} "
                f"{array.shape} for {name}; return a list where the length may differ"
            )
    return np.stack(arrays)


def _is_importable(fn: ItemFunction) -> bool:
    """Whether worker processes can import the function; those of an interactive session cannot."""
    return getattr(fn, "__module__", None) != "__main__" or hasattr(sys.modules["__main__"], "__file__")


def _fingerprint(items: Iterable[Any]) -> str:
    """Of the items themselves where they are listed; a stream can only be identified by its type."""
    digest = hashlib.sha256(type(items).__name__.encode())
    if isinstance(items, Sequence):
        for item in items:
            digest.update(pickle.dumps(item))
    return digest.hexdigest()[:32]


def _text_of(item: Any) -> str:
    text = str(item) if isinstance(item, str) or hasattr(item, "__fspath__") else repr(item)
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= _MAX_ITEM_TEXT else f"{text[:_MAX_ITEM_TEXT]}..."
