"""The schema, as SQLAlchemy models that serve SQLite and PostgreSQL alike.

Moments are ISO 8601 texts in UTC: they read well in any SQLite browser, sort as time, and a damaged one is one bad row
rather than a failed query. Key columns are plain columns and NOT NULL, because NULLs never conflict and an upsert would
duplicate them.
"""

from sqlalchemy import Boolean, Float, ForeignKey, Index, Integer, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import BigInteger

SCHEMA_VERSION = 1

KEY_COLUMNS = ("op", "B", "T", "H", "HV", "K", "V", "varlen", "dtype", "form")

# SQLite only numbers rows by itself in a column whose type is exactly INTEGER.
_RowId = BigInteger().with_variant(Integer, "sqlite")


class Base(DeclarativeBase):
    """The tables of a decision file."""


class SchemaVersion(Base):
    """Which migrations a file has seen; the largest version is the file's."""

    __tablename__ = "schema_version"

    version: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    applied_at: Mapped[str] = mapped_column(Text)
    product_version: Mapped[str] = mapped_column(Text)


class Seal(Base):
    """Ties an exported file to its content; a file in use has none."""

    __tablename__ = "seals"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    seal: Mapped[str] = mapped_column(Text)
    sealed_at: Mapped[str] = mapped_column(Text)
    host: Mapped[str] = mapped_column(Text)
    product_version: Mapped[str] = mapped_column(Text)


class Environment(Base):
    """Facts of an environment: a namespace of decisions."""

    __tablename__ = "environments"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    facts: Mapped[str] = mapped_column(Text)


class KeyColumns:
    """The columns of a call's key."""

    op: Mapped[str] = mapped_column(Text)
    B: Mapped[int] = mapped_column(BigInteger)
    T: Mapped[int] = mapped_column(BigInteger)
    H: Mapped[int] = mapped_column(BigInteger)
    HV: Mapped[int] = mapped_column(BigInteger)
    K: Mapped[int] = mapped_column(BigInteger)
    V: Mapped[int] = mapped_column(BigInteger)
    varlen: Mapped[bool] = mapped_column(Boolean)
    dtype: Mapped[str] = mapped_column(Text)
    form: Mapped[str] = mapped_column(Text)


class Decision(KeyColumns, Base):
    """A chosen candidate. One row per key, environment, source and host: hosts never overwrite each other."""

    __tablename__ = "decisions"
    __table_args__ = (UniqueConstraint("environment_id", *KEY_COLUMNS, "source", "host", name="decision_slot"),)

    id: Mapped[int] = mapped_column(_RowId, primary_key=True)
    environment_id: Mapped[str] = mapped_column(ForeignKey("environments.id"))
    candidate: Mapped[str] = mapped_column(Text)
    revision: Mapped[str] = mapped_column(Text)
    default_candidate: Mapped[str] = mapped_column(Text)
    source: Mapped[str] = mapped_column(Text)
    gain: Mapped[float | None] = mapped_column(Float)
    gain_low: Mapped[float | None] = mapped_column(Float)
    gain_high: Mapped[float | None] = mapped_column(Float)
    created_at: Mapped[str] = mapped_column(Text)
    host: Mapped[str] = mapped_column(Text)
    version: Mapped[str] = mapped_column(Text)


class Measurement(Base):
    """What is known of one candidate of a decision."""

    __tablename__ = "measurements"
    __table_args__ = (Index("measurement_decision", "decision_id"),)

    id: Mapped[int] = mapped_column(_RowId, primary_key=True)
    decision_id: Mapped[int] = mapped_column(ForeignKey("decisions.id", ondelete="CASCADE"))
    candidate: Mapped[str] = mapped_column(Text)
    revision: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(Text)
    reason: Mapped[str] = mapped_column(Text)
    failure: Mapped[str] = mapped_column(Text)
    end_to_end_us: Mapped[float | None] = mapped_column(Float)
    kernel_us: Mapped[float | None] = mapped_column(Float)
    relayout_us: Mapped[float | None] = mapped_column(Float)
    interval_low_us: Mapped[float | None] = mapped_column(Float)
    interval_high_us: Mapped[float | None] = mapped_column(Float)
    error: Mapped[float | None] = mapped_column(Float)
    sample_count: Mapped[int] = mapped_column(Integer)
    samples: Mapped[str] = mapped_column(Text)
    counts: Mapped[str] = mapped_column(Text)
    measured_at: Mapped[str | None] = mapped_column(Text)


class Miss(KeyColumns, Base):
    """Calls that found no decision, counted per key, environment and host."""

    __tablename__ = "misses"
    __table_args__ = (UniqueConstraint("environment_id", *KEY_COLUMNS, "host", name="miss_slot"),)

    id: Mapped[int] = mapped_column(_RowId, primary_key=True)
    environment_id: Mapped[str] = mapped_column(Text)
    count: Mapped[int] = mapped_column(BigInteger)
    first_seen: Mapped[str] = mapped_column(Text)
    last_seen: Mapped[str] = mapped_column(Text)
    reason: Mapped[str] = mapped_column(Text)
    host: Mapped[str] = mapped_column(Text)
