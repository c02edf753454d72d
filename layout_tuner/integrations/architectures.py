"""From a model's own configuration to the shapes its linear attention layers call: `tuner shapes config.json`.

The names of fields and their defaults are those of transformers 5.24 and flash-linear-attention 0.6.0, of Kimi-Linear
those of its published configuration; another release that keeps its fields is read as well.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..files import read_file
from ..spec.operands import DTYPES, SHORT_DTYPES
from ..spec.shapes import callers as known_callers

Configuration = Mapping[str, Any]

# How serving engines and others split heads over tensor-parallel ranks; transformers' own plan gathers them again, so
# that each of its ranks has all of them.
GATHERS = "transformers"
SERVING = ("vllm",)
# Who repeats queries and keys for each value head before the call: Megatron always, transformers until 5.22.
REPEATED = "queries and keys repeated"
REPEATS = {"transformers": (False, True), "megatron": (True,)}
GATED_DELTA_RULE = "chunk_gated_delta_rule"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Sizes of a model's linear attention layers.

    Attributes:
        H, HV: Heads of queries and keys, and of values.
        K, V: Their dimensions.
        library: Whose configuration it is.
        channels: Whether the gate has a value for each channel (KDA), not for each head.
    """

    H: int
    HV: int
    K: int
    V: int
    library: str
    channels: bool = False


def _qwen(config: Configuration) -> Layer:
    return Layer(
        H=config.get("linear_num_key_heads", 16),
        HV=config.get("linear_num_value_heads", 32),
        K=config.get("linear_key_head_dim", 128),
        V=config.get("linear_value_head_dim", 128),
        library="transformers",
    )


def _lara(config: Configuration) -> Layer:
    defaults: dict[str, Any] = {"linear_num_key_heads": 8, "linear_num_value_heads": 16}
    return _qwen(defaults | dict(config))


def _olmo(config: Configuration) -> Layer:
    heads = config.get("num_attention_heads", 30)
    H = config.get("linear_num_key_heads") or heads
    K = config.get("linear_key_head_dim") or int(0.75 * config.get("hidden_size", 3840) / H)
    return Layer(
        H=H,
        HV=config.get("linear_num_value_heads") or heads,
        K=K,
        V=config.get("linear_value_head_dim") or 2 * K,
        library="transformers",
    )


def _kimi(config: Configuration) -> Layer:
    linear = config.get("linear_attn_config") or {}
    H: Any = linear.get("num_heads", config.get("linear_num_heads", 32))
    K: Any = linear.get("head_dim", config.get("linear_head_dim", 128))
    return Layer(H=H, HV=H, K=K, V=K, library="transformers", channels=True)


def _fla(config: Configuration, *, heads: int, head_dim: int, expand_v: float, channels: bool = False) -> Layer:
    H = config.get("num_heads", heads)
    K = config.get("head_dim", head_dim)
    V = int(K * config.get("expand_v", expand_v))
    return Layer(H=H, HV=config.get("num_v_heads") or H, K=K, V=V, library="fla", channels=channels)


def _fla_gated_delta_net(config: Configuration) -> Layer:
    return _fla(config, heads=6, head_dim=256, expand_v=2.0)


def _fla_kda(config: Configuration) -> Layer:
    return _fla(config, heads=16, head_dim=128, expand_v=1.0, channels=True)


ARCHITECTURES: Mapping[str, Callable[[Configuration], Layer]] = {
    "qwen3_next": _qwen,
    "qwen3_5": _qwen,
    "qwen3_5_text": _qwen,
    "qwen3_5_moe": _qwen,
    "qwen3_5_moe_text": _qwen,
    "lara_mini": _lara,
    "olmo_hybrid": _olmo,
    "kimi_linear": _kimi,
    "gated_deltanet": _fla_gated_delta_net,
    "kda": _fla_kda,
}


def load_model(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A model's configuration: `config.json`, or the folder that has it.

    Raises:
        ConfigError: It cannot be read, or is no JSON object.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(read_file(file).decode())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(
            f"{file}: wanted a model's configuration, an object with model_type, got {type(config).__name__}"
        )
    return config


def shapes_of(
    config: Configuration,
    *,
    tp: int = 1,
    batch: int = 1,
    lengths: Sequence[int] = (2048, 4096),
    packed: bool = False,
    callers: Sequence[str] = (),
    dtype: str | None = None,
) -> list[dict[str, Any]]:
    """The rows of a shapes file that a model's linear attention layers need.

    Args:
        config: The model's configuration, as its `config.json` has it.
        tp: Tensor-parallel ranks that share the heads.
        batch: B of a dense batch.
        lengths: Every T; of a packed batch the tokens of all its sequences.
        packed: Whether batches are packed (`cu_seqlens`); what serving engines prefill always is.
        callers: The libraries that run the model; empty: the one whose configuration it is.
        dtype: Of the model's tensors; None: what the configuration says, else bfloat16.

    Raises:
        ConfigError: An architecture without such layers or an unknown one, sizes that cannot be, heads that ranks
            cannot share, unknown callers; everything wrong in one message.
    """
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) else config
    name = inner.get("model_type") or config.get("model_type")
    reader = ARCHITECTURES.get(name) if isinstance(name, str) else None
    faults = [f"no such caller {each!r} (there are {', '.join(known)})"
              for known in [known_callers()] for each in callers if each not in known]  # fmt: skip
    faults += [f"{what}: wanted at least 1, got {value}" for what, value in (("tp", tp), ("batch", batch)) if value < 1]
    faults += [f"lengths: wanted numbers from 1 on, got {value}" for value in lengths if value < 1]
    said = dtype or inner.get("dtype") or inner.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    main = SHORT_DTYPES.get(str(said), str(said).removeprefix("torch.")) if said else "bfloat16"
    if main not in DTYPES:
        faults.append(f"dtype: no such dtype {said!r} (one of {', '.join([*DTYPES, *SHORT_DTYPES])})")
    if reader is None:
        faults.append(f"model_type: {name!r} is not known (known: {', '.join(ARCHITECTURES)})")
        raise ConfigError("no shapes of this model:\n  " + "\n  ".join(faults))
    types = inner.get("layer_types")
    if isinstance(types, list) and "linear_attention" not in types:
        faults.append("layer_types: no linear_attention among them, so nothing here is called")
    layer = reader(inner)
    sizes = {"H": layer.H, "HV": layer.HV, "K": layer.K, "V": layer.V}
    wrong = [f"{size}: wanted a number from 1 on, got {value!r}" for size, value in sizes.items()
             if not isinstance(value, int) or value < 1]  # fmt: skip
    if not wrong and layer.HV % layer.H:
        wrong.append(f"value heads: wanted a multiple of the {layer.H} key heads, got {layer.HV}")
    if not wrong and tp >= 1 and (layer.H % tp or layer.HV % tp):
        wrong.append(f"tp: {layer.H} key heads and {layer.HV} value heads cannot be shared by {tp} ranks")
    if faults or wrong:
        raise ConfigError("no shapes of this model:\n  " + "\n  ".join([*faults, *wrong]))
    rows = []
    for caller in callers or (layer.library,):
        shared = dict.fromkeys((tp, 1) if caller == GATHERS else (tp,))
        for ranks, repeated in itertools.product(shared, REPEATS.get(caller, (False,))):
            if repeated and layer.H == layer.HV and len(REPEATS[caller]) > 1:
                continue  # the same again
            whose = f"{name}, heads of one of {ranks} ranks" if ranks > 1 else f"{name}, all heads"
            whose += f", {REPEATED}" if repeated and layer.H != layer.HV else ""
            heads = layer.HV if repeated else layer.H
            common = {
                "B": 1 if packed or caller in SERVING else batch, "T": list(lengths), "H": heads // ranks,
                "HV": layer.HV // ranks, "K": layer.K, "V": layer.V, "dtype": main,
                "varlen": packed or caller in SERVING, "model": whose,
            }  # fmt: skip
            rows += [called | common for called in _called(layer, caller)]
    return rows


def _called(layer: Layer, caller: str) -> list[dict[str, Any]]:
    """The ops that a library calls for such a layer, with the forms of its calls."""
    if not layer.channels:
        return [{"op": GATED_DELTA_RULE, "caller": caller}]
    if caller in SERVING:
        form = "BT=64,gk=float32@STRIDE_HV,initial_state=float32,output_final_state=1,state_v_first=1"
        return [{"op": "chunk_gated_delta_rule_fwd_h", "forms": [form]}]
    stages = ("chunk_gated_delta_rule_fwd_h", "chunk_gated_delta_rule_bwd_dhu")
    return [{"op": op, "forms": ["BT=64,gk=float32@STRIDE_HV"]} for op in stages]
