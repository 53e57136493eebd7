"""HDF5, also NetCDF-4, MATLAB 7.3, AnnData and 10x.

reader    the reader: which fields there are, rows out of all of them
source    rows of one field: whole, or windows of it
paths     which of the ways below a dataset takes
mapped        rows out of the memory-mapped file: contiguous datasets, chunks without filters
blocks        rows out of chunks that decode whole, or out of what the library reads
chunks        where raw chunks lie, and their decoding outside the library's lock
sparse        rows of CSR groups
tree      datasets and groups behind links
types     what each stored type becomes
library   handles, locks and errors of the HDF5 library
writer    the writer
"""

from lightning_fastio.formats.hdf5.reader import HDF5Reader, open_source, open_target
from lightning_fastio.formats.hdf5.writer import HDF5Writer

__all__ = ["HDF5Reader", "HDF5Writer", "open_source", "open_target"]
