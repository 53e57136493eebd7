"""Finding input files: which ones, in which order, in which split and of which class."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from lightning_fastio.convert.manifest import escape_name
from lightning_fastio.errors import ConfigError, CorruptFileError, FileAccessError
from lightning_fastio.formats.files import natural_order

logger = logging.getLogger("lightning_fastio")

IMAGE_SUFFIXES = frozenset(
    (
        *(".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp"),
        *(".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".jp2", ".avif", ".ico"),
    )
)
JSON_SUFFIXES = (".jsonl", ".ndjson")
TEXT_SUFFIXES = (".txt", ".text", ".md", *JSON_SUFFIXES)
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".zst", ".lz4")
SPLITS = ("train", "training", "val", "valid", "validation", "dev", "test", "testing")


def walk(root: Path) -> Iterator[str]:
    """Files below a folder, relative to it, in natural order; hidden files and folders are left out.

    Raises:
        FileAccessError: A folder cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise FileAccessError(f"{error.filename}: {error.strerror}") from error

    found: list[str] = []
    for folder, subfolders, files in os.walk(root, onerror=refuse, followlinks=True):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        inside = os.path.relpath(folder, root)
        above = "" if inside == "." else f"{inside}/"
        found.extend(above + name for name in files if not name.startswith("."))
    yield from sorted(found, key=natural_order)


def kind_suffix(file: Path) -> str:
    """The suffix in lower case, below one of compression."""
    name = file.name.lower()
    for suffix in COMPRESSED_SUFFIXES:
        name = name.removesuffix(suffix)
    return os.path.splitext(name)[1]


def is_dataset_folder(path: Path) -> bool:
    """Whether a folder was written by ``save_to_disk`` of Hugging Face datasets."""
    return (path / "state.json").is_file()


def dataset_files(folder: Path) -> list[Path]:
    """The Arrow files of such a folder, in order.

    Raises:
        CorruptFileError: Its ``state.json`` does not name them.
    """
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return [folder / entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(f"{folder / 'state.json'}: names no data files: {error}") from error


def list_images(root: Path) -> list[str]:
    """Picture files below a folder, relative to it, in natural order. Says how many other files it passes over."""
    others: Counter[str] = Counter()
    images: list[str] = []
    for name in walk(root):
        suffix = os.path.splitext(name)[1].lower()
        if suffix in IMAGE_SUFFIXES:
            images.append(name)
        else:
            others[suffix or "no suffix"] += 1
    if others:
        kinds = ", ".join(f"{count} {suffix}" for suffix, count in sorted(others.items()))
        logger.info("%s: passed over files that are not pictures: %s", root, kinds)
    return images


def find_splits(root: Path) -> list[str]:
    """Names of the splits when a folder is divided into train, val, test; empty otherwise."""
    folders = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    splits = [name for name in SPLITS if name in folders]
    return splits if splits and len(splits) == len(folders) else []


def class_of(name: str) -> str | None:
    """The class of a picture in the layout of one folder per class; None for one that lies in no folder."""
    folder, _, rest = name.partition("/")
    return folder if rest else None


def pair_by_stem(images: list[str], masks: list[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """Pair names that differ only in their suffix.

    Returns:
        Image to mask; images without a mask; masks without an image.

    Raises:
        ConfigError: Two files of one side have the same stem, so that the pairing is not decided.
    """
    by_stem = {side: _by_stem(names, side) for side, names in (("image", images), ("mask", masks))}
    image_of, mask_of = by_stem["image"], by_stem["mask"]
    pairs = {name: mask_of[stem] for stem, name in image_of.items() if stem in mask_of}
    alone = [name for stem, name in image_of.items() if stem not in mask_of]
    unused = [name for stem, name in mask_of.items() if stem not in image_of]
    return pairs, alone, unused


def _by_stem(names: list[str], side: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        stem = os.path.splitext(name)[0]
        if stem in found:
            raise ConfigError(
                f"{escape_name(found[stem])} and {escape_name(name)} have the same stem, so that it is open which "
                f"{side} belongs to the pair: keep one of them"
            )
        found[stem] = name
    return found
