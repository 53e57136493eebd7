"""Sources of pictures in folders: a folder per class, a flat folder with a table of labels, images with masks."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_fastio.convert.files import class_of, find_splits, list_images, pair_by_stem
from lightning_fastio.convert.labels import read_labels, typed_column
from lightning_fastio.convert.manifest import escape_name, fingerprint
from lightning_fastio.convert.pictures import FilePictures, LoadPictures, Pictures
from lightning_fastio.convert.pixels import ImageRules, header_size
from lightning_fastio.convert.source import TASK_BYTES, Skipped, Source, Task
from lightning_fastio.errors import ConfigError, CorruptFileError, FormatError

logger = logging.getLogger("lightning_fastio")

_MAX_TASK_PICTURES = 128
_NUM_SIZES_CHECKED = 256
# As in the image folders of the Hugging Face hub.
_LABEL_FILES = ("metadata.csv", "metadata.jsonl")


@dataclass
class Split:
    """The pictures of one split."""

    name: str
    """Its folder below the source; empty without splits."""
    names: list[str]
    """Path of each picture relative to the folder of the split."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Other fields, one entry a picture."""
    masks: list[str] | None = None
    """Path of each mask."""

    def reordered(self, order: Sequence[int]) -> Split:
        """The same pictures in another order, or fewer of them."""
        return Split(
            self.name,
            [self.names[index] for index in order],
            {name: _take(values, order) for name, values in self.columns.items()},
            None if self.masks is None else [self.masks[index] for index in order],
        )


@dataclass(kw_only=True)
class ImageFolder(Source):
    """Picture files; see `open_image_folder`."""

    root: Path
    splits: list[Split]
    task_pictures: int
    """Pictures in a task."""

    def tasks(self) -> Iterator[Task]:
        """Runs of pictures of one split."""
        for split in self.splits:
            folder = str(self.root / split.name)
            for start in range(0, len(split.names), self.task_pictures):
                span = slice(start, start + self.task_pictures)
                pictures = FilePictures(
                    split.names[span],
                    folder,
                    None if split.masks is None else split.masks[span],
                    columns={name: values[span] for name, values in split.columns.items()},
                )
                yield Task(pictures, len(pictures.names), split=split.name)


def open_image_folder(
    root: Path,
    rules: ImageRules,
    *,
    labels: Path | None = None,
    masks: Path | None = None,
    classes: Sequence[str] | None = None,
    encoded: bool = False,
    ragged: bool = False,
    with_path: bool = True,
    shuffle_seed: int | None = None,
) -> ImageFolder:
    """List the pictures of a folder.

    Args:
        root: Folder of pictures, of one folder per class, or of ``train``, ``val`` and ``test`` folders of these.
        rules: How pictures become arrays.
        labels: CSV or JSON Lines with the path of a picture and its labels in each row.
        masks: Folder of masks whose paths equal those of the images but for the suffix.
        classes: Class names of an earlier conversion, to give other data the same label numbers.
        encoded: Keep the encoded bytes.
        ragged: Store pictures of any size.
        with_path: Give rows a field ``path``.
        shuffle_seed: Mix the pictures of a split once, by this seed.

    Raises:
        ConfigError: Options contradict each other or the folder, or classes are unknown.
        FormatError: There is no picture.
    """
    skipped: list[Skipped] = []
    splits = [_list_split(root, name, labels, masks, skipped) for name in find_splits(root) or [""]]
    if not any(split.names for split in splits):
        raise FormatError(f"{root}: no pictures found (hidden files are passed over)")
    names = _map_classes(splits, classes, root)
    if shuffle_seed is not None:
        generator = np.random.Generator(np.random.PCG64(shuffle_seed))
        splits = [split.reordered(generator.permutation(len(split.names)).tolist()) for split in splits]
    everything = FilePictures([os.path.join(split.name, name) for split in splits for name in split.names], str(root))
    files = ((name, os.stat(root / name)) for name in everything.names)
    masks_of = ((name, os.stat(name)) for split in splits for name in split.masks or ())
    return ImageFolder(
        root=root,
        splits=splits,
        load=LoadPictures(rules, encoded=encoded, ragged=ragged, with_path=with_path),
        metadata=class_metadata(names),
        fingerprint=fingerprint(chain(files, masks_of), asdict(rules)),
        skipped=skipped,
        task_pictures=task_pictures(everything, rules, encoded=encoded, ragged=ragged),
        num_items=sum(len(split.names) for split in splits),
        split_names=tuple(split.name for split in splits if split.name),
    )


def _list_split(root: Path, name: str, labels: Path | None, masks: Path | None, skipped: list[Skipped]) -> Split:
    folder = root / name
    split = Split(name, list_images(folder))
    if masks is not None:
        split = _with_masks(split, masks / name if (masks / name).is_dir() else masks, skipped)
    if labels is None:
        labels = next((file for table in _LABEL_FILES if (file := folder / table).is_file()), None)
    if labels is not None:
        return _with_labels(split, labels, skipped)
    if masks is None:
        found = [class_of(name) for name in split.names]
        if None not in found:
            split.columns["label"] = found
        elif any(found):
            loose = next(name for name, label in zip(split.names, found, strict=True) if label is None)
            logger.warning(
                "%s: some pictures lie in sub-folders and some do not (%s): no labels are made of the folders",
                folder,
                escape_name(loose),
            )
    return split


def _with_masks(split: Split, folder: Path, skipped: list[Skipped]) -> Split:
    pairs, alone, unused = pair_by_stem(split.names, list_images(folder))
    skipped += [Skipped(escape_name(name), f"no mask of this name in {folder}") for name in alone]
    skipped += [Skipped(escape_name(str(folder / name)), "a mask without an image") for name in unused]
    paired = [index for index, name in enumerate(split.names) if name in pairs]
    split = split.reordered(paired)
    split.masks = [str(folder / pairs[name]) for name in split.names]
    return split


def _with_labels(split: Split, file: Path, skipped: list[Skipped]) -> Split:
    table = read_labels(file)
    rows: list[int] = []
    kept: list[int] = []
    for index, name in enumerate(split.names):
        row = table.row_of(name)
        if row is None:
            skipped.append(Skipped(escape_name(name), f"no row in {file}"))
        else:
            rows.append(row)
            kept.append(index)
    unused = set(range(len(table.paths))) - set(rows)
    skipped += [Skipped(table.paths[row], f"named in {file}, but there is no such picture") for row in sorted(unused)]
    split = split.reordered(kept)
    for name, values in table.columns.items():
        split.columns[name] = typed_column([values[row] for row in rows], f"{file}, column {name}")
    return split


def _map_classes(splits: list[Split], given: Sequence[str] | None, root: Path) -> list[str]:
    """Replace class names by their numbers, the same ones in all splits, and return the names in order."""
    labels = [split.columns.get("label") for split in splits]
    named = [column for column in labels if isinstance(column, list)]
    if not named:
        return list(given or ())
    found = sorted({name for column in named for name in column})
    names = list(given) if given is not None else found
    unknown = [name for name in found if name not in set(names)]
    if unknown:
        raise ConfigError(
            f"{root}: classes {unknown[:5]} are not in the mapping of {len(names)} classes that was given "
            f"({names[:5]}...): rename them, or convert without classes="
        )
    number = {name: index for index, name in enumerate(names)}
    for split in splits:
        if isinstance(split.columns.get("label"), list):
            split.columns["label"] = np.array([number[name] for name in split.columns["label"]], np.int64)
    return [escape_name(name) for name in names]


def task_pictures(sample: Pictures, rules: ImageRules, *, encoded: bool, ragged: bool) -> int:
    """Number of pictures in a task; checks early that pictures which must have one size do.

    Args:
        sample: Pictures of the source, of which some headers are read.
        rules: How pictures become arrays.
        encoded: Whether the encoded bytes are kept.
        ragged: Whether each keeps its size.

    Raises:
        ConfigError: Pictures differ in size and no option says what to do about it.
    """
    if rules.same_size and not encoded and rules.size is not None:
        height, width = rules.size
    else:
        step = -(-len(sample.names) // _NUM_SIZES_CHECKED)
        sizes: dict[tuple[int, int], str] = {}
        for index in range(0, len(sample.names), step):
            with suppress(CorruptFileError, OSError):
                sizes.setdefault(header_size(sample.read(index), rules.max_pixels), sample.names[index])
        if len(sizes) > 1 and not encoded and not ragged:
            (one, first), (two, second) = list(sizes.items())[:2]
            raise ConfigError(
                f"pictures differ in size: {escape_name(first)} is {one}, {escape_name(second)} is {two} as (height, "
                f"width). Give size=(height, width) to bring all to one size, or ragged=True to keep each as it is"
            )
        height, width = max(sizes, key=prod, default=(512, 512))
    return max(1, min(_MAX_TASK_PICTURES, TASK_BYTES // (height * width * 3)))


def class_metadata(names: Sequence[str]) -> dict[str, str]:
    """Class names as the metadata that a reader delivers."""
    return {"classes": json.dumps(list(names), ensure_ascii=False)} if names else {}


def _take(values: Any, order: Sequence[int]) -> Any:
    chosen: npt.NDArray[Any] | list[Any]
    chosen = values[order] if isinstance(values, np.ndarray) else [values[index] for index in order]
    return chosen
