"""Inputs of Kimi Delta Attention, and its stages put together by hand, forward and backward."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from layout_tuner import ops
from layout_tuner.device import driver
from layout_tuner.launch.prepared import Prepared
from layout_tuner.spec import registry
from layout_tuner.spec.declaration import Problem
from layout_tuner.spec.layouts import Layout, relayout
from layout_tuner.spec.operands import Call

RCP_LN2 = 1.0 / math.log(2.0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes and kinds of one set of inputs; gates are natural logarithms."""

    B: int = 1
    T: int = 20
    H: int = 1
    HV: int = 2
    K: int = 16
    V: int = 16
    BT: int = 16
    cu: tuple[int, ...] | None = None
    gate: float = 1.0
    state: bool = False
    v_first: bool = False
    seed: int = 0
    equal_keys: bool = False
    beta: float | None = None
    gate_of_all: float | None = None

    def __str__(self) -> str:
        named = {name: value for name, value in vars(self).items() if value != Case.__dataclass_fields__[name].default}
        return ",".join(f"{name}={value}" for name, value in named.items()) or "plain"

    @property
    def starts(self) -> torch.Tensor | None:
        return None if self.cu is None else torch.tensor(self.cu, dtype=torch.int32)

    def inputs(self, device: torch.device) -> dict[str, torch.Tensor | None]:
        """q, k, v, g, beta, h0, do and dht in fp32."""
        generator = torch.Generator("cpu").manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cpu")

        N = self.B if self.cu is None else len(self.cu) - 1
        state = (N, self.HV, *((self.V, self.K) if self.v_first else (self.K, self.V)))
        found: dict[str, torch.Tensor | None] = {
            "q": torch.nn.functional.normalize(normal(self.B, self.T, self.H, self.K), dim=-1),
            "k": torch.nn.functional.normalize(normal(self.B, self.T, self.H, self.K), dim=-1),
            "v": normal(self.B, self.T, self.HV, self.V),
            "g": self.gate * torch.nn.functional.logsigmoid(normal(self.B, self.T, self.HV, self.K)),
            "beta": normal(self.B, self.T, self.HV).sigmoid(),
            "h0": normal(*state) if self.state else None,
            "do": normal(self.B, self.T, self.HV, self.V),
            "dht": normal(*state) if self.state else None,
        }
        if self.equal_keys:
            found["k"] = found["k"][:, :1].expand(-1, self.T, -1, -1).contiguous()
        if self.beta is not None:
            found["beta"] = torch.full_like(found["beta"], self.beta)
        if self.gate_of_all is not None:
            found["g"] = torch.full_like(found["g"], self.gate_of_all)
        return {name: None if x is None else x.to(device) for name, x in found.items()}


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The op made of its stages, as a caller of flash-linear-attention's would put them together.

    Attributes:
        case: Sizes and kinds.
        safe_gate: Whether the stages are told that the gate is bounded.
        layout: In which G is handed from stage to stage.
    """

    case: Case
    safe_gate: bool = False
    layout: Layout = Layout.STRIDE_HV
    scale: float = 0.3
    kept: dict[str, torch.Tensor] = field(default_factory=dict)

    def packed(self, like: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """The starts of the sequences, where another tensor is."""
        starts = self.case.starts
        return {"cu_seqlens": None if starts is None else starts.to(like.device)}

    def forward(self, q, k, v, g, beta, h0, **_):  # type: ignore[no-untyped-def]
        """(o, ht), and all that a backward needs in `kept`."""
        BT, packed = self.case.BT, self.packed(q)
        G = relayout(ops.chunk_local_cumsum_channels(g, BT, scale=RCP_LN2, **packed), self.layout)
        w, u, qg, kg, Aqk, Akk = ops.chunk_kda_fwd_intra(
            q, k, v, G, beta, self.scale, chunk_size=BT, safe_gate=self.safe_gate, disable_recompute=True, **packed
        )
        h, v_new, ht = ops.chunk_gated_delta_rule_fwd_h(
            kg, w, u, gk=G, initial_state=h0, output_final_state=True, chunk_size=BT,
            state_v_first=self.case.v_first, **packed,
        )  # fmt: skip
        o = ops.chunk_gla_fwd_o_gk(
            q, v_new, G, Aqk, h, self.scale, state_v_first=self.case.v_first, chunk_size=BT, **packed
        )
        self.kept.update(G=G, w=w, qg=qg, kg=kg, Aqk=Aqk, Akk=Akk, h=h, v_new=v_new)
        return o, ht

    def backward(self, q, k, v, beta, h0, do, dht, **_):  # type: ignore[no-untyped-def]
        """Gradients of q, k, v, g, beta and h0."""
        x, BT, options = self.kept, self.case.BT, {"chunk_size": self.case.BT, **self.packed(q)}
        states = {"state_v_first": self.case.v_first}
        dAqk, dv_local = ops.chunk_kda_bwd_dAv(q, k, x["v_new"], do, x["Aqk"], self.scale, **options)
        dh, dh0, du = ops.chunk_gated_delta_rule_bwd_dhu(
            x["qg"], x["kg"], x["w"], do, dv_local, gk=x["G"], h0=h0, dht=dht, scale=self.scale, **states, **options
        )
        dq, dk, dv, db, dG, dAkk = ops.chunk_kda_bwd_wy_dqkg_fused(
            q, k, v, x["v_new"], x["G"], beta, x["Akk"], x["h"], do, dh, du, self.scale, **states, **options
        )
        dq, dk, db, dG = ops.chunk_kda_bwd_intra(
            q, k, x["G"], beta, dAqk, dAkk, dq, dk, db, dG, safe_gate=self.safe_gate, **options
        )
        dg = ops.chunk_local_cumsum_channels(dG, BT, reverse=True, **self.packed(q))
        dq, dk = (grad.unflatten(2, (self.case.H, -1)).sum(3) for grad in (dq, dk))
        return {"dq": dq, "dk": dk, "dv": dv, "dg": dg, "dbeta": db, "dh0": dh0}


def variant(op: str, name: str) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    """A variant of an op as a function of its operands, options, scalars and `cu_seqlens`, in the default's layouts."""
    spec = registry.lookup(op)

    def run(tensors, options=(), scalars=(), cu_seqlens=None):  # type: ignore[no-untyped-def]
        call = Call(tensors=tensors, options=options, scalars=scalars, cu_seqlens=cu_seqlens)
        key = spec.key(call)
        chip = driver.chip(tensors[0].device)
        candidate = next(each for each in spec.candidates(key) if each.variant == name)
        prepared = Prepared(spec, Problem(key=key, chip=chip), candidate, call)
        return prepared(tensors, scalars, cu_seqlens, None)

    return run
