"""`shapes.json`: what it may hold, and one message for all that it may not."""

import json
from pathlib import Path

import dv_local
import pytest

import layout_tuner
from layout_tuner.config import Config
from layout_tuner.errors import REFUSAL, ConfigError
from layout_tuner.spec import registry
from layout_tuner.spec.shapes import Shape, keys, load_shapes, parse_shapes
from layout_tuner.tuning.inputs import synthesize

CUMSUM = "chunk_local_cumsum"
GOOD = {"op": dv_local.SPEC.name, "T": 20, "H": 1, "K": 16, "dtype": "bf16"}


def complaint(*rows: object) -> str:
    """What is said about rows."""
    with pytest.raises(ConfigError) as caught:
        parse_shapes(list(rows))
    return str(caught.value)


def write(folder: Path, text: str) -> Path:
    file = folder / "shapes.json"
    file.write_text(text)
    return file


@pytest.mark.parametrize("content", [[GOOD], {"shapes": [GOOD]}])
def test_list_or_object(tmp_path: Path, content: object) -> None:
    (shape,) = load_shapes(write(tmp_path, json.dumps(content)))
    assert (shape.B, shape.T, shape.HV, shape.V, shape.dtype, shape.varlen) == (1, 20, None, None, "bfloat16", False)


def test_defaults_and_every_length_become_keys() -> None:
    wanted, refused = keys(parse_shapes([GOOD | {"T": [20, 30]}]), "pow2")
    assert not refused
    assert [key for _, key in wanted] == [
        dv_local.key("BT=64,g=float32@STRIDE_HV", T=T, HV=1, dtype="bfloat16") for T in (20, 30)
    ]


def test_packed_lengths_share_a_bucket() -> None:
    shapes = parse_shapes([GOOD | {"T": [20, 30, 32], "varlen": True}, GOOD | {"T": 30, "cu_seqlens": [0, 9, 30]}])
    assert [key.T for _, key in keys(shapes, "pow2")[0]] == [32]
    assert [key.T for _, key in keys(shapes, "exact")[0]] == [20, 30, 32]


def test_no_op_means_every_op_and_forms_may_be_texts() -> None:
    row = {name: value for name, value in GOOD.items() if name != "op"}
    assert {spec.name for spec, _ in keys(parse_shapes([row]), "pow2")[0]} >= {dv_local.SPEC.name, "chunk_fwd_o"}
    (found,) = keys(parse_shapes([GOOD | {"forms": ["g=float32@OTHER,BT=16"]}]), "pow2")[0]
    assert found[1].form.text == "BT=16,g=float32@OTHER"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_keys_are_those_of_the_calls_they_are_for(dtype: str) -> None:
    row = {"T": 20, "H": 1, "HV": 2, "K": 16, "dtype": dtype}
    wanted, refused = keys(parse_shapes([row, row | {"cu_seqlens": [0, 9, 20]}]), "exact")
    assert not refused
    assert {key.op for _, key in wanted} == set(registry.names())
    for spec, key in wanted:
        assert spec.key(synthesize(spec, key, "cpu")) == key


def test_what_no_kernel_serves_is_said_and_left_out() -> None:
    wanted, refused = keys(parse_shapes([GOOD, GOOD | {"K": 300, "V": 400}]), "pow2")
    assert len(wanted) == 1
    assert "K=300" in refused[0]
    assert "V=400" in refused[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"T": 0}, "T: Input should be greater than or equal to 1, got 0"),
        ({"T": -5}, "T: Input should be greater than or equal to 1, got -5"),
        ({"B": 0}, "B: "),
        ({"T": [20, -1]}, "T.1: "),
        ({"T": []}, "T: wanted a number or a list of numbers, got an empty list"),
        ({"T": "20"}, "T: "),
        ({"T": 20.5}, "T: "),
        ({"K": True}, "K: "),
        ({"H": 2**40}, "H: "),
        ({"H": 4, "HV": 6}, "HV: wanted a multiple of H=4, got 6"),
        ({"dtype": "int8"}, "dtype: no such dtype (one of float32, bfloat16, float16"),
        ({"op": "chunk_bwd_dv"}, "op: no such op (there are "),
        ({"layout": 1}, "layout: unknown field (known: op, B, T, H, HV, K, V"),
        ({"num_warps": 4}, f"num_warps: {REFUSAL}"),
        ({"num_stages": 2}, f"num_stages: {REFUSAL}"),
        ({"B": 2, "varlen": True}, "B: wanted 1 for a packed batch, got 2"),
        ({"varlen": "yes"}, "varlen: "),
        ({"cu_seqlens": [0]}, "cu_seqlens: wanted at least two numbers that never fall"),
        ({"cu_seqlens": [0, 9, 5]}, "cu_seqlens: wanted at least two numbers that never fall"),
        ({"cu_seqlens": [0, 99]}, "cu_seqlens: ends at 99, past T=20"),
        ({"forms": ["trainig"]}, "forms: chunk_bwd_dv_local has no form 'trainig' (it has training)"),
        ({"forms": ["g=float32@UP"]}, "forms: form 'g=float32@UP'"),
        ({"forms": ["BT=16,gg=float32"]}, "forms: form 'BT=16,gg=float32': chunk_bwd_dv_local has no gg (it has A, BT"),
        ({"forms": ["BT=16,num_warps=4"]}, f"forms: form 'BT=16,num_warps=4': {REFUSAL}"),
        ({"forms": ["BT=abc"]}, "forms: form 'BT=abc': BT: wanted one of 16, 32, 64, got 'abc'"),
        ({"forms": ["BT=48"]}, "forms: form 'BT=48': BT: wanted one of 16, 32, 64, got '48'"),
        ({"forms": ["BT=16,g=int8@OTHER"]}, "forms: form 'BT=16,g=int8@OTHER': g: wanted one of float32@STRIDE_HV, "),
        ({"forms": ["BT=16,g=1"]}, "forms: form 'BT=16,g=1': g: wanted one of float32@STRIDE_HV, "),
        (
            {"forms": ["BT=16,A=int8"]},
            "forms: form 'BT=16,A=int8': A: wanted one of 1, float32, bfloat16, float16, got",
        ),
        ({"op": CUMSUM, "forms": ["reverse=7"]}, "forms: form 'reverse=7': reverse: wanted one of 0, 1, got '7'"),
        (
            {"op": CUMSUM, "forms": ["output_dtype=int8"]},
            "forms: form 'output_dtype=int8': output_dtype: wanted one of",
        ),
        ({"op": CUMSUM, "forms": ["BT=64"]}, f"forms: form 'BT=64': g: missing, no call of {CUMSUM} is without"),
        ({"op": None, "forms": ["BT=abc"]}, "forms: no op has a form 'BT=abc'"),
        ({"forms": []}, "forms: wanted names of forms, or none of this field for all of them, got an empty list"),
        ({"op": None, "forms": ["trainig"]}, "forms: no op has a form 'trainig'"),
    ],
    ids=str,
)
def test_bad_field(change: dict[str, object], said: str) -> None:
    message = complaint(GOOD, GOOD | change)
    assert f"row 1: {said}" in message
    assert "row 0" not in message


def test_every_bad_value_of_every_form_at_once() -> None:
    message = complaint(GOOD | {"forms": ["BT=abc,g=int8@STRIDE_HV,gg=1", "A=x,BT=16"]})
    for part in ("BT: wanted", "g: wanted", "has no gg", "A: wanted"):
        assert part in message


def test_every_form_of_every_op_is_a_form() -> None:
    for name in registry.names():
        spec = registry.lookup(name)
        assert [spec.form_named(form.text) for form in spec.every_form] == list(spec.every_form)


def test_a_form_is_written_as_a_call_writes_it() -> None:
    spec = registry.lookup(CUMSUM)
    text = "BT=64,g=float32@STRIDE_HV,output_dtype=float32"
    assert spec.form_named(f"{text},reverse=0").text == spec.form_named(text).text == text
    assert spec.form_named(f"{text},reverse=1").text == f"{text},reverse=1"
    assert spec.form_named("g=float32@STRIDE_HV").text == text
    assert spec.form_named("g=float32").text == text, "a dtype alone arrives as models have it"


@pytest.mark.parametrize("missing", ["T", "H", "K", "dtype"])
def test_missing_field(missing: str) -> None:
    assert f"row 0: {missing}: missing" in complaint({name: GOOD[name] for name in GOOD if name != missing})


@pytest.mark.parametrize("row", [3, None, "x", [1]])
def test_row_that_is_no_object(row: object) -> None:
    assert f"row 1: wanted an object, got {row!r}" in complaint(GOOD, row)


def test_every_bad_row_and_field_in_one_message() -> None:
    message = complaint({"T": -1, "K": 0, "dtype": "f8"}, GOOD, GOOD | {"H": 4, "HV": 6, "B": 2, "varlen": True}, {})
    for part in ("row 0: T", "row 0: K", "row 0: dtype", "row 0: H: missing", "row 2: HV", "row 2: B", "row 3: T"):
        assert part in message
    assert "row 1" not in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "no shapes in it"),
        ('{"shapes": []}', "no shapes in it"),
        ("{}", "wanted"),
        ("3", "wanted"),
        ('{"shapes": {}}', "wanted"),
        ('{"shape": []}', "wanted"),
        ("[NaN]", "row 0"),
    ],
    ids=lambda text: text[:12],
)
def test_bad_file(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"shapes.json") as caught:
        load_shapes(write(tmp_path, text))
    assert said in str(caught.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ConfigError, match=path.name):
            load_shapes(path)


def test_bad_rows_write_nothing(tmp_path: Path) -> None:
    file = write(tmp_path, json.dumps([GOOD | {"HV": 2}, GOOD | {"T": 0}]))
    with pytest.raises(ConfigError):
        layout_tuner.warmup(file, config=Config(), cache=tmp_path / "cache.sqlite", device="cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["shapes.json"]


def test_example_is_small_and_good() -> None:
    shapes = load_shapes(Path(__file__).parents[1] / "examples" / "shapes.json")
    wanted, refused = keys(shapes, "pow2")
    assert wanted
    assert not refused
    assert all(isinstance(shape, Shape) for shape in parse_shapes(shapes))
    assert max(key.B * key.T * key.HV for _, key in wanted) <= 1024
