"""Raw images, text, tables and arrays into .npy, .h5 and .parquet files that train fast.

The way of the data, one module a step:

    sources.py  what is it?          images.py tars.py encoded.py text.py tables.py arrow.py items.py: a `Source`
    pool.py     load the tasks       worker processes (batches come back through slots.py), threads, or Ray; in order
    output.py   write the rows       shards in a staging folder, a journal to resume from, one rename at the end
    manifest.py say what was done    counts, classes, statistics, what was skipped, checksums; check.py checks them

Worker processes import this package, so it loads its parts where they are used: none of it waits for torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from lightning_fastio.convert.manifest import Manifest

__all__ = ["convert", "verify"]


def convert(
    source: str | Path | Sequence[str | Path] | Mapping[str, str | Path] | Iterable[Any],
    destination: str | Path,
    *,
    format: Literal["numpy", "hdf5", "parquet"] | None = None,
    kind: Literal["auto", "images", "text", "table"] = "auto",
    fn: Callable[[Any], Mapping[str, Any] | None] | None = None,
    fields: Sequence[str] | Mapping[str, str | Sequence[str]] | None = None,
    dtypes: Mapping[str, str] | None = None,
    null_fill: float | str | Mapping[str, float | str] | None = None,
    size: tuple[int, int] | None = None,
    resize: Literal["crop", "fit", "pad", "stretch"] = "crop",
    channels: Literal["RGB", "L", "keep"] = "RGB",
    background: tuple[int, int, int] = (255, 255, 255),
    encoded: bool = False,
    ragged: bool = False,
    labels: str | Path | None = None,
    masks: str | Path | None = None,
    classes: Sequence[str] | str | Path | None = None,
    paths: bool = True,
    max_pixels: int = 178_956_970,
    tokenizer: str | None = None,
    text_field: str = "text",
    documents: Literal["line", "file"] = "line",
    end_of_text: int | str | None = None,
    shuffle_seed: int | None = None,
    shard_bytes: int | None = None,
    compression: str | None = "auto",
    statistics: bool = True,
    on_error: Literal["stop", "skip"] = "stop",
    max_skipped: int | None = None,
    num_workers: int | None = None,
    memory_bytes: int = 1 << 30,
    engine: Literal["auto", "process", "thread", "ray"] = "auto",
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: bool | None = None,
) -> Manifest:
    """Convert images, text, tables or arrays into files that train fast.

    The destination appears, whole, when everything is written; until then, and after an error, what was there
    stays. Equal inputs and options give equal bytes, with any number of workers and after any interruption.

    Args:
        source: Folder, file, list of files, pattern with ``*``, or mapping of field to file. With ``fn``: any
            iterable of items.
        destination: A file (``.npy``, ``.npz``, ``.h5``, ``.parquet``), or a folder of shards. Data in ``train``,
            ``val`` and ``test`` folders needs a folder, and keeps these as sub-folders.
        format: Storage format of a folder; a file says it by its suffix.
        kind: What the source is, where looking at it does not tell.
        fn: Turns one item into the fields of one row, or None to leave it out. Runs in worker processes, so it is a
            function of a module, not a lambda.
        fields: Tables: fields to take, in this order; names, new name to stored name, or new name to a list that is
            stacked. None takes all.
        dtypes: Tables: field to NumPy dtype, such as ``{"x": "float16"}``. A cast that would lose more than
            rounding of floats is an error.
        null_fill: Tables: value in place of nulls, for all fields or by field.
        size: Images: (height, width) of every image.
        resize: Images: ``crop`` fills ``size`` and cuts the rest off; ``pad`` fits inside and fills up with
            ``background``; ``stretch`` ignores the ratio; ``fit`` fits inside, each image with its own size.
        channels: Images: ``RGB``, ``L`` for grey, or ``keep`` for what each file has.
        background: Images: colour under transparent pixels and in padding.
        encoded: Images: keep the encoded bytes, for decoding while training.
        ragged: Images: keep the size of each image, stored as flat values with a field ``shape``.
        labels: Images: CSV or JSON Lines with a path and labels in each row. ``metadata.csv`` and
            ``metadata.jsonl`` in the folder are found without it.
        masks: Images: folder of masks with the names of the images.
        classes: Images: class names, or converted data to take them from, so that labels mean the same.
        paths: Images: give each row a field ``path``, its file name relative to the source.
        max_pixels: Images: larger ones count as broken.
        tokenizer: Text: ``bytes``, a ``tokenizer.json`` of Hugging Face, or ``tiktoken:NAME``; None keeps strings.
        text_field: Text: the field that is tokenised.
        documents: Text: a row is a line, or a whole file.
        end_of_text: Text: token, or its number, that ends every document.
        shuffle_seed: Mix the rows once, by this seed.
        shard_bytes: A shard of a folder ends at this many bytes. None: 1 GiB for Parquet and HDF5; NumPy keeps one
            file a field.
        compression: ``auto`` measures a sample and compresses where that saves a third; or a name that the format
            knows; or None.
        statistics: Put mean, std, min, max, nulls and class counts into the manifest.
        on_error: What a broken input does: ``stop``, or ``skip`` it and list it in the manifest.
        max_skipped: Stop after all when more inputs than this were skipped.
        num_workers: Workers; None takes one for each allowed CPU, 0 works in this process.
        memory_bytes: Bound for rows in flight, whatever the size of the source.
        engine: ``process``, ``thread``, or ``ray`` for a Ray cluster; ``auto`` takes what suits the source.
        resume: Go on with a conversion that was interrupted.
        overwrite: Replace an existing destination once the new data is whole.
        dry_run: Write nothing; print fields, dtypes, shapes, size and time estimated from a sample.
        progress: Draw the progress line; None draws it in a terminal only.

    Returns:
        The manifest: fields, shards with checksums, classes, statistics, skipped inputs.

    Raises:
        ConfigError: Options contradict each other, or the destination exists.
        CorruptFileError: An input is broken and ``on_error`` is ``stop``.
        FormatError: The source holds nothing that can be converted.
        ResumeError: The interrupted conversion had another source or other options.
        MissingDependencyError: Pillow, a tokenizer or Ray is needed.

    Example:
        ``convert("photos/", "photos.h5", size=(224, 224))``
    """
    call = dict(locals())
    from lightning_fastio.convert.options import RunOptions, SourceOptions
    from lightning_fastio.convert.run import run_conversion
    from lightning_fastio.convert.sources import open_source
    from lightning_fastio.convert.target import choose_target

    target = choose_target(
        Path(destination), format, shard_bytes=shard_bytes, compression=compression, overwrite=overwrite
    )
    options = SourceOptions(**{name: call[name] for name in SourceOptions.__dataclass_fields__})
    run = RunOptions(**{name: call[name] for name in RunOptions.__dataclass_fields__})
    return run_conversion(open_source(source, options, target.staging), target, run, options.changed())


def verify(path: str | Path) -> Manifest:
    """Check converted data against its manifest, every byte of it.

    Args:
        path: The converted file or folder.

    Returns:
        The manifest, when all is well.

    Raises:
        FileAccessError: There is no manifest.
        CorruptFileError: Files are missing, changed or damaged; the message lists every one.
    """
    from lightning_fastio.convert.check import check_converted

    return check_converted(path)
