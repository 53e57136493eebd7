"""NumPy: rows of .npy files, of folders of them, and of .npz archives, out of memory maps.

reader    which files are fields and which are shards, rows out of all of them
fields    which arrays become fields, and which are left out and why
columns   fields of numbers and of text
ragged    fields whose rows lie end to end: ragged rows, bytes, sparse matrices
stored    where arrays lie in .npy and .npz files
writer    the writer
"""

from lightning_fastio.formats.numpy.reader import NumpyReader, open_field, open_source, open_target
from lightning_fastio.formats.numpy.writer import NumpyWriter

__all__ = ["NumpyReader", "NumpyWriter", "open_field", "open_source", "open_target"]
