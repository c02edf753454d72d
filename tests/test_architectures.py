"""From a model's configuration to a shapes file that warm-up can use, and one message for what cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest
from command import run_here

from layout_tuner.errors import ConfigError
from layout_tuner.integrations.architectures import ARCHITECTURES, REPEATED, load_model, shapes_of
from layout_tuner.spec import registry
from layout_tuner.spec.operands import SIZES
from layout_tuner.spec.shapes import keys, load_shapes, parse_shapes

QWEN = {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}
OLMO = {"model_type": "olmo_hybrid", "hidden_size": 3840, "num_attention_heads": 30}
FLA = {"model_type": "gated_deltanet", "num_heads": 4, "num_v_heads": 8, "head_dim": 64, "expand_v": 2}
KIMI = {"model_type": "kimi_linear", "linear_attn_config": {"num_heads": 32, "head_dim": 128}}


def sizes(row: dict[str, Any]) -> tuple[int, ...]:
    return tuple(row[name] for name in ("H", "HV", "K", "V"))


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (QWEN, (16, 32, 128, 128)),
        ({"model_type": "qwen3_5_moe", "text_config": {"model_type": "qwen3_5_moe_text", "linear_num_value_heads": 64}},
         (16, 64, 128, 128)),
        ({"model_type": "lara_mini"}, (8, 16, 128, 128)),
        (OLMO, (30, 30, 96, 192)),
        (FLA, (4, 8, 64, 128)),
        (KIMI, (32, 32, 128, 128)),
        ({"model_type": "kda"}, (16, 16, 128, 128)),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_sizes_of_published_architectures(config: dict[str, Any], wanted: tuple[int, ...]) -> None:
    rows = shapes_of(config)
    assert {sizes(row) for row in rows if REPEATED not in row["model"]} == {wanted}
    assert {row["dtype"] for row in rows} == {"bfloat16"}


def test_every_architecture_leads_to_keys() -> None:
    for name in ARCHITECTURES:
        wanted, refused = keys(parse_shapes(shapes_of({"model_type": name}, lengths=[128])), "pow2")
        assert wanted or refused, name
        assert all("256" in reason for reason in refused), refused  # flash-linear-attention's default has V = 512


def test_ranks_share_heads_but_those_of_transformers_have_them_all_too() -> None:
    of_two = {sizes(row) for row in shapes_of(QWEN, tp=2) if REPEATED not in row["model"]}
    assert of_two == {(8, 16, 128, 128), (16, 32, 128, 128)}
    (row,) = shapes_of(QWEN, tp=2, callers=["vllm"], batch=3, lengths=[4096])
    assert (sizes(row), row["B"], row["varlen"], row["T"]) == ((8, 16, 128, 128), 1, True, [4096])


def test_callers_that_repeat_queries_and_keys_for_the_value_heads() -> None:
    """Transformers until 5.22 and Megatron do; the others hand over as many heads as there are."""
    heads = {
        caller: [sizes(row)[:2] for row in shapes_of(QWEN, tp=4, callers=[caller])]
        for caller in ("transformers", "megatron", "vllm")
    }
    assert heads == {
        "transformers": [(4, 8), (8, 8), (16, 32), (32, 32)], "megatron": [(8, 8)], "vllm": [(4, 8)],
    }  # fmt: skip
    assert len(shapes_of(OLMO)) == 1


def test_packed_batches_and_dtypes() -> None:
    row, _ = shapes_of(QWEN | {"torch_dtype": "float16"}, packed=True, batch=4)
    assert (row["B"], row["varlen"], row["dtype"]) == (1, True, "float16")
    assert {row["B"] for row in shapes_of(FLA, batch=4, dtype="fp32")} == {4}
    assert {row["caller"] for row in shapes_of(FLA)} == {"fla"}


def test_everything_wrong_is_said_at_once() -> None:
    config = QWEN | {"layer_types": ["full_attention"], "linear_num_key_heads": 5, "dtype": "int8"}
    with pytest.raises(ConfigError) as caught:
        shapes_of(config, tp=3, batch=0, lengths=[0], callers=["nobody"])
    said = str(caught.value)
    for part in ("'nobody'", "batch: wanted", "lengths: wanted", "no such dtype 'int8'", "no linear_attention",
                 "a multiple of the 5 key heads"):  # fmt: skip
        assert part in said
    with pytest.raises(ConfigError, match="5 key heads and 10 value heads cannot be shared by 3 ranks"):
        shapes_of(QWEN | {"linear_num_key_heads": 5, "linear_num_value_heads": 10}, tp=3)
    with pytest.raises(ConfigError, match=r"'llama' is not known \(known: qwen3_next, "):
        shapes_of({"model_type": "llama"})


@pytest.mark.parametrize(
    ("text", "said"), [("{", "not JSON"), ("[]", "wanted a model's configuration"), (None, "No such")]
)
def test_a_file_that_is_no_configuration(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_model(tmp_path)


def test_command_writes_what_warm_up_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    file = tmp_path / "shapes.json"
    wish = ["--tp", "4", "--lengths", "4096,16384", "--caller", "transformers,vllm"]
    done = run_here(["shapes", str(tmp_path), *wish, "-o", str(file)], monkeypatch, capsys)
    assert done.status == 0
    wanted, refused = keys(load_shapes(file), "pow2")
    assert not refused
    spec = registry.lookup("chunk_gated_delta_rule")
    called = [form for name, form in spec.caller_forms.items() if name.partition("/")[0] in ("transformers", "vllm")]
    assert {key.form for _, key in wanted} == set(called)
    assert {key.HV for _, key in wanted} == {8, 32}
    printed = run_here(["shapes", str(tmp_path / "config.json"), *wish], monkeypatch, capsys)
    assert json.loads(printed.out) == json.loads(file.read_text())
    bad = run_here(["shapes", str(tmp_path), "--lengths", "many"], monkeypatch, capsys)
    assert bad.status == 2
    assert "wanted numbers with commas" in bad.err


def test_published_shapes_are_served() -> None:
    """examples/models.json: every row has a model or says that its sizes are unconfirmed, and a kernel."""
    shapes = load_shapes(Path(__file__).parents[1] / "examples" / "models.json")
    assert len(shapes) == 66
    assert all(shape.model for shape in shapes)
    wanted, refused = keys(shapes, "pow2")
    assert not refused
    assert {size for _, key in wanted for size in SIZES if getattr(key, size) < 1} == set()


def test_a_caller_selects_its_forms() -> None:
    row = {"op": "chunk_gated_delta_rule", "T": 20, "H": 1, "K": 16, "dtype": "bf16"}
    spec = registry.lookup("chunk_gated_delta_rule")

    def forms(**more: object) -> set[str]:
        return {key.form.text for _, key in keys(parse_shapes([row | more]), "pow2")[0]}

    def those(*prefixes: str) -> set[str]:
        return {form.text for name, form in spec.caller_forms.items() if name.startswith(prefixes)}

    assert forms() == those("")
    assert forms(caller="megatron") == those("megatron/")
    assert forms(caller="transformers", forms=["training"]) == those("transformers/training")
    assert forms(forms=["vllm", "fla/prefill"]) == those("vllm/", "fla/prefill")
    assert forms(forms=["evaluation"]) == those("transformers/evaluation", "fla/evaluation", "megatron/evaluation")
    wrong: dict[str, dict[str, object]] = {
        "no such caller": {"caller": "nobody"},
        "no form 'vllm/training'": {"caller": "vllm", "forms": ["training"]},
        "no form 'vllm'": {"op": "chunk_fwd_o", "caller": "vllm"},
    }
    for said, more in wrong.items():
        with pytest.raises(ConfigError, match=said):
            parse_shapes([row | more])
