"""What the chain does to its inputs before the first stage, and to their gradients after the last: host side.

`RowNorm` scales queries and keys to length 1. `BetaGate` activates beta, widens it and turns it into the layout of the
chain.
"""

from __future__ import annotations

import torch

from layout_tuner.kernels import beta as beta_kernels
from layout_tuner.kernels import l2norm as l2norm_kernels
from layout_tuner.kernels import tiling

from ...launch import launcher
from ...launch.direct import Constant
from ...spec import layouts
from ...spec.declaration import Problem
from ...spec.layouts import Layout

L2NORM_EPS = 1e-6
BETA_TOKENS = 64

Tensor = torch.Tensor


class RowNorm:
    """Rows divided by `sqrt(sum(x ** 2) + 1e-6)`, and the gradient through that.

    Args:
        problem: Key and chip of the whole op.
    """

    def __init__(self, problem: Problem) -> None:
        key, chip = problem.key, problem.chip
        self.rows, BK = tiling.l2norm_tiles(key.K, chip.tiles)
        constants: dict[str, Constant] = dict(H=key.H, K=key.K, BR=self.rows, BK=BK, IS_VARLEN=key.varlen)
        self._forward = launcher.bind(l2norm_kernels.l2norm_fwd, **constants)
        self._backward = launcher.bind(l2norm_kernels.l2norm_bwd, **constants)
        self._programs = chip.vector_programs

    def forward(self, x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rows of length 1 `[B, T, H, K]`, and the reciprocal of what they were divided by `[B, T, H]`, fp32."""
        y, rstd = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
        tasks, N = self._tasks(rstd, cu_seqlens)
        self._forward(min(tasks, self._programs), x, y, rstd, cu_seqlens, L2NORM_EPS, N, rstd.numel(), tasks)
        return y, rstd

    def backward(self, y: Tensor, rstd: Tensor, dy: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """The gradient of x from that of y."""
        dx = torch.empty_like(y)
        tasks, N = self._tasks(rstd, cu_seqlens)
        self._backward(min(tasks, self._programs), y, rstd, dy, dx, cu_seqlens, N, rstd.numel(), tasks)
        return dx

    def _tasks(self, rstd: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int]:
        return -(-rstd.numel() // self.rows), 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1


class BetaGate:
    """beta as the stages read it, and its gradient as the caller wants it; turned on chip where layouts differ.

    Args:
        problem: Key and chip of the whole op.
        layout: Of beta and its gradient between the stages.
    """

    def __init__(self, problem: Problem, layout: Layout) -> None:
        key, chip, form = problem.key, problem.chip, problem.form
        self.layout, self.sigmoid = layout, form.flag("use_beta_sigmoid_in_kernel")
        arrives = layouts.as_read(form.arrival("beta") or Layout.STRIDE_HV)
        # The dtype that the stages see depends on whether beta is moved, hence on the layout: the gradient's may not.
        self.dtype: torch.dtype = getattr(torch, form.dtype("beta") or key.dtype)
        BH = tiling.head_block(key.HV, chip.tiles)
        t_contig = layout is Layout.T_CONTIG
        constants: dict[str, Constant] = dict(
            HV=key.HV,
            BT=BETA_TOKENS,
            BH=BH,
            RANGE=2.0 if form.flag("allow_neg_eigval") else 1.0,
            USE_SIGMOID=self.sigmoid,
            Y_T_CONTIG=t_contig,
        )
        self._forward = launcher.bind(beta_kernels.beta_fwd, BETA_T_CONTIG=arrives is Layout.T_CONTIG, **constants)
        self._backward = launcher.bind(beta_kernels.beta_bwd, DY_T_CONTIG=t_contig, DBETA_T_CONTIG=False, **constants)
        self._head_blocks, self._programs = -(-key.HV // BH), chip.vector_programs

    def forward(self, beta: Tensor) -> Tensor:
        """beta `[B, T, HV]` through its sigmoid where asked for, in the chain's layout; fp32, or beta itself."""
        if not self.sigmoid and not layouts.must_move(beta, self.layout):
            return beta
        y, T, row_blocks, tasks = self._output(beta, self.layout, torch.float32)
        self._forward(min(tasks, self._programs), beta, y, T, row_blocks, tasks)
        return y

    def backward(self, y: Tensor, dy: Tensor) -> Tensor:
        """The gradient of the caller's beta, row-major and in its dtype, from that of what `forward` returned."""
        if not self.sigmoid and dy.dtype is self.dtype and not layouts.must_move(dy, Layout.STRIDE_HV):
            return dy
        dbeta, T, row_blocks, tasks = self._output(dy, Layout.STRIDE_HV, self.dtype)
        self._backward(min(tasks, self._programs), y, dy, dbeta, T, row_blocks, tasks)
        return dbeta

    def _output(self, like: Tensor, layout: Layout, dtype: torch.dtype) -> tuple[Tensor, int, int, int]:
        """An output, tokens of a row, blocks of tokens in a row, and tasks."""
        B, T, HV = like.shape
        row_blocks = -(-T // BETA_TOKENS)
        made = layouts.empty((B, T, HV), layout, dtype, like.device)
        return made, T, row_blocks, B * row_blocks * self._head_blocks
