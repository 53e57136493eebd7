"""WebDataset shards: tar files in which members with the same key make one sample."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lightning_fastio.convert.files import IMAGE_SUFFIXES
from lightning_fastio.convert.images import class_metadata, task_pictures
from lightning_fastio.convert.manifest import escape_name, fingerprint
from lightning_fastio.convert.pictures import LoadPictures, TarPictures
from lightning_fastio.convert.pixels import ImageRules
from lightning_fastio.convert.source import Skipped, Source, Task
from lightning_fastio.errors import ConfigError, CorruptFileError, FormatError

_FIELD_OF_SUFFIX = {"cls": "label", "txt": "text", "caption": "text", "json": "json"}


@dataclass
class TarShard:
    """Where the members of one tar file lie."""

    file: Path
    keys: list[str]
    members: list[dict[str, tuple[int, int]]]
    """For each key: field name to offset and size."""

    def reordered(self, order: list[int]) -> TarShard:
        """The same samples in another order."""
        return TarShard(self.file, [self.keys[index] for index in order], [self.members[index] for index in order])


@dataclass(kw_only=True)
class TarImages(Source):
    """Pictures in tar files; see `open_tars`."""

    shards: list[TarShard]
    task_pictures: int

    def tasks(self) -> Iterator[Task]:
        """Runs of pictures of one file."""
        for shard in self.shards:
            for start in range(0, len(shard.keys), self.task_pictures):
                span = slice(start, start + self.task_pictures)
                members = shard.members[span]
                num_bytes = sum(size for member in members for _, size in member.values())
                yield Task(TarPictures(shard.keys[span], str(shard.file), members), len(members), num_bytes)


def open_tars(
    files: list[Path],
    rules: ImageRules,
    *,
    classes: list[str] | None = None,
    encoded: bool = False,
    ragged: bool = False,
    with_path: bool = True,
    shuffle_seed: int | None = None,
) -> TarImages:
    """List the samples of WebDataset shards.

    A sample is a picture with what shares its key: ``.cls`` becomes ``label``, ``.txt`` becomes ``text``, ``.json``
    stays text. The key, with the folder inside the tar, becomes ``path``.

    Args:
        files: Uncompressed tar files, in this order.
        rules: How pictures become arrays.
        classes: Names behind the numbers of ``.cls``.
        encoded: Keep the encoded bytes.
        ragged: Store pictures of any size.
        with_path: Give rows a field ``path``.
        shuffle_seed: Mix the shards, and the samples inside each.

    Raises:
        ConfigError: A file is compressed, so that its members cannot be found without unpacking it.
        CorruptFileError: A file is no tar file or is cut off.
        FormatError: There is no picture.
    """
    skipped: list[Skipped] = []
    shards = [_index(file, skipped) for file in files]
    if not any(shard.keys for shard in shards):
        raise FormatError(f"{files[0]}: no pictures found in {len(files)} tar files")
    if shuffle_seed is not None:
        generator = np.random.Generator(np.random.PCG64(shuffle_seed))
        shards = [shards[index] for index in generator.permutation(len(shards))]
        shards = [shard.reordered(generator.permutation(len(shard.keys)).tolist()) for shard in shards]
    first = next(shard for shard in shards if shard.keys)
    sample = TarPictures(first.keys, str(first.file), first.members)
    return TarImages(
        load=LoadPictures(rules, encoded=encoded, ragged=ragged, with_path=with_path),
        fingerprint=fingerprint(((file.name, os.stat(file)) for file in files), asdict(rules)),
        num_items=sum(len(shard.keys) for shard in shards),
        num_bytes=sum(size for shard in shards for member in shard.members for _, size in member.values()),
        metadata=class_metadata(classes or []),
        skipped=skipped,
        shards=shards,
        task_pictures=task_pictures(sample, rules, encoded=encoded, ragged=ragged),
    )


def _index(file: Path, skipped: list[Skipped]) -> TarShard:
    """Read the headers of a tar file, passing over the data."""
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    try:
        with tarfile.open(file, "r:") as archive:
            for member in archive:
                folder, _, name = member.name.rpartition("/")
                stem, _, suffix = name.partition(".")
                field = "image" if f".{suffix.lower()}" in IMAGE_SUFFIXES else _FIELD_OF_SUFFIX.get(suffix.lower())
                if member.isfile() and stem and field is not None:
                    key = f"{folder}/{stem}" if folder else stem
                    samples.setdefault(key, {})[field] = member.offset_data, member.size
    except tarfile.ReadError as error:
        with file.open("rb") as stream:
            if stream.read(2) == b"\x1f\x8b":
                raise ConfigError(
                    f"{file} is compressed: unpack it with gunzip first, members are read by position"
                ) from error
        raise CorruptFileError(f"{file}: not a tar file, or an incomplete one: {error}") from error
    fields = {name for sample in samples.values() for name in sample}
    for key, sample in list(samples.items()):
        missing = sorted(fields - set(sample))
        if missing:
            skipped.append(Skipped(escape_name(f"{file.name}/{key}"), f"no {' and no '.join(missing)} under this key"))
            del samples[key]
    ordered = [{name: sample[name] for name in sorted(sample)} for sample in samples.values()]
    return TarShard(file, list(samples), ordered)
