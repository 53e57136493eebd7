"""From encoded pictures to rows: what a worker does with one task of an image conversion.

Worker processes import this module, so it stays free of torch.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lightning_fastio.convert.manifest import escape_name
from lightning_fastio.convert.pixels import ImageRules, Pixels, check_encoded, decode_image, decode_mask
from lightning_fastio.convert.source import Loaded, RowBatch, Skipped
from lightning_fastio.errors import ConfigError, CorruptFileError, FormatError


@dataclass(frozen=True)
class Pictures(ABC):
    """A run of encoded pictures, wherever they lie, with the other columns of their rows."""

    names: list[str]
    """Key of each picture: its path relative to the source."""
    columns: dict[str, Any] = field(default_factory=dict, kw_only=True)
    """Other fields by name, one entry a picture: arrays or lists of str."""

    @abstractmethod
    def read(self, index: int) -> bytes:
        """The encoded picture."""

    def read_mask(self, index: int) -> bytes | None:
        """The encoded mask that belongs to it; None without masks."""
        return None

    def read_fields(self, index: int) -> dict[str, int | str]:
        """Fields of its row that are not in ``columns`` because they have to be read."""
        return {}


@dataclass(frozen=True)
class FilePictures(Pictures):
    """Pictures that are files of their own."""

    root: str
    """Folder that the names are relative to."""
    masks: list[str] | None = None
    """Path of the mask of each picture."""

    def read(self, index: int) -> bytes:
        return Path(self.root, self.names[index]).read_bytes()

    def read_mask(self, index: int) -> bytes | None:
        return None if self.masks is None else Path(self.masks[index]).read_bytes()


@dataclass(frozen=True)
class TarPictures(Pictures):
    """Pictures that are members of uncompressed tar files, with the members that share their key."""

    file: str
    members: list[dict[str, tuple[int, int]]]
    """For each picture: offset and size of the picture, under ``image``, and of its text members, by field."""

    def read(self, index: int) -> bytes:
        return self._member(index, "image")

    def read_fields(self, index: int) -> dict[str, int | str]:
        fields: dict[str, int | str] = {}
        for name in self.members[index]:
            if name != "image":
                text = self._member(index, name).decode("utf-8")
                fields[name] = int(text) if name == "label" else text
        return fields

    def _member(self, index: int, name: str) -> bytes:
        offset, size = self.members[index][name]
        descriptor = os.open(self.file, os.O_RDONLY)
        try:
            data = os.pread(descriptor, size, offset)
        finally:
            os.close(descriptor)
        if len(data) < size:
            raise CorruptFileError(f"incomplete: {self.file} ends inside this member")
        return data


@dataclass(frozen=True)
class EncodedPictures(Pictures):
    """Pictures that come along, encoded."""

    data: list[bytes]

    def read(self, index: int) -> bytes:
        return self.data[index]


@dataclass(frozen=True)
class LoadPictures:
    """Decodes the pictures of a task."""

    rules: ImageRules
    """How pictures become arrays."""
    encoded: bool
    """Keep the encoded bytes, after making sure that they decode."""
    ragged: bool
    """Store pictures of any size as flat values with their shape in a field ``shape``."""
    with_path: bool
    """Whether rows have a field ``path``."""

    def __call__(self, pictures: Pictures) -> Loaded:
        images: list[Any] = []
        masks: list[Pixels] = []
        fields: list[dict[str, int | str]] = []
        kept: list[int] = []
        skipped: list[Skipped] = []
        for index, name in enumerate(pictures.names):
            try:
                image = self._image(pictures.read(index))
                mask = self._mask(pictures.read_mask(index), image)
                fields_of_row = pictures.read_fields(index)
            except (CorruptFileError, FormatError, OSError, ValueError) as error:
                skipped.append(Skipped(escape_name(name), str(error)))
                continue
            images.append(image)
            fields.append(fields_of_row)
            kept.append(index)
            if mask is not None:
                masks.append(mask)
        if not kept:
            return Loaded({}, skipped)
        names = [pictures.names[index] for index in kept]
        rows: RowBatch = self._image_fields(images, names)
        if masks:
            rows["mask"] = [mask.reshape(-1) for mask in masks] if self.ragged else stack(masks, names)
        rows.update({name: _chosen(values, kept) for name, values in pictures.columns.items()})
        rows.update(_columns(fields))
        if self.with_path:
            rows["path"] = [escape_name(name) for name in names]
        return Loaded(rows, skipped)

    def _image(self, data: bytes) -> Any:
        if self.encoded:
            check_encoded(data, self.rules)
            return data
        return decode_image(data, self.rules)

    def _mask(self, data: bytes | None, image: Any) -> Pixels | None:
        if data is None:
            return None
        try:
            mask = decode_mask(data, self.rules)
        except (CorruptFileError, FormatError) as error:
            raise FormatError(f"its mask: {error}") from error
        if not self.encoded and mask.shape != image.shape[:2]:
            raise FormatError(f"the image is {image.shape[:2]}, its mask {mask.shape}, as (height, width)")
        return mask

    def _image_fields(self, images: list[Any], names: list[str]) -> RowBatch:
        if self.encoded:
            return {"image": images}
        if self.ragged:
            return {
                "image": [image.reshape(-1) for image in images],
                "shape": np.array([image.shape for image in images], np.int64),
            }
        return {"image": stack(images, names)}


def stack(arrays: list[Pixels], names: list[str]) -> Pixels:
    """Arrays of one shape and dtype as one array with a leading axis.

    Raises:
        ConfigError: Two of them differ; the message names both.
    """
    first = arrays[0]
    for array, name in zip(arrays, names, strict=True):
        if array.shape != first.shape or array.dtype != first.dtype:
            raise ConfigError(differing(names[0], first, name, array))
    return np.stack(arrays)


def differing(one: str, first: Pixels, two: str, second: Pixels) -> str:
    """The message for two pictures that do not fit into one array."""
    return (
        f"{escape_name(one)} is {first.dtype} {first.shape}, {escape_name(two)} is {second.dtype} {second.shape} "
        f"as (height, width, channels): give size=(height, width) to bring all to one size, channels='RGB' or 'L' "
        f"for one mode, or ragged=True to store each as it is"
    )


def _columns(fields: list[dict[str, int | str]]) -> RowBatch:
    columns: RowBatch = {}
    for name, first in fields[0].items():
        values = [entry[name] for entry in fields]
        columns[name] = values if isinstance(first, str) else np.array(values, np.int64)
    return columns


def _chosen(values: Any, kept: list[int]) -> Any:
    return values[kept] if isinstance(values, np.ndarray) else [values[index] for index in kept]
