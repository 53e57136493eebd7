"""Parquet: files, folders and Hive partitions, row groups as blocks.

reader     the reader: which fields there are, rows out of all of them
files      which files there are, their footers, and open handles
partition      values of Hive partitions
footer         facts of a footer that pyarrow cannot be asked for safely
schema     which columns are stored, and what each type becomes
survey     nulls and lengths of lists, before any training
fields     which columns make up a field
filter     rows that pass a filter
groups     row groups as blocks
columns    a decoded column as an array: numbers, tensors, text, lists
elements, values, layout: parts of these
writer     the writer
arrays     arrays as columns
"""

from lightning_fastio.formats.parquet.reader import ParquetReader, open_source, open_target
from lightning_fastio.formats.parquet.writer import ParquetWriter

__all__ = ["ParquetReader", "ParquetWriter", "open_source", "open_target"]
