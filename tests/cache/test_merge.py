"""Merging by evidence: in any order, in any grouping, however often."""

import contextlib
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
from cache_records import Make
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layout_tuner.cache.evidence import choose
from layout_tuner.cache.memory import MemoryStore
from layout_tuner.cache.merge import Evidence, conflicts, gather
from layout_tuner.cache.records import EnvironmentRecord, utc_now
from layout_tuner.cache.sharing.share import merge_files
from layout_tuner.cache.sqlite.file import Store

make = Make()

CANDIDATES = ("block/g=T_CONTIG", "full/g=STRIDE_HV", "full/g=T_CONTIG")

# Ages on both sides of every lifetime, and from a clock that was ahead.
MOMENTS = [None, make.moment, *(utc_now() - timedelta(days=days) for days in (0.5, 5, -30))]

measurements = st.builds(
    lambda candidate, ended, moment, samples, revision: make.measurement(
        candidate, state=ended[0], failure=ended[1], measured_at=moment, samples=tuple(samples), revision=revision
    ),
    st.sampled_from(CANDIDATES),
    st.sampled_from(
        [
            ("ok", ""),
            ("skipped", ""),
            ("wrong", "wrong"),
            *(("failed", each) for each in ("compile", "crash", "overflow", "memory", "timeout")),
        ]
    ),
    st.sampled_from(MOMENTS),
    st.lists(st.floats(1.0, 100.0), max_size=3),
    st.sampled_from(["r1", "r2"]),
)

decisions = st.builds(
    lambda T, candidate, source, host, age, found: make.decision(
        T=T,
        candidate=candidate,
        source=source,
        host=host,
        created_at=make.moment + timedelta(seconds=age),
        measurements=tuple({(each.candidate, each.revision): each for each in found}.values()),
    ),
    st.integers(1, 3),
    st.sampled_from(CANDIDATES),
    st.sampled_from(["pinned", "measured", "imported", "predicted"]),
    st.sampled_from(["one", "two"]),
    st.integers(0, 2),
    st.lists(measurements, max_size=3),
)

misses = st.builds(
    lambda T, count, host, first, last, reason: make.miss(
        T=T,
        count=count,
        host=host,
        first_seen=make.moment + timedelta(seconds=first),
        last_seen=make.moment + timedelta(seconds=last),
        reason=reason,
    ),
    st.integers(1, 2),
    st.integers(1, 5),
    st.sampled_from(["one", "two"]),
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from(["", "capture"]),
)

environments = st.builds(
    lambda facts: EnvironmentRecord(id=make.environment.id, facts=facts),
    st.dictionaries(st.sampled_from("ab"), st.integers(0, 2), max_size=2),
)

parts = st.tuples(st.lists(decisions, max_size=4), st.lists(misses, max_size=2), st.lists(environments, max_size=2))


def merged(*many):
    evidence = Evidence()
    for found, missed, places in many:
        for record in found:
            evidence.add_decision(record)
        for miss in missed:
            evidence.add_miss(miss)
        for place in places:
            evidence.add_environment(place)
    return evidence


def content(evidence):
    return list(evidence.decisions.values()), list(evidence.misses.values()), list(evidence.environments.values())


@given(parts, parts, parts)
def test_merging_is_commutative_associative_and_idempotent(a, b, c):
    assert merged(a, b) == merged(b, a)
    assert merged(content(merged(a, b)), c) == merged(a, content(merged(b, c)))
    assert merged(a, a) == merged(a)
    assert merged(content(merged(a, b)), a) == merged(a, b)


def test_the_reason_of_a_miss_does_not_depend_on_the_grouping():
    many, capture, last = (
        make.miss(count=count, host="two", last_seen=make.moment + timedelta(seconds=second), reason=reason)
        for count, second, reason in ((2, 0, ""), (1, 1, "capture"), (2, 1, ""))
    )
    left = merged(content(merged(([], [many], []), ([], [capture], []))), ([], [last], []))
    assert left == merged(([], [many], []), content(merged(([], [capture], []), ([], [last], []))))


@given(st.lists(decisions, max_size=6), st.randoms())
def test_what_is_believed_does_not_depend_on_the_order(found, random_):
    shuffled = list(found)
    random_.shuffle(shuffled)
    assert choose(found) == choose(shuffled)
    one, other = ({(each.one, each.other, each.reason) for each in conflicts(order)} for order in (found, shuffled))
    assert one == other


def stored(folder, name, part):
    """A file with a part's records exactly as they are."""
    with contextlib.closing(Store(folder / name)) as store:
        found, missed, places = content(merged(part))
        store.absorb(found, places, missed)
    return folder / name


def everything(path):
    with contextlib.closing(Store(path, immutable=True)) as store:
        evidence = gather([store])
    # Decisions name an environment even where nothing is known of it.
    return evidence.decisions, evidence.misses, {k: v for k, v in evidence.environments.items() if v.facts}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(parts, parts)
def test_merging_files_follows_the_same_rules(a, b):
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=base) as name:
        folder = Path(name)
        one, other = stored(folder, "a.sqlite", a), stored(folder, "b.sqlite", b)
        merge_files([one, other], folder / "ab.sqlite")
        merge_files([other, one, other], folder / "ba.sqlite")
        found = everything(folder / "ab.sqlite")
        assert found == everything(folder / "ba.sqlite")
        expected = merged(a, b)
        assert found[0] == expected.decisions
        assert found[1] == expected.misses
        assert found[2] == {k: v for k, v in expected.environments.items() if v.facts}


def test_hosts_whose_winners_lie_beyond_the_noise_are_a_conflict():
    fast = make.measurement("full/g=T_CONTIG", interval_low_us=9.0, interval_high_us=9.5)
    slow = make.measurement("full/g=STRIDE_HV", interval_low_us=11.0, interval_high_us=11.5)
    one = make.decision(host="one", measurements=(fast, slow))
    swapped = (
        make.measurement("full/g=T_CONTIG", interval_low_us=11.0, interval_high_us=11.5),
        make.measurement("full/g=STRIDE_HV", interval_low_us=9.0, interval_high_us=9.5),
    )
    other = make.decision(host="two", candidate="full/g=STRIDE_HV", measurements=swapped)
    (conflict,) = conflicts([one, other])
    assert "both beyond the noise" in conflict.reason
    overlapping = tuple(
        make.measurement(each.candidate, interval_low_us=8.0, interval_high_us=12.0) for each in swapped
    )
    assert list(conflicts([one, make.decision(host="two", candidate=other.candidate, measurements=overlapping)])) == []


def test_a_winner_that_is_wrong_elsewhere_is_a_conflict():
    wrong = make.measurement(state="wrong", failure="wrong")
    other = make.decision(host="two", candidate="full/g=STRIDE_HV", measurements=(wrong,))
    (conflict,) = conflicts([make.decision(host="one"), other])
    assert "wrong results on two" in conflict.reason


def test_sources_of_unlike_strength_are_no_conflict():
    pinned = make.decision(host="one", source="pinned", candidate="full/g=STRIDE_HV")
    assert list(conflicts([pinned, make.decision(host="two")])) == []
    (conflict,) = conflicts([pinned, make.decision(host="two", source="pinned")])
    assert conflict.reason.startswith("pinned to full/g=STRIDE_HV by one")


def test_conflicts_of_merged_files_are_listed(tmp_path):
    for host, candidate in (("one", "a"), ("two", "b")):
        with contextlib.closing(Store(tmp_path / f"{host}.sqlite")) as store:
            store.publish(make.decision(host=host, source="pinned", candidate=candidate), make.environment)
    result = merge_files([tmp_path / "one.sqlite", tmp_path / "two.sqlite"], tmp_path / "out.sqlite")
    assert len(result.conflicts) == 1
    assert (result.tally.added, result.exported.decisions) == (2, 2)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_memory_store_gathers_like_a_file(path, opened, reverse):
    stores = [MemoryStore(host="one"), opened(path, host="two")]
    for store in reversed(stores) if reverse else stores:
        store.publish(make.decision(), make.environment)
    evidence = gather(stores)
    assert {record.host for record in evidence.decisions.values()} == {"one", "two"}
    assert list(evidence.conflicts()) == []
