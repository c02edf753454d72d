"""The kinds of trouble with a store, told apart by what to do about them."""

import sqlite3
from enum import Enum

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from layout_tuner.errors import CacheError


class Fault(Enum):
    """The kinds of trouble."""

    BUSY = "busy"
    """Another writer has it; try again."""

    DAMAGED = "damaged"
    """Not a database, or one that lost pages."""

    READ_ONLY = "read only"
    """It can be read, at best: no right to write, or no space left."""

    UNAVAILABLE = "unavailable"
    """A stale handle, a server that does not answer: may heal by itself."""

    OLDER = "older"
    """Written by an earlier version of this product, where it may not be migrated."""

    NEWER = "newer"
    """Written by a later version of this product."""

    FOREIGN = "foreign"
    """A sound database that belongs to something else."""


class StoreError(CacheError):
    """A store that cannot do what was asked.

    Attributes:
        fault: The kind of trouble.
    """

    def __init__(self, message: str, fault: Fault) -> None:
        # Both are arguments of the exception, so that it survives the way from a worker process.
        super().__init__(message, fault)
        self.fault = fault

    def __str__(self) -> str:
        return str(self.args[0])


# Primary result codes of SQLite; its extended codes carry the primary one in their lowest byte.
_SQLITE_FAULTS = {
    5: Fault.BUSY,
    6: Fault.BUSY,
    8: Fault.READ_ONLY,
    11: Fault.DAMAGED,
    13: Fault.READ_ONLY,
    23: Fault.FOREIGN,
    26: Fault.DAMAGED,
}


def fault_of(error: BaseException) -> Fault:
    """The kind of trouble an exception of SQLAlchemy, of a driver or of the operating system stands for."""
    if isinstance(error, StoreError):
        return error.fault
    cause = error.orig if isinstance(error, DBAPIError) else error
    code = getattr(cause, "sqlite_errorcode", None)
    if isinstance(code, int):
        return _SQLITE_FAULTS.get(code & 0xFF, Fault.UNAVAILABLE)
    if isinstance(cause, UnicodeError | MemoryError):
        return Fault.DAMAGED
    # Deadlocks and serialisation failures of a server are over at the next attempt.
    if getattr(cause, "sqlstate", None) in ("40001", "40P01", "55P03"):
        return Fault.BUSY
    return Fault.UNAVAILABLE


def store_error(place: object, error: Exception) -> StoreError:
    """The `StoreError` for an exception met at a place; a `StoreError` that names the place stays what it is."""
    if isinstance(error, StoreError):
        return error if str(place) in str(error) else StoreError(f"{place}: {error}", error.fault)
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    text = str(cause).strip().splitlines()
    return StoreError(f"{place}: {text[0] if text else type(cause).__name__}", fault_of(error))


CAUGHT = (SQLAlchemyError, sqlite3.Error, OSError, StoreError, UnicodeError, MemoryError)
"""What an operation on a store may raise without being a defect of this product.

The last two come from damaged files: SQLite quotes their bytes in its messages, and believes the sizes they name.
"""
