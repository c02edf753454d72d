"""Forms as text, and how packed lengths share a key."""

from dataclasses import replace

import dv_local
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layout_tuner.errors import ConfigError
from layout_tuner.spec.keys import Form, bucket, bucketed
from layout_tuner.spec.layouts import Layout

WORDS = st.text("abcXYZ_019", min_size=1, max_size=6)
ENTRIES = st.dictionaries(WORDS, st.one_of(WORDS, st.sampled_from(["float32@T_CONTIG", "bfloat16@OTHER"])), max_size=5)


@given(ENTRIES)
def test_form_text_round_trips(entries: dict[str, str]) -> None:
    form = Form(entries)
    assert form.entries == entries
    assert Form.parse(form.text) == form
    assert hash(Form.parse(form.text)) == hash(form)
    assert str(form) == form.text


def test_form_text_does_not_depend_on_order() -> None:
    text = "BT=64,beta=float32@T_CONTIG,g=float32@STRIDE_HV"
    assert str(Form.parse("g=float32@STRIDE_HV,BT=64,beta=float32@T_CONTIG")) == text


def test_form_answers_for_its_entries() -> None:
    form = Form.parse("BT=64,g=float32@T_CONTIG,h0=bfloat16,state_v_first=1")
    assert "g" in form
    assert "beta" not in form
    assert (form.dtype("g"), form.dtype("h0"), form.dtype("beta")) == ("float32", "bfloat16", None)
    assert (form.arrival("g"), form.arrival("h0"), form.arrival("beta")) == (Layout.T_CONTIG, None, None)
    assert (form.integer("BT"), form.integer("BC", 16)) == (64, 16)
    assert form.flag("state_v_first")
    assert not form.flag("g")


def test_a_form_changes_into_another() -> None:
    form = Form.parse("BT=64,beta=bfloat16@OTHER,g=float32@T_CONTIG,h0=1")
    assert form.changed(BT="16", reverse="1").text == "BT=16,beta=bfloat16@OTHER,g=float32@T_CONTIG,h0=1,reverse=1"
    assert form.arriving(Layout.STRIDE_HV).text == "BT=64,beta=bfloat16@STRIDE_HV,g=float32@STRIDE_HV,h0=1"
    assert form.text == "BT=64,beta=bfloat16@OTHER,g=float32@T_CONTIG,h0=1"


def test_every_mistake_of_a_form_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        Form.parse("BT=64,g,=x,BT=32,beta=float32@SIDEWAYS")
    for part in ("'g' is not name=value", "'=x' is not name=value", "'BT' stands twice", "SIDEWAYS", "T_CONTIG"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("T", "pow2", "log2_8"),
    [
        (1, 1, 1),
        (2, 2, 2),
        (3, 4, 3),
        (4, 4, 4),
        (5, 8, 5),
        (16, 16, 16),
        (17, 32, 18),
        (31, 32, 32),
        (1024, 1024, 1024),
        (1025, 2048, 1152),
        (1152, 2048, 1152),
        (1153, 2048, 1280),
        (1921, 2048, 2048),
        (2048, 2048, 2048),
        (2049, 4096, 2304),
    ],
)
def test_bucket_boundaries(T: int, pow2: int, log2_8: int) -> None:
    assert bucket(T, "exact") == T
    assert bucket(T, "pow2") == pow2
    assert bucket(T, "log2_8") == log2_8


@given(st.integers(1, 2**31 - 1), st.sampled_from(["exact", "pow2", "log2_8"]))
def test_bucket_is_an_upper_length_and_its_own_bucket(T: int, rule: str) -> None:
    upper = bucket(T, rule)
    assert T <= upper < 2 * T or T == upper == 1
    assert bucket(upper, rule) == upper
    assert bucket(max(T - 1, 1), rule) <= upper


def test_eight_buckets_an_octave() -> None:
    assert len({bucket(T, "log2_8") for T in range(1025, 2049)}) == 8
    assert len({bucket(T, "pow2") for T in range(1025, 2049)}) == 1


def test_unknown_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="wanted one of exact, pow2, log2_8"):
        bucket(5, "linear")


def test_only_packed_lengths_are_rounded() -> None:
    dense = dv_local.key(T=75)
    packed = replace(dense, varlen=True)
    assert bucketed(dense, "pow2") == dense
    assert bucketed(packed, "pow2") == replace(packed, T=128)
    assert bucketed(packed, "exact") == packed


def test_key_reads_as_people_write_it() -> None:
    text = str(replace(dv_local.key(T=75, varlen=True), V=0))
    assert text == "chunk_bwd_dv_local B=1 T=75 H=1 HV=2 K=16 packed float32 [BT=16,g=float32@STRIDE_HV]"
