"""Records of the cache for tests: each differs from a plain one in what is named."""

from datetime import UTC, datetime

from layout_tuner.cache.records import DecisionRecord, EnvironmentRecord, KeyRecord, MeasurementRecord, MissRecord

MOMENT = datetime(2025, 3, 1, 12, 0, 0, 250_000, tzinfo=UTC)


class Make:
    """Builds records that differ from a plain one in what is named."""

    environment = EnvironmentRecord(id="H200-triton3.6", facts={"device": "NVIDIA H200", "cores": 132, "mig": False})
    moment = MOMENT

    def key(self, **fields: object) -> KeyRecord:
        plain: dict[str, object] = {
            "op": "chunk_bwd_dv_local",
            "B": 2,
            "T": 2048,
            "H": 4,
            "HV": 8,
            "K": 64,
            "V": 64,
            "varlen": False,
            "dtype": "bfloat16",
            "form": "BT=64,g=float32@STRIDE_HV",
        }
        return KeyRecord(**(plain | fields))  # type: ignore[arg-type]

    def measurement(self, candidate: str = "full/g=T_CONTIG", **fields: object) -> MeasurementRecord:
        plain: dict[str, object] = {
            "candidate": candidate,
            "revision": "r1",
            "state": "ok",
            "end_to_end_us": 10.5,
            "kernel_us": 9.0,
            "relayout_us": 1.5,
            "interval_low_us": 10.25,
            "interval_high_us": 10.75,
            "error": 0.001,
            "samples": (10.5, 10.25, 10.75),
        }
        return MeasurementRecord(**(plain | fields))  # type: ignore[arg-type]

    def decision(self, **fields: object) -> DecisionRecord:
        key = {name: fields.pop(name) for name in list(fields) if name in KeyRecord.__dataclass_fields__}
        plain: dict[str, object] = {
            "key": self.key(**key),
            "environment": self.environment.id,
            "candidate": "full/g=T_CONTIG",
            "revision": "r1",
            "default_candidate": "full/g=STRIDE_HV",
            "source": "measured",
            "gain": 0.125,
            "gain_low": 0.1,
            "gain_high": 0.15,
            "measurements": (
                self.measurement(),
                self.measurement("full/g=STRIDE_HV", end_to_end_us=12.0, interval_low_us=11.75, interval_high_us=12.25),
            ),
            "created_at": MOMENT,
            "version": "0.1.0",
        }
        return DecisionRecord(**(plain | fields))  # type: ignore[arg-type]

    def miss(self, **fields: object) -> MissRecord:
        key = {name: fields.pop(name) for name in list(fields) if name in KeyRecord.__dataclass_fields__}
        plain: dict[str, object] = {
            "key": self.key(**key),
            "environment": self.environment.id,
            "count": 1,
            "first_seen": MOMENT,
            "last_seen": MOMENT,
            "reason": "on_miss is default",
        }
        return MissRecord(**(plain | fields))  # type: ignore[arg-type]
