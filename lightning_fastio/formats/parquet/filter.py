"""Which rows pass ``filters``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import and_
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from lightning_fastio.errors import ConfigError
from lightning_fastio.formats.parquet.files import Files


def passing_rows(files: Files, filters: Any) -> Iterator[tuple[int, int, npt.NDArray[np.int64]]]:
    """Rows that pass, by row group, in file order.

    Statistics skip row groups in which no row can pass; in the others the columns that the filter uses are read.

    Args:
        files: Files to look at.
        filters: A pyarrow expression, or conditions ``(column, operator, value)`` that must all hold, or a list of
            such lists, one of which must hold.

    Yields:
        File, row group, and numbers of the rows within it.

    Raises:
        ConfigError: The filter is malformed, or does not fit the columns.
    """
    import pyarrow.dataset as ds
    from pyarrow.fs import LocalFileSystem

    # Read-ahead would start pyarrow's threads, which do not survive a fork.
    scan_options = ds.ParquetFragmentScanOptions(pre_buffer=False, page_checksum_verification=True)
    file_format = ds.ParquetFileFormat(default_fragment_scan_options=scan_options)
    try:
        expression = filters if isinstance(filters, ds.Expression) else pq.filters_to_expression(_alternatives(filters))
        for index, file in enumerate(files.files):
            constants = [ds.field(name) == pa.scalar(value) for name, value in file.partition.items()]
            partition = reduce(and_, constants, ds.scalar(True))
            whole = file_format.make_fragment(str(file.path), LocalFileSystem(), partition)
            for fragment in whole.split_by_row_group(expression, schema=file.schema):
                scanner = fragment.scanner(schema=file.schema, columns={"keep": expression}, use_threads=False)
                keep = scanner.to_table().column("keep").fill_null(False).to_numpy()
                if keep.any():
                    yield index, fragment.row_groups[0].id, np.flatnonzero(keep)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ConfigError(f"filters={filters} does not fit {files.files[0].path}: {error}") from error


def _alternatives(filters: Any) -> list[list[tuple[Any, ...]]]:
    """Conditions as pyarrow takes them: tuples, which YAML does not have."""
    is_conjunction = all(len(item) == 3 and isinstance(item[0], str) for item in filters)
    return [[tuple(condition) for condition in each] for each in ([filters] if is_conjunction else filters)]
