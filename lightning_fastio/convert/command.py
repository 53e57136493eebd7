"""``fastio convert``: the arguments of `convert` on the command line."""

from __future__ import annotations

import inspect
import re
import sys
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from lightning_fastio.convert import convert
from lightning_fastio.convert.manifest import Manifest, manifest_path
from lightning_fastio.errors import FastIOError
from lightning_fastio.quantities import counted, num_bytes

_MAX_LISTED = 20
_INTERRUPTED = 130


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of ``fastio convert``; the help is that of `convert`."""
    documented = argument_docs(convert)
    parser.add_argument("source", nargs="+", help="folder, files, or a pattern in quotes")
    parser.add_argument("destination", help=documented["destination"])
    flag: dict[str, Any] = {"action": BooleanOptionalAction}
    arguments: dict[str, dict[str, Any]] = {
        "format": {"choices": ("numpy", "hdf5", "parquet")},
        "kind": {"choices": ("auto", "images", "text", "table")},
        "size": {"nargs": 2, "type": int, "metavar": ("HEIGHT", "WIDTH")},
        "resize": {"choices": ("crop", "fit", "pad", "stretch")},
        "channels": {"choices": ("RGB", "L", "keep")},
        "background": {"nargs": 3, "type": int, "metavar": ("R", "G", "B")},
        "encoded": flag,
        "ragged": flag,
        "labels": {"metavar": "FILE"},
        "masks": {"metavar": "FOLDER"},
        "classes": {"metavar": "PATH"},
        "paths": flag,
        "max_pixels": {"type": int},
        "tokenizer": {},
        "text_field": {"metavar": "NAME"},
        "documents": {"choices": ("line", "file")},
        "end_of_text": {"type": number_or_text, "metavar": "TOKEN"},
        "fields": {"nargs": "+", "metavar": "NAME"},
        "dtypes": {"nargs": "+", "type": pair, "metavar": "FIELD=DTYPE"},
        "null_fill": {"nargs": "+", "type": pair, "metavar": "FIELD=VALUE"},
        "shuffle_seed": {"type": int},
        "shard_bytes": {"type": num_bytes, "metavar": "SIZE"},
        "compression": {"type": lambda text: None if text == "none" else text, "metavar": "NAME"},
        "statistics": flag,
        "on_error": {"choices": ("stop", "skip")},
        "max_skipped": {"type": int},
        "num_workers": {"type": int},
        "memory_bytes": {"type": num_bytes, "metavar": "SIZE"},
        "engine": {"choices": ("auto", "process", "thread", "ray")},
        "resume": flag,
        "overwrite": flag,
        "dry_run": flag,
        "progress": flag,
    }
    for name, options in arguments.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, default=SUPPRESS, help=documented[name].replace("%", "%%"), **options)


def main(arguments: Namespace) -> int:
    """Convert, and say what was written."""
    given = {name: value for name, value in vars(arguments).items() if name != "command"}
    sources, destination = given.pop("source"), given.pop("destination")
    given |= {name: dict(given[name]) for name in ("dtypes", "null_fill") if name in given}
    if "size" in given:
        given["size"] = tuple(given["size"])
    if "background" in given:
        given["background"] = tuple(given["background"])
    try:
        manifest = convert(sources[0] if len(sources) == 1 else sources, destination, **given)
    except KeyboardInterrupt:
        print("fastio convert: stopped; the same command with --resume goes on", file=sys.stderr)
        return _INTERRUPTED
    except FastIOError as error:
        raise type(error)(with_options(str(error))) from error
    if manifest.shards:
        print(summary(manifest, Path(destination)))
    return 0


def summary(manifest: Manifest, destination: Path) -> str:
    """What was written, in a few lines."""
    on_disk = decimal(sum(shard.num_bytes for shard in manifest.shards))
    rows_in_files = f"{counted(manifest.num_rows, 'row')} in {counted(len(manifest.shards), 'file')}"
    lines = [f"{destination}: {rows_in_files}, {on_disk}"]
    lines += [f"  {split}: {counted(rows, 'row')}" for split, rows in manifest.splits.items() if split]
    lines += [f"  {name}: {text}" for name, text in manifest.fields.items()]
    if manifest.classes:
        lines.append(f"  classes: {len(manifest.classes):,}")
    lines.append(f"  compression: {manifest.compression}")
    if manifest.skipped:
        lines.append(f"  skipped: {len(manifest.skipped):,}, listed in {manifest_path(destination)}")
        lines += [f"    {entry.item}: {entry.reason}" for entry in manifest.skipped[:_MAX_LISTED]]
    return "\n".join(lines)


def with_options(message: str) -> str:
    """A message of `convert` in which each argument, such as ``format='numpy'``, is followed by its option."""
    names = "|".join(inspect.signature(convert).parameters)

    def with_option(found: re.Match[str]) -> str:
        is_option = found[1] != "fn" and not found[3]
        return f"{found[0]} (--{found[1].replace('_', '-')})" if is_option else found[0]

    # Not in a path, such as size=3/a.png, nor where the option stands already.
    return re.sub(rf"(?<![\w/])({names})=('[^']*'|\([^)]*\)|\w*)(/| \(--)?", with_option, message)


def argument_docs(function: Any) -> dict[str, str]:
    """The description of each argument out of a docstring in Google style."""
    _, _, section = (inspect.getdoc(function) or "").partition("Args:\n")
    section = section.partition("\n\nReturns:")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()).replace("``", "") for name, text in entries}


def number_or_text(text: str) -> int | float | str:
    """A number where the text is one."""
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        return float(text)
    return text


def pair(text: str) -> tuple[str, Any]:
    """``field=value``."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ArgumentTypeError(f"{text!r} is not FIELD=VALUE")
    return name, number_or_text(value)
