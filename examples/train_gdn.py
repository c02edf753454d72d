"""Train a tiny Gated DeltaNet to repeat a batch of random tokens, with one `enable()` line.

    python examples/train_gdn.py [--steps 100]

It runs on whatever device there is; without an accelerator in Triton's interpreter, which takes seconds a step. Where
flash-linear-attention is installed, the model calls that library, and `enable()` takes its calls over. On an
accelerator the first step also tunes, which that library's own candidates make a minute or two.
"""

from __future__ import annotations

import argparse
import os
import warnings

import torch
from torch import nn

DEVICE = "npu" if hasattr(torch, "npu") else "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

import layout_tuner  # noqa: E402

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what that library finds missing on a CPU
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
except ImportError:
    from layout_tuner.ops import chunk_gated_delta_rule


class GatedDeltaNet(nn.Module):
    """The layer without its short convolutions and output gate: projections, the gated delta rule, a projection."""

    def __init__(self, width: int, heads: int, value_heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.value_heads, self.head_dim = heads, value_heads, head_dim
        self.qkv = nn.Linear(width, (2 * heads + value_heads) * head_dim, bias=False)
        self.gates = nn.Linear(width, 2 * value_heads)
        self.A_log = nn.Parameter(torch.empty(value_heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(torch.full((value_heads,), -4.0))
        self.norm = nn.RMSNorm(head_dim)
        self.out = nn.Linear(value_heads * head_dim, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = self.heads * self.head_dim
        q, k, v = self.qkv(x).split([keys, keys, self.value_heads * self.head_dim], dim=-1)
        g, beta = self.gates(x).chunk(2, dim=-1)
        o, _ = chunk_gated_delta_rule(
            q.unflatten(-1, (self.heads, self.head_dim)),
            k.unflatten(-1, (self.heads, self.head_dim)),
            v.unflatten(-1, (self.value_heads, self.head_dim)),
            g,
            beta,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
        )
        return self.out(self.norm(o).flatten(-2))


class Model(nn.Module):
    """Embedding, one layer with a residual, and the logits of the next token."""

    def __init__(self, vocabulary: int, width: int, heads: int, value_heads: int, head_dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm = nn.RMSNorm(width)
        self.layer = GatedDeltaNet(width, heads, value_heads, head_dim)
        self.logits = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.logits(x + self.layer(self.norm(x)))


def main() -> None:
    """Train, and say where the loss began and ended."""
    from rich.console import Console
    from rich.progress import track

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=8 if DEVICE == "cpu" else 100)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    vocabulary, tokens = 64, (1, 64) if DEVICE == "cpu" else (8, 1024)
    model = Model(vocabulary, width=64, heads=2, value_heads=4, head_dim=32).to(DEVICE)
    batch = torch.randint(vocabulary, tokens, device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []

    layout_tuner.enable()
    for _ in track(range(steps), description=f"training on {DEVICE}", console=Console(stderr=True)):
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
