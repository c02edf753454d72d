"""The parser of MLIR's generic form."""

import pytest

from layout_tuner.ascend.mlir.parser import (
    Location,
    MemRef,
    Opaque,
    Operation,
    ParseError,
    TypedNumber,
    parse_module,
    split,
)

MODULE = """
"builtin.module"() ({
  "func.func"() <{arg_attrs = [{tt.divisibility = 16 : i32}, {}], function_type = (i32, f32) -> i32, sym_name = "f"}> ({
  ^bb0(%arg0: i32 loc("k.py":1:0), %arg1: f32 loc(unknown)):  // the entry
    %0 = "arith.constant"() <{value = -7 : i32}> : () -> i32 loc("k.py":3:4)
    %1:2 = "test.pair"(%arg0, %0) {flag, list = [1, "two", [@three]], map = affine_map<(d0) -> (d0 + 1)>} : (i32, i32) \
-> (i32, memref<?x4xf32, strided<[4, 1], offset: ?>, #hivm.address_space<gm>>) loc(callsite("h.py":9:2 at "k.py":4:8))
    "scf.if"(%1#0) ({
      "scf.yield"() : () -> ()
    }, {
    }) {hivm.unlikely} : (i32) -> () loc("outer"("k.py":5:0))
    "cf.cond_br"(%1#0, %arg0)[^bb1, ^bb2] <{operandSegmentSizes = array<i32: 1, 1, 0>}> : (i32, i32) -> ()
  ^bb1(%arg2: i32):  // pred: ^bb0
    "test.use"(%arg2, %2) : (i32, i64) -> ()
    "cf.br"()[^bb2] : () -> ()
  ^bb2:  // 2 preds
    %2 = "test.late"() <{big = 0x7FC0 : bf16, on = true, off = false, s = array<i64>, \
d = dense<[1, 2]> : vector<2xi1>}> : () -> i64 loc(fused<"x">["k.py":6:1, "k.py":7:1])
    "func.return"(%1#0) : (i32) -> ()
  }) {kind = #a.kind<HOST>, plain = #a.plain, type = !llvm.ptr<6>} : () -> ()
}) {spec = #dlti.spec<"NPU" : #x<"UB", 1 : i32>>} : () -> ()
"""


@pytest.fixture(scope="module")
def function() -> Operation:
    (block,) = parse_module(MODULE).regions[0]
    return block.operations[0]


def test_structure(function: Operation) -> None:
    assert [o.name for o in function.walk()] == [
        "func.func",
        "arith.constant",
        "test.pair",
        "scf.if",
        "scf.yield",
        "cf.cond_br",
        "test.use",
        "cf.br",
        "test.late",
        "func.return",
    ]
    first, second, third = function.regions[0]
    assert [block.label for block in (first, second, third)] == ["^bb0", "^bb1", "^bb2"]
    assert first.operations[-1].successors == ["^bb1", "^bb2"]
    branch = first.operations[2]
    assert [len(region) for region in branch.regions] == [1, 0]
    inner = branch.regions[0][0].operations[0]
    assert [o.name for o in inner.ancestors()] == ["scf.if", "func.func", "builtin.module"]


def test_values(function: Operation) -> None:
    first, second, third = function.regions[0]
    constant, pair, *_ = first.operations
    assert pair.operands == [first.arguments[0], constant.results[0]]
    assert [value.name for value in pair.results] == ["%1#0", "%1#1"]
    assert [value.index for value in pair.results] == [0, 1]
    assert third.operations[-1].operands == [pair.results[0]]
    # Used in a block that is printed before the one that defines it.
    late = third.operations[0].results[0]
    assert second.operations[0].operands[1] is late
    assert late.owner is third.operations[0]


def test_attributes(function: Operation) -> None:
    first, _, third = function.regions[0]
    constant, pair, branch, conditional = first.operations
    assert function.attributes["arg_attrs"] == [{"tt.divisibility": 16}, {}]
    assert function.attributes["function_type"] == "(i32, f32) -> i32"
    assert function.attributes["kind"] == Opaque("a.kind", "HOST")
    assert function.attributes["plain"] == Opaque("a.plain", "")
    assert function.attributes["type"] == "!llvm.ptr<6>"
    assert constant.attributes["value"] == -7
    assert pair.attributes["flag"] is True
    assert pair.attributes["list"] == [1, "two", ["three"]]
    assert pair.attributes["map"](4) == (5,)
    assert branch.attributes["hivm.unlikely"] is True
    assert conditional.attributes["operandSegmentSizes"] == [1, 1, 0]
    assert third.operations[0].attributes == {
        "big": TypedNumber("0x7FC0", "bf16"),
        "on": True,
        "off": False,
        "s": [],
        "d": Opaque("dense", "[1, 2] : vector<2xi1>"),
    }


def test_locations(function: Operation) -> None:
    first, _, third = function.regions[0]
    constant, pair, branch, conditional = first.operations
    assert constant.location == Location("k.py", 3, 4)
    assert pair.location == Location("h.py", 9, 2, Location("k.py", 4, 8))
    assert branch.location == Location("k.py", 5, 0)
    assert conditional.location is None
    assert third.operations[0].location == Location("k.py", 6, 1)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("memref<64x8xbf16>", MemRef((64, 8), "bf16", (8, 1))),
        ("memref<?x?xf32>", MemRef((None, None), "f32", (None, 1))),
        ("memref<f32, #hivm.address_space<ub>>", MemRef((), "f32", (), "ub")),
        (
            "memref<4x?x16xi8, strided<[?, 16, 1], offset: 3>, #hivm.address_space<cbuf>>",
            MemRef((4, None, 16), "i8", (None, 16, 1), "cbuf"),
        ),
        ("memref<2x3xi1, affine_map<(d0, d1) -> (d0, d1)>>", MemRef((2, 3), "i1", (3, 1))),
        ("vector<4xf32>", None),
        ("i32", None),
    ],
)
def test_memrefs(text: str, wanted: MemRef | None) -> None:
    assert MemRef.parse(text) == wanted


def test_split() -> None:
    assert split('a<b, c>, "x, (", (d) -> (e, f), ') == ["a<b, c>", '"x, ("', "(d) -> (e, f)"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("module {}", "an operation's name in quotes"),
        ('"a.b"(%0) : () -> ()', "1 operand types"),
        ('%0 = "a.b"() : () -> ()', "1 result types"),
        ('"a.b"() : () -> () trailing', "the end"),
        ('"a.b"() ({ : () -> ()', "an operation's name in quotes"),
        ('"a.b"() : (i32 -> ()', "no end|wanted"),
    ],
)
def test_what_is_not_generic_form(text: str, message: str) -> None:
    with pytest.raises(ParseError, match=message):
        parse_module(text)
