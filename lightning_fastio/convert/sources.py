"""What is the source? Looks at it and opens it as images, text, a table, or a user's items."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as fields_of
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from lightning_fastio.convert.files import IMAGE_SUFFIXES, walk
from lightning_fastio.convert.manifest import Manifest
from lightning_fastio.convert.source import Source
from lightning_fastio.errors import ConfigError, FastIOError, FileAccessError

Kind = Literal["auto", "images", "text", "table"]

TEXT_SUFFIXES = frozenset((".txt", ".text", ".md", ".jsonl", ".ndjson"))
_COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")
_NUM_LOOKED_AT = 1000


@dataclass(frozen=True)
class SourceOptions:
    """What decides the rows; described at `lightning_fastio.convert.convert`."""

    kind: Kind = "auto"
    fn: Callable[[Any], Mapping[str, Any] | None] | None = None
    fields: Sequence[str] | Mapping[str, str | Sequence[str]] | None = None
    dtypes: Mapping[str, str] | None = None
    null_fill: float | str | Mapping[str, float | str] | None = None
    size: tuple[int, int] | None = None
    resize: Literal["crop", "fit", "pad", "stretch"] = "crop"
    channels: Literal["RGB", "L", "keep"] = "RGB"
    background: tuple[int, int, int] = (255, 255, 255)
    encoded: bool = False
    ragged: bool = False
    labels: str | Path | None = None
    masks: str | Path | None = None
    classes: Sequence[str] | str | Path | None = None
    paths: bool = True
    max_pixels: int = 178_956_970
    tokenizer: str | None = None
    text_field: str = "text"
    documents: Literal["line", "file"] = "line"
    end_of_text: int | str | None = None
    shuffle_seed: int | None = None

    def changed(self) -> dict[str, Any]:
        """The options that are not at their default, as the manifest lists them."""
        values = {option.name: getattr(self, option.name) for option in fields_of(self)}
        changed = {
            option.name: values[option.name] for option in fields_of(self) if values[option.name] != option.default
        }
        if self.fn is not None:
            changed["fn"] = f"{self.fn.__module__}.{getattr(self.fn, '__qualname__', type(self.fn).__qualname__)}"
        return changed

    def refuse(self, kind: str, *names: str) -> None:
        """Raise for options that mean nothing to a source of this kind."""
        given = [name for name in names if name in self.changed()]
        if given:
            raise ConfigError(
                f"{', '.join(given)}: means nothing for {kind}; leave it out, or say what the source is by kind="
            )


IMAGE_OPTIONS = (
    "size", "resize", "channels", "background", "encoded", "ragged",
    "labels", "masks", "classes", "paths", "max_pixels",
)  # fmt: skip
TEXT_OPTIONS = ("tokenizer", "documents", "end_of_text")
TABLE_OPTIONS = ("fields", "dtypes", "null_fill")


def open_source(source: Any, options: SourceOptions) -> Source:
    """Open what is to be converted.

    Raises:
        FileAccessError: There is nothing at the path.
        ConfigError: Options do not fit the source.
        FormatError: It holds nothing that can be converted.
    """
    if options.fn is not None:
        from lightning_fastio.convert.items import open_items

        options.refuse("items of your own", *IMAGE_OPTIONS, *TEXT_OPTIONS, *TABLE_OPTIONS)
        return open_items(source, options.fn, shuffle_seed=options.shuffle_seed)
    source = _resolve(source)
    kind = _kind_of(source) if options.kind == "auto" else options.kind
    if options.tokenizer is not None and options.kind == "auto" and kind == "table":
        kind = "text"
    if kind == "images":
        options.refuse("images", *TEXT_OPTIONS, *TABLE_OPTIONS)
        return _open_images(source, options)
    options.refuse("a table" if kind == "table" else "text", *IMAGE_OPTIONS)
    if kind == "text":
        from lightning_fastio.convert.text import open_text

        return open_text(source, options)
    options.refuse("a table", *TEXT_OPTIONS)
    from lightning_fastio.convert.tables import open_table

    return open_table(source, options)


def _resolve(source: Any) -> Any:
    """Patterns become lists of paths; paths that do not exist are refused."""
    if isinstance(source, Mapping):
        return source
    if isinstance(source, (str, Path)):
        if not os.path.exists(source):
            found = sorted(glob.glob(str(source), recursive=True)) if glob.has_magic(str(source)) else []
            if not found:
                raise FileAccessError(f"{source}: no such file or folder")
            return [Path(name) for name in found]
        return Path(source)
    if isinstance(source, Iterable):
        return [_resolve(entry) for entry in source]
    raise ConfigError(f"source is a {type(source).__name__}: expected a path, a list, a mapping, or items with fn=")


def _kind_of(source: Any) -> Kind:
    first = source[0] if isinstance(source, list) and source else source
    if not isinstance(first, Path):
        return "table"
    if first.is_dir():
        if (first / "state.json").is_file() or (first / "dataset_dict.json").is_file():
            return "table"
        for name in islice(walk(first), _NUM_LOOKED_AT):
            kind = _kind_of_file(first / name)
            if kind != "table":
                return kind
        return "table"
    return _kind_of_file(first)


def _kind_of_file(file: Path) -> Kind:
    name = file.name.lower()
    for suffix in _COMPRESSED:
        name = name.removesuffix(suffix)
    suffix = os.path.splitext(name)[1]
    if suffix in IMAGE_SUFFIXES or suffix == ".tar":
        return "images"
    if suffix in TEXT_SUFFIXES:
        return "text"
    if suffix == ".parquet":
        from lightning_fastio.convert.encoded import has_encoded_images

        return "images" if has_encoded_images(file) else "table"
    return "table"


def _open_images(source: Any, options: SourceOptions) -> Source:
    from lightning_fastio.convert.images import open_image_folder
    from lightning_fastio.convert.pixels import ImageRules

    rules = ImageRules(options.size, options.resize, options.channels, options.background, options.max_pixels)
    if isinstance(source, Path) and source.is_dir():
        return open_image_folder(
            source,
            rules,
            labels=None if options.labels is None else Path(options.labels),
            masks=None if options.masks is None else Path(options.masks),
            classes=read_classes(options.classes),
            encoded=options.encoded,
            ragged=options.ragged,
            with_path=options.paths,
            shuffle_seed=options.shuffle_seed,
        )
    raise ConfigError(f"{source}: images come from a folder")


def read_classes(classes: Sequence[str] | str | Path | None) -> list[str] | None:
    """Class names as given, or out of converted data, its manifest, or a JSON list.

    Raises:
        ConfigError: There are none at the path.
    """
    if classes is None or not isinstance(classes, (str, Path)):
        return None if classes is None else list(classes)
    path = Path(classes)
    try:
        if path.suffix == ".json" and isinstance(names := json.loads(path.read_text(encoding="utf-8")), list):
            return [str(name) for name in names]
        found = Manifest.load(path).classes
    except (OSError, ValueError, FastIOError) as error:
        raise ConfigError(f"classes={str(classes)!r}: no class names there: {error}") from error
    if not found:
        raise ConfigError(f"classes={str(classes)!r}: this data has no class mapping")
    return found
