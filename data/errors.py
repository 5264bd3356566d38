"""The errors that a user can meet, and nothing else.

::

    ReclaimError
      ConfigError(ValueError)       a setting is unknown or out of range
      DataError
        SchemaError(ValueError)     columns, types or units do not fit; names all that do not
        TraceError                  the trace is broken: damaged files, too many bad lines, nothing in it
      HistoryTooShortError          there is less data than the step needs; says both numbers
      ModelError                    no such model, or one made by another feature pipeline
      StoreError                    what the service remembers cannot be written, or cannot be read back

A message says what was expected, what came, and where. Each of these is something the caller can mend: the command
line prints it as one line and exits with code 2.
"""


class ReclaimError(Exception):
    """Base of every error that a caller can mend."""


class ConfigError(ReclaimError, ValueError):
    """A setting is unknown or out of range."""


class DataError(ReclaimError):
    """Input data cannot be used."""


class SchemaError(DataError, ValueError):
    """Columns, types or units do not fit; the message names all that do not."""


class TraceError(DataError):
    """The trace itself is broken: damaged files, too many bad lines, or nothing in it."""


class HistoryTooShortError(ReclaimError):
    """There is less data than the step needs; the message says both numbers."""


class ModelError(ReclaimError):
    """There is no such model, or it was made by another feature pipeline."""


class StoreError(ReclaimError):
    """What the service remembers cannot be written, or not be read back; the message names the file and the remedy."""
