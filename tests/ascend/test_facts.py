"""Counts, on small modules written by hand."""

import json

import pytest

from layout_tuner.ascend.facts import KernelFacts, analyse, bursts_of
from layout_tuner.ascend.mlir.parser import parse_module
from layout_tuner.ascend.mlir.walk import Walk

GM = "#hivm.address_space<gm>"
UB = "#hivm.address_space<ub>"
DYNAMIC = -(1 << 63)


def constant(name: str, value: int, kind: str = "index") -> str:
    return f'{name} = "arith.constant"() <{{value = {value} : {kind}}}> : () -> {kind}'


def view(name: str, source: str, offset: str, size: int, stride: int) -> str:
    """`name`: `size` elements of argument `source`, `stride` apart."""
    return (
        f'{name} = "memref.reinterpret_cast"({source}, {offset}) <{{operandSegmentSizes = array<i32: 1, 1, 0, 0>, '
        f"static_offsets = array<i64: {DYNAMIC}>, static_sizes = array<i64: {size}>, "
        f"static_strides = array<i64: {stride}>}}> : (memref<?xf32, {GM}>, index) -> "
        f"memref<{size}xf32, strided<[{stride}], offset: ?>, {GM}>"
    )


def call(callee: str, operands: str, types: str, line: int) -> str:
    return f'"func.call"({operands}) <{{callee = @{callee}}}> : ({types}) -> () loc("k.py":{line}:0)'


def module(body: str, arguments: str = "") -> str:
    """A device function of two pointers and an integer, after workspace and before the grid."""
    return f"""
"builtin.module"() ({{
  "func.func"() <{{function_type = () -> index, sym_name = "k_infer_workspace_shape_function"}}> ({{
    {constant("%w", 4096)}
    "func.return"(%w) : (index) -> ()
  }}) {{hacc.function_kind = #hacc.function_kind<HOST>}} : () -> ()
  "func.func"() <{{function_type = () -> (), sym_name = "k", arg_attrs = [{{hacc.arg_type = \
#hacc.arg_type<workspace>}}, {{}}, {{}}, {{}}, {{}}, {{}}, {{}}]}}> ({{
  ^bb0(%ws: memref<?xi8, {GM}>, %x: memref<?xf32, {GM}>, %y: memref<?xf32, {GM}>, %n: i32, \
%gx: i32, %gy: i32, %gz: i32):
    {constant("%c0", 0)}
    {constant("%c1", 1)}
    {constant("%at", 512, "i64")}
    %buffer = "hivm.hir.pointer_cast"(%at) : (i64) -> memref<64xf32, {UB}>
    %id = "hivm.hir.get_block_idx"() : () -> i64
    %program = "arith.index_cast"(%id) : (i64) -> index
    %count = "arith.index_cast"(%n) : (i32) -> index
    {body}
    "func.return"() : () -> ()
  }}) {{hacc.entry = true, hivm.func_core_type = #hivm.func_core_type<AIV>}} : () -> ()
}}) : () -> ()
"""


def facts(body: str, n: int = 3, grid: int = 4, **settings: object) -> KernelFacts:
    return analyse(module(body), {"x": None, "y": None, "n": n}, grid, **settings)  # type: ignore[arg-type]


LOAD = call(
    "load_gm_to_ubuf_1d_float",
    "%v, %buffer",
    f"memref<64xf32, strided<[8], offset: ?>, {GM}>, memref<64xf32, {UB}>",
    10,
)
STORE = call("store_ubuf_to_gm_1d_float", "%buffer, %w", f"memref<64xf32, {UB}>, memref<64xf32, {GM}>", 20)
VECTOR = call("vmuls_vs_1d_float", "%buffer, %buffer", f"memref<64xf32, {UB}>, memref<64xf32, {UB}>", 15)


def loop(body: str, start: str = "%c0") -> str:
    return f"""
    "scf.for"({start}, %count, %c1) ({{
    ^bb0(%i: index):
      {body}
      "scf.yield"() : () -> ()
    }}) : (index, index, index) -> ()"""


def test_a_loop_of_transfers() -> None:
    body = loop("\n".join([view("%v", "%x", "%i", 64, 8), LOAD, VECTOR, view("%w", "%y", "%i", 64, 1), STORE]))
    found = facts(body)
    assert found.summary() == {
        "ub_bytes": 512 + 256,
        "l1_bytes": 0,
        "l0c_bytes": 0,
        "bytes_in": 3 * 256,
        "bytes_out": 3 * 256,
        "workspace_bytes": 0,
        "bursts": 3 * 64 + 3,
        "short_bursts": 3 * 64,
        "short_burst_bytes": 3 * 256,
        "strided_loads": 3,
        "strided_stores": 0,
        "deinterleaves": 0,
        "transposes": 0,
        "scalarised_elements": 0,
        "scalar_loads": 0,
        "syncs": 0,
        "vector_calls": 3,
        "cube_calls": 0,
        "flops": 0,
    }
    load, store = found.transfers
    assert (load.route, load.argument, load.pattern, load.source) == ("GM->UB", "x", "strided", "k.py:10")
    assert (store.route, store.argument, store.pattern, store.source) == ("UB->GM", "y", "contiguous", "k.py:20")
    assert found.workspace_plan_bytes == 4096
    assert json.loads(json.dumps(found.to_json()))["summary"]["strided_loads"] == 3


def test_programs_share_tasks() -> None:
    body = loop("\n".join([view("%v", "%x", "%i", 64, 1), LOAD]), start="%program")
    assert facts(body, n=4).summary()["bursts"] == 4
    assert facts(body, n=4, programs=(2,)).summary()["bursts"] == 2
    assert facts(body, n=4, programs=(0, 1, 2, 3), tasks=10).summary()["bursts"] == 1.0


def test_workspace_is_counted_apart() -> None:
    body = f"""
    %v = "memref.view"(%ws, %c0) : (memref<?xi8, {GM}>, index) -> memref<64xf32, {GM}>
    {LOAD.replace("strided<[8], offset: ?>, ", "")}"""
    found = facts(body).summary()
    assert (found["bytes_in"], found["workspace_bytes"]) == (0, 256)


def test_branches_and_unknown_conditions() -> None:
    def branch(condition: str) -> str:
        return f"""
    {view("%v", "%x", "%c0", 64, 1)}
    {condition}
    "scf.if"(%c) ({{
      {LOAD}
      "scf.yield"() : () -> ()
    }}, {{
    }}) : (i1) -> ()"""

    compare = f"""{constant("%three", 3, "i32")}
    %c = "arith.cmpi"(%n, %three) <{{predicate = 5 : i64}}> : (i32, i32) -> i1"""
    assert facts(branch(compare), n=3).summary()["bursts"] == 1
    assert facts(branch(compare), n=2).summary()["bursts"] == 0
    data = f"""%d = "memref.load"(%x, %c0) : (memref<?xf32, {GM}>, index) -> f32
    %c = "arith.cmpf"(%d, %d) <{{predicate = 1 : i64}}> : (f32, f32) -> i1"""
    found = facts(branch(data))
    assert found.summary()["bursts"] == 0
    assert found.summary()["scalar_loads"] == 1
    assert [count.name for count in found.unknown] == ["scf.if"]


def test_loops_over_elements_are_not_iterated() -> None:
    body = loop(
        f"""%e = "memref.load"(%buffer, %i) : (memref<64xf32, {UB}>, index) -> f32
      %f = "arith.mulf"(%e, %e) : (f32, f32) -> f32
      "memref.store"(%f, %buffer, %i) : (f32, memref<64xf32, {UB}>, index) -> () loc("k.py":7:0)"""
    )
    found = facts(body, n=1_000_000_000)
    assert [(count.name, count.source, count.count) for count in found.scalarised] == [("mulf", "k.py:7", 1e9)]


def test_blocks_and_branches_of_llvm() -> None:
    body = f"""
    {constant("%z", 0, "i32")}
    {constant("%one", 1, "i32")}
    {view("%v", "%x", "%c0", 64, 1)}
    "cf.br"(%z)[^bb1] : (i32) -> ()
  ^bb1(%k: i32):
    %more = "llvm.icmp"(%k, %n) <{{predicate = 2 : i64}}> : (i32, i32) -> i1
    "cf.cond_br"(%more)[^bb2, ^bb3] <{{operandSegmentSizes = array<i32: 1, 0, 0>}}> : (i1) -> ()
  ^bb2:
    {LOAD}
    %next = "llvm.add"(%k, %one) : (i32, i32) -> i32
    "cf.br"(%next)[^bb1] : (i32) -> ()
  ^bb3:"""
    assert facts(body, n=5).summary()["bursts"] == 5


def test_contents_of_integer_arrays_steer() -> None:
    text = module(
        f"""
    %first = "memref.load"(%y, %c1) : (memref<?xf32, {GM}>, index) -> index
    {view("%v", "%x", "%first", 64, 1)}
    "scf.for"(%c0, %first, %c1) ({{
    ^bb0(%i: index):
      {LOAD}
      "scf.yield"() : () -> ()
    }}) : (index, index, index) -> ()"""
    )
    assert analyse(text, {"x": None, "y": [9, 2, 7], "n": 0}, 1).summary()["bursts"] == 2


def test_arithmetic_wraps_and_truncates() -> None:
    body = f"""
    {constant("%big", 2147483647, "i32")}
    {constant("%one", 1, "i32")}
    {constant("%two", 2, "i32")}
    %over = "arith.addi"(%big, %one) : (i32, i32) -> i32
    %half = "arith.divsi"(%over, %two) : (i32, i32) -> i32
    %rest = "arith.remsi"(%n, %two) : (i32, i32) -> i32
    %last = "arith.constant"() <{{value = true}}> : () -> i1
    "test.end"(%over, %half, %rest) : (i32, i32, i32) -> ()"""
    (function,) = [f for f in parse_module(module(body)).regions[0][0].operations if f.attributes["sym_name"] == "k"]
    walk = Walk(function, {"x": None, "y": None, "n": -7}, 1, visitor=None)  # type: ignore[arg-type]
    walk.run(0)
    end = next(o for o in function.walk() if o.name == "test.end")
    assert [walk.value(operand) for operand in end.operands] == [-(1 << 31), -(1 << 30), -1]


@pytest.mark.parametrize(
    ("sizes", "strides", "bits", "wanted"),
    [
        ((64,), (1,), 32, (1, 256, "contiguous")),
        ((64,), (8,), 32, (64, 4, "strided")),
        ((64, 64), (256, 1), 16, (64, 128, "rows")),
        ((64, 64), (64, 1), 16, (1, 8192, "contiguous")),
        ((4, 8, 16), (1024, 16, 1), 16, (4, 256, "rows")),
        ((1, 64, 1), (999, 1, 7), 16, (1, 128, "contiguous")),
        ((64, 1), (8, 1), 32, (64, 4, "strided")),
        ((0, 64), (64, 1), 16, (0, 0, "contiguous")),
        ((1,), (8,), 32, (1, 4, "contiguous")),
        ((16,), (1,), 1, (1, 2, "contiguous")),
    ],
)
def test_bursts(sizes: tuple[int, ...], strides: tuple[int, ...], bits: int, wanted: tuple[int, int, str]) -> None:
    assert bursts_of(sizes, strides, bits) == wanted


def test_memory_that_no_followed_operation_gave() -> None:
    counted = facts(
        f"""
        %m = "some.operation"() : () -> memref<4xf32, {GM}>
        %e = "memref.load"(%m, %c0) : (memref<4xf32, {GM}>, index) -> f32 loc("k.py":5:0)
        "memref.store"(%e, %m, %c0) : (f32, memref<4xf32, {GM}>, index) -> () loc("k.py":6:0)
        %part = "memref.collapse_shape"(%m) <{{reassociation = [[0]]}}> : (memref<4xf32, {GM}>) -> memref<4xf32, {GM}>
        """
    )
    assert [(load.count, load.source) for load in counted.scalar_loads] == [(1, "k.py:5")]
