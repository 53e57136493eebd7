"""What is the source? Looks at it and opens it as images, text, a table, or a user's items."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from lightning_fastio.convert.files import (
    IMAGE_SUFFIXES,
    TEXT_SUFFIXES,
    dataset_files,
    is_dataset_folder,
    kind_suffix,
    walk,
)
from lightning_fastio.convert.manifest import Manifest
from lightning_fastio.convert.options import IMAGE_OPTIONS, TABLE_OPTIONS, TEXT_OPTIONS, Kind, SourceOptions
from lightning_fastio.convert.source import Source
from lightning_fastio.errors import ConfigError, FastIOError, FileAccessError
from lightning_fastio.formats.files import natural_order

_NUM_LOOKED_AT = 1000
_PACKED_SUFFIXES = (".tar", ".parquet")


def open_source(source: Any, options: SourceOptions, workspace: Path) -> Source:
    """Open what is to be converted.

    Args:
        source: As given to ``convert``.
        options: What decides the rows.
        workspace: Folder for copies, should some be needed; it exists only while they do.

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
    kind = kind_of(source) if options.kind == "auto" else options.kind
    if kind == "images":
        options.refuse("images", *TEXT_OPTIONS, *TABLE_OPTIONS)
        return _open_images(source, options)
    options.refuse("text" if kind == "text" else "a table", *IMAGE_OPTIONS)
    if kind == "text":
        options.refuse("text", "fields", "dtypes", "shuffle_seed")
        return _open_text(source, options)
    return _open_table(source, options, workspace)


def _resolve(source: Any) -> Any:
    """Patterns become lists of paths; paths that do not exist are refused."""
    if isinstance(source, Mapping):
        return source
    if isinstance(source, (str, Path)):
        if os.path.exists(source):
            if os.path.isfile(os.path.join(source, "dataset_dict.json")):
                raise ConfigError(f"{source} holds several data sets: convert each of its folders by itself")
            return Path(source)
        found = glob.glob(str(source), recursive=True) if glob.has_magic(str(source)) else []
        if not found:
            raise FileAccessError(f"{source}: no such file or folder")
        return [Path(name) for name in sorted(found, key=natural_order)]
    if isinstance(source, Iterable):
        return [_resolve(entry) for entry in source]
    raise ConfigError(f"source is a {type(source).__name__}: expected a path, a list, a mapping, or items with fn=")


def kind_of(source: Any) -> Kind:
    """What a source is, by its files."""
    first = source[0] if isinstance(source, list) and source else source
    if not isinstance(first, Path):
        return "table"
    if not first.is_dir() or is_dataset_folder(first):
        return _kind_of_file(first)
    names = (os.path.join(folder, name) for folder, _, names in os.walk(first) for name in names)
    kinds = {_kind_of_file(Path(name)) for name in islice(names, _NUM_LOOKED_AT)}
    # Pictures often have text beside them, such as a table of labels or a licence.
    return next((kind for kind in ("images", "text") if kind in kinds), "table")


def _kind_of_file(file: Path) -> Kind:
    suffix = kind_suffix(file)
    if suffix in IMAGE_SUFFIXES or suffix == ".tar":
        return "images"
    if suffix in TEXT_SUFFIXES:
        return "text"
    if suffix == ".parquet" or is_dataset_folder(file):
        from lightning_fastio.convert.encoded import has_encoded_images

        return "images" if has_encoded_images(file) else "table"
    return "table"


def _open_images(source: Any, options: SourceOptions) -> Source:
    from lightning_fastio.convert.encoded import open_encoded
    from lightning_fastio.convert.images import open_image_folder
    from lightning_fastio.convert.pixels import ImageRules
    from lightning_fastio.convert.tars import open_tars

    rules = ImageRules(options.size, options.resize, options.channels, options.background, options.max_pixels)
    how: dict[str, Any] = {
        "classes": read_classes(options.classes),
        "encoded": options.encoded,
        "ragged": options.ragged or (options.size is not None and options.resize == "fit"),
        "with_path": options.paths,
    }
    files = list_packed(source)
    if not files:
        if not isinstance(source, Path):
            raise ConfigError(f"{source}: give the folder that holds the pictures")
        labels, masks = (None if path is None else Path(path) for path in (options.labels, options.masks))
        return open_image_folder(source, rules, labels=labels, masks=masks, shuffle_seed=options.shuffle_seed, **how)
    options.refuse("packed images", "labels", "masks")
    if files[0].suffix == ".tar":
        return open_tars(files, rules, shuffle_seed=options.shuffle_seed, **how)
    options.refuse("images in a table, which are read from front to back", "shuffle_seed")
    return open_encoded(files, rules, **how)


def list_packed(source: Any) -> list[Path]:
    """The tar, Parquet or Arrow files that hold pictures; empty for a folder of pictures."""
    if isinstance(source, list):
        return [file for entry in source for file in list_packed(entry)]
    if is_dataset_folder(source):
        return dataset_files(source)
    if source.is_dir():
        return [source / name for name in walk(source) if Path(name).suffix in _PACKED_SUFFIXES]
    return [source] if source.suffix in (*_PACKED_SUFFIXES, ".arrow") else []


def _open_text(source: Any, options: SourceOptions) -> Source:
    from lightning_fastio.convert.text import open_text

    return open_text(
        source,
        tokenizer=options.tokenizer,
        text_field=options.text_field,
        documents=options.documents,
        end_of_text=options.end_of_text,
        null_fill=options.null_fill,
    )


def _open_table(source: Any, options: SourceOptions, workspace: Path) -> Source:
    from lightning_fastio.convert.tables import open_table
    from lightning_fastio.convert.text import TokenizeColumn, load_text

    options.refuse("a table", "documents")
    table = open_table(
        source,
        fields=options.fields if options.tokenizer is None else [options.text_field],
        dtypes=options.dtypes,
        null_fill=options.null_fill,
        shuffle_seed=options.shuffle_seed,
        workspace=workspace,
    )
    if options.tokenizer is not None or options.end_of_text is not None:
        text = load_text(None, options.text_field, options.tokenizer, options.end_of_text)
        table.load, table.engine = TokenizeColumn(table.load, text), "process"
    return table


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
