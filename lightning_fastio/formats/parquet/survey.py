"""What has to be known of the whole of a column before its first row is read: lengths of lists, categories, nulls."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import prod
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa

from lightning_fastio.errors import FormatError
from lightning_fastio.formats.parquet.columns import Column, extract
from lightning_fastio.formats.parquet.files import Files
from lightning_fastio.formats.parquet.schema import storage_type

RaggedPolicy: TypeAlias = Literal["auto", "list", "pad", "error"]

MANY_CHUNKS = 50_000
"""With more column chunks than this, looking for nulls in the footers takes seconds, and is left to decoding."""

_UNSEEN = -1


def measure_lengths(files: Files, column: Column, ragged: RaggedPolicy) -> tuple[int | None, ...]:
    """Length of each level of lists; None for the outermost one where it varies, or is to be seen as varying.

    Lists at the start of the data tell the lengths; the number of values in every footer then tells whether all
    others have them too. Only where the footers disagree, because of nulls for example, the whole column is read.

    Raises:
        FormatError: The length varies although ``ragged`` is ``error``, or there is not a single list.
    """
    found: list[int | None] = [_UNSEEN if length is None else length for length in column.lengths]
    keep_ragged = ragged in ("list", "pad") and column.lengths[0] is None
    lists = _lists(files, column)
    for place, array in islice(lists, 1):
        _observe(array, found, place, column, ragged)
    if keep_ragged:
        found[0] = None
    elif None not in found and not _footers_agree(files, column, found):
        for place, array in lists:
            _observe(array, found, place, column, ragged)
            if found[0] is None:
                break
    if found[0] == _UNSEEN:
        raise FormatError(f"field {column.name!r} is null everywhere, so that the length of its lists is unknown")
    return tuple(0 if length == _UNSEEN else length for length in found)


def read_vocabulary(files: Files, column: Column) -> list[str]:
    """Names in the dictionaries of all row groups.

    Those of an ordered dictionary keep its order. Others are sorted, since the order of first appearance would give
    training and validation data different codes.
    """
    names: dict[str, None] = {}
    for index, group, _ in _row_groups(files):
        array = extract(files.read(index, [group], [column.name]), files.files[index].columns[column.name])
        names.update(dict.fromkeys(array.dictionary.to_pylist()))
    return list(names) if column.stored.type.ordered else sorted(names)


def check_footers(files: Files, column: Column, *, may_have_nulls: bool) -> None:
    """Compare what the footers say about a column with what is expected of it.

    Raises:
        FormatError: There are nulls; the message has their number, and the number of NaN apart from it. Or a row
            group is smaller than a single value of the column.
    """
    width = column.stored.type.byte_width if pa.types.is_fixed_size_binary(column.stored.type) else 0
    # Empty lists count as nulls in the statistics, so that they say nothing about ragged columns.
    look_for_nulls = not may_have_nulls and column.spec.kind != "ragged" and files.num_chunks <= MANY_CHUNKS
    for index, group, first_row in _row_groups(files) if width or look_for_nulls else ():
        file = files.files[index]
        stored = file.columns[column.name]
        if stored.leaf < 0 or not (width or stored.nullable):
            continue
        chunks, leaf = files.chunks(index), stored.leaf
        if width > chunks.num_bytes[group, leaf]:
            raise FormatError(
                f"field {column.name!r} of {file.path} is declared with {width} bytes a row, but row group {group} "
                f"holds {chunks.num_bytes[group, leaf]} bytes in all; it is null everywhere, or the file is damaged"
            )
        if look_for_nulls and chunks.num_nulls[group, leaf] > 0:
            table = files.read(index, [group], [column.name])
            column.decode(table, lambda row: f"row {first_row + row} of {file.path}")  # noqa: B023


def _row_groups(files: Files) -> Iterator[tuple[int, int, int]]:
    """File, row group, and its first row in the file, of all row groups that hold rows."""
    for index, file in enumerate(files.files):
        starts = np.cumsum(file.group_rows) - file.group_rows
        for group in np.flatnonzero(file.group_rows).tolist():
            yield index, group, int(starts[group])


def _lists(files: Files, column: Column) -> Iterator[tuple[tuple[str, int], pa.Array]]:
    """The column in small pieces, each with its file and first row."""
    for index, group, row in _row_groups(files):
        file = files.files[index]
        for table in files.batches(index, [group], column.name):
            yield (str(file.path), row), extract(table, file.columns[column.name])
            row += table.num_rows


def _footers_agree(files: Files, column: Column, lengths: list[int | None]) -> bool:
    """Whether every row group has exactly the number of values that lists of these lengths give.

    An empty list counts as one value, and as a null: with one value a row, only the nulls tell it apart.
    """
    num_values = prod(length or 0 for length in lengths)
    for index, group, _ in _row_groups(files):
        file = files.files[index]
        chunks, leaf = files.chunks(index), file.columns[column.name].leaf
        if chunks.num_values[group, leaf] != num_values * file.group_rows[group]:
            return False
        if num_values == 1 and chunks.num_nulls[group, leaf] != 0:
            return False
    return True


def _observe(
    array: pa.Array, found: list[int | None], place: tuple[str, int], column: Column, ragged: RaggedPolicy
) -> None:
    """Compare the lists of one piece with the lengths that were found so far."""
    for level in range(len(found)):
        array = array.storage if isinstance(array, pa.ExtensionArray) else array
        is_present = array.is_valid().to_numpy(zero_copy_only=False)
        array = array.drop_null()
        if not pa.types.is_fixed_size_list(storage_type(array.type)) and len(array):
            lengths = array.value_lengths().to_numpy()
            expected = int(lengths[0]) if found[level] == _UNSEEN else found[level]
            different = np.flatnonzero(lengths != expected)
            if len(different) and level == 0 and ragged == "error":
                row = place[1] + int(np.flatnonzero(is_present)[different[0]])
                raise FormatError(
                    f"field {column.name!r}, row {row} of {place[0]}: a list of {lengths[different[0]]} values, but "
                    f"those before have {expected}; ragged='auto' gives a list of tensors, ragged='pad' fills up"
                )
            found[level] = None if len(different) else expected
        array = array.flatten()
