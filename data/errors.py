"""Defines the errors that a user can meet.

::

    ReclaimError
      ConfigError(ValueError)       a setting is unknown or out of range
      DataError
        SchemaError(ValueError)     columns, types or units do not fit; names all that do not
        TraceError                  the trace is broken: damaged files, too many bad lines, nothing in it
      HistoryTooShortError          there is less data than the step needs; gives both numbers
      ModelError                    no such model, or another feature pipeline made it
        ModelAbsentError            no such model, as the registry states
        OtherReleaseError           another release made it, in a format or from features that this one does not read
      StoreError                    the state of the service cannot be written or read back

A message gives the expected value, the actual one, and the place. The caller can correct each of these: the command
line prints one line and exits with code 2.
"""


class ReclaimError(Exception):
    """Base of every error that a caller can correct."""


class ConfigError(ReclaimError, ValueError):
    """A setting is unknown or out of range."""


class DataError(ReclaimError):
    """Input data cannot be used."""


class SchemaError(DataError, ValueError):
    """Columns, types or units do not fit; the message names all that do not."""


class TraceError(DataError):
    """The trace itself is broken: damaged files, too many bad lines, or nothing in it."""


class HistoryTooShortError(ReclaimError):
    """There is less data than the step needs; the message gives both numbers."""


class ModelError(ReclaimError):
    """The model does not exist, or another feature pipeline made it."""


class ModelAbsentError(ModelError):
    """The registry lacks the model, or does not exist yet; not raised where it cannot be reached or read."""


class OtherReleaseError(ModelError):
    """Another release made the model, in a format or from features that this one does not read."""


class StoreError(ReclaimError):
    """The state of the service cannot be written or read back; the message names the file and the remedy."""
