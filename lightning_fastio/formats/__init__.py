"""The storage formats, and the two functions that open them.

Each format is a module with ``open_source(source, fields, ...) -> Reader`` and ``open_target(path, ...) -> Writer``,
whose keyword arguments are the options that it knows. It is imported when a file of that format is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, TypeAlias, cast

from lightning_fastio.arguments import check_whole
from lightning_fastio.errors import ConfigError
from lightning_fastio.formats.base import Fields, Reader, Writer
from lightning_fastio.formats.files import FORMATS, Format, Source, format_of_source
from lightning_fastio.formats.joined import SideBySide
from lightning_fastio.formats.selection import Selection, stored_names, unknown_field, wanted_fields

__all__ = ["open_reader", "open_writer"]

Sources: TypeAlias = Source | Mapping[str, Source]
"""A file, a folder, a glob, a list of these, or a mapping of field name to any of them."""


def open_reader(source: Sources, fields: Fields = None, *, format: str | None = None, **options: Any) -> Reader:
    """Open files for reading. Their format is told by what is in them.

    Example:
        >>> reader = open_reader({"x": "images.npy", "y": "labels.npy"})
        >>> reader.read([0, 5, -1])["x"].shape
        torch.Size([3, 28, 28])

    Args:
        source: A file, a folder, a glob, a list of files whose rows follow one another, or a mapping of field to any
            of these, whose fields lie side by side.
        fields: Fields to deliver, in this order; a mapping renames them, or stacks a list of numeric ones into one
            matrix. All that can be loaded by default.
        format: ``numpy``, ``hdf5`` or ``parquet``: read nothing else, and choose these files in a folder of several
            formats. By default whatever is there, of several formats the one with the most bytes.
        options: ``window`` and ``stride`` (NumPy, HDF5: windows along the first axis as rows), ``sparse`` (NumPy, HDF5:
            sparse matrices as sparse CSR batches), ``ragged`` ("auto", "list", "pad" or "error"), ``null_fill`` and
            ``filters`` (Parquet), ``cache_bytes`` (1 GiB), ``widen_unsigned`` (True) and ``locking`` (HDF5). An option
            that is None counts as not given.

    Raises:
        FileAccessError: A file is missing or may not be read.
        CorruptFileError: A file is incomplete or damaged.
        FormatError: A file, or a field that was named, cannot become a batch.
        SchemaError: Fields are unknown, or files do not fit together.
        ConfigError: The format does not know an option.
    """
    for option, least in (("window", 1), ("stride", 1), ("cache_bytes", 0)):
        if options.get(option) is not None:
            check_whole(option, options[option], least=least)
    if isinstance(source, Mapping):
        wanted = wanted_fields(fields)
        names = list(source) if wanted is None else stored_names(wanted)
        for name in names:
            if name not in source:
                raise unknown_field(name, source, "the mapping given as source")
        if not names:
            raise ConfigError("the source is an empty mapping; name at least one field")
        readers = {name: _open_field(source[name], name, format, options) for name in names}
        return Selection.of(SideBySide(readers), fields)
    found = format_of_source(source, format)
    return cast(Reader, _module(found).open_source(source, fields, **_known(options, found, "open_source")))


def open_writer(path: str | Path, **options: Any) -> Writer:
    """Open a file or a folder for writing; it appears under its name once it is whole.

    Example:
        >>> with open_writer("digits.h5") as writer:
        ...     writer.write({"image": np.zeros((100, 8, 8), np.uint8), "label": np.arange(100)})

    Args:
        path: ``.npy``, ``.npz``, ``.h5`` or ``.parquet``; a path without a suffix becomes a folder of .npy files.
        options: ``metadata`` (text by name), ``compression`` (as the format names it; None), ``rows_per_block`` or
            ``block_bytes`` (size of a chunk or row group).

    Raises:
        ConfigError: No format has that suffix, or the format does not know an option.
    """
    path = Path(path).expanduser()
    suffix = path.suffix.lower()
    found = next((each for each in FORMATS if suffix in each.suffixes), None)
    if found is None and not suffix:
        found = FORMATS[0]
    if found is None:
        suffixes = ", ".join(each.suffixes[0] for each in FORMATS)
        raise ConfigError(f"{path}: no format is written with the suffix {path.suffix}; use {suffixes}, or no suffix")
    return cast(Writer, _module(found).open_target(path, **_known(options, found, "open_target")))


def _open_field(source: Source, name: str, format: str | None, options: Mapping[str, Any]) -> Reader:
    """A reader with one field: the one of that name, or the only one that there is."""
    if isinstance(source, Mapping):
        raise ConfigError(f"{name!r} is a mapping inside a mapping; give a file, a folder, a glob or a list")
    found = format_of_source(source, format)
    module = _module(found)
    if hasattr(module, "open_field"):
        return cast(Reader, module.open_field(source, name, **_known(options, found, "open_source")))
    everything = open_reader(source, None, format=format, **options)
    names = list(everything.schema)
    everything.close()
    if name not in names and len(names) > 1:
        raise ConfigError(
            f"{source} has no field {name!r} but {', '.join(names)}; open it by itself and rename with "
            f"fields={{{name!r}: {names[0]!r}}}"
        )
    return open_reader(source, {name: name if name in names else names[0]}, format=format, **options)


def _module(found: Format) -> Any:
    return import_module(f"{__name__}.{found.name}")


def _known(options: Mapping[str, Any], found: Format, function: str) -> dict[str, Any]:
    """The options that were given and that the format knows.

    Raises:
        ConfigError: It does not know one, and the value would change something.
    """
    known = _keywords(found, function)
    given = {name: value for name, value in options.items() if value is not None}
    for name in sorted(set(given) - set(known)):
        defaults = {each: theirs[name] for each in FORMATS if name in (theirs := _keywords(each, function))}
        if not defaults:
            raise ConfigError(f"there is no option {name!r}; {found.title} knows {', '.join(known)}")
        if given[name] not in defaults.values():
            titles = " and ".join(each.title for each in defaults)
            raise ConfigError(f"{name}={given[name]!r} is an option of {titles}, but this is {found.title}")
        del given[name]
    return given


def _keywords(found: Format, function: str) -> dict[str, Any]:
    """The options of a format and their defaults."""
    parameters = signature(getattr(_module(found), function)).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is Parameter.KEYWORD_ONLY}
