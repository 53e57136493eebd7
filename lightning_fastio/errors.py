"""Every error that this package raises on purpose.

    FastIOError
    ├── FormatError (ValueError)              the file is readable, but not something this package can deliver
    ├── SchemaError (ValueError)              fields, dtypes, shapes or row counts do not fit together
    ├── ConfigError (ValueError)              an argument or a setting is wrong, or two contradict each other
    ├── ResumeError (ValueError)              a checkpoint does not fit the data or the settings of this run
    ├── CorruptFileError (OSError)            the file is incomplete, damaged, or changed while in use
    ├── FileAccessError (OSError)             the file is missing, locked or not permitted
    ├── RowIndexError (IndexError)            a row number outside the reader
    └── MissingDependencyError (ImportError)  an optional package is needed; the message has the install line

Each is built from one string, because torch re-raises an error of a worker process as ``type(error)(message)``.
The message says what was found, where (path, field, row), what was expected, and what to do about it.
"""

from __future__ import annotations


class FastIOError(Exception):
    """Base of all errors that lightning_fastio raises on purpose."""


class FormatError(FastIOError, ValueError):
    """The file can be read, but it holds something that cannot become a batch."""


class SchemaError(FastIOError, ValueError):
    """Fields, dtypes, sample shapes or row counts do not fit together."""


class ConfigError(FastIOError, ValueError):
    """An argument or a setting is wrong, or two of them contradict each other."""


class ResumeError(FastIOError, ValueError):
    """A checkpoint does not fit the data or the settings of this run."""


class CorruptFileError(FastIOError, OSError):
    """A file is incomplete, damaged, or was changed while it was in use."""


class FileAccessError(FastIOError, OSError):
    """A file is missing, locked by another process, or may not be read."""


class RowIndexError(FastIOError, IndexError):
    """A row number lies outside the reader."""


class MissingDependencyError(FastIOError, ImportError):
    """An optional package is needed; the message has the line that installs it."""
