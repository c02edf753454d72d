"""The declaration of an op: its operands, candidates, kernels and oracle.

Validation, keys, synthetic inputs, layouts, tests, the tuner and the Ascend compiler all read these declarations;
none of them knows an op by name.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import REFUSAL, REFUSED, ConfigError, UnsupportedProblemError
from .calls import check_call, common_reasons
from .keys import Form, Key
from .layouts import Layout, LayoutPlan, arrival
from .operands import CHUNK_SIZES, DTYPES, SIZES, Call, Operand, Option, Output, Outputs, Value, dtype_name
from .revision import source_revision

if TYPE_CHECKING:
    import torch

    from ..device.driver import Chip


Launch = Callable[..., Outputs]

# What serves a key of which no kernel is right: the oracle, which is no candidate and never tuned.
REFERENCE = "reference"

# Ascend's compiler keeps several copies of what a loop loads, so that loads and work overlap. Other projects met wrong
# results and hangs from that in loops over tasks, and it takes memory.
SINGLE_BUFFER = "single_buffer"
OPTIONS: Mapping[str, Mapping[str, bool]] = {SINGLE_BUFFER: {"multibuffer": False}}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run an op: a kernel variant with a layout for each time-axis operand.

    Attributes:
        variant: Name of the kernel variant; behind a `+` the compiler's options that it carries, see `OPTIONS`.
        plan: The layouts the kernel reads and writes.
        revision: Hash of the sources of what it runs, see `revision.source_revision`.
    """

    variant: str
    plan: LayoutPlan
    revision: str

    @property
    def id(self) -> str:
        """The stable text it is stored under: `full/g=T_CONTIG`, or `full` where no layout is a choice."""
        plan = str(self.plan)
        return f"{self.variant}/{plan}" if plan else self.variant


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A key on a chip: all that a launch is built from.

    Attributes:
        key: The key, T as the call has it or as its bucket rounds it.
        chip: The device the kernels run on.
        variant_of: The variant that is stored as best for a key of another op; an op made of others asks it.
    """

    key: Key
    chip: Chip
    variant_of: Callable[[OpSpec, Key], str | None] = lambda spec, key: None

    @property
    def form(self) -> Form:
        """The key's form."""
        return self.key.form

    @property
    def BT(self) -> int:
        """Chunk size in tokens."""
        return self.form.integer("BT", 64)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the main tensor."""
        return 4 if self.key.dtype == "float32" else 2

    def has(self, operand: str) -> bool:
        """Whether an optional operand is given."""
        return operand in self.form


@dataclass(frozen=True, kw_only=True, eq=False)
class OpSpec:
    """An op, declared.

    Attributes:
        name: Name of the public function.
        operands: Tensors it takes, the main one first.
        outputs: Tensors it returns.
        options: Arguments that select the work.
        scalars: Arguments that are run-time numbers.
        layout_groups: Operands (read or written) that share one layout; a plan gives each group one.
        variants: Kernel variants, the default first.
        offers: `offers(variant, key)`: whether a variant is a candidate of a key; the default always is.
        default_variant: The default for a key on a chip, where that is not always the first.
        moves_inputs: Whether time-axis operands are copied into the plan's layouts ahead of the launch; an op whose
            kernels read any layout leaves them (only OTHER is copied, to STRIDE_HV).
        reads_heads: Whether its kernels read whole rows of heads, so that no layout is a strided one to them and the
            default copies nothing on any device.
        bind: Builds the launch of a candidate for a problem. The launch takes the operands, then the scalars, then
            `cu_seqlens` and `chunk_indices`, with time-axis operands in the plan's layout, and returns every output.
        by_reference: Builds what computes by the oracle from op, problem and options of a call, where its launch is
            more than a function.
        reference: The oracle: same operands and options by name, results in the order of `outputs`.
        forms: Standard forms by name; warm-up tunes these where no callers are known.
        callers: Forms of the libraries that call this op, by `caller/use` (`transformers/training`); warm-up tunes
            these.
        more_forms: Further forms that the tests and Ascend's matrix cover.
        unsupported: The op's own reasons why it cannot serve a key, beyond the common ones.
        tolerances: Largest error allowed for an output by name, 16-bit dtypes; fp32 is `numerics.FP32_TOLERANCE`.
        term_rms: `term_rms(wanted, **arguments)`: how large the terms are whose sums outputs that can cancel are, by
            output name; `wanted` are the oracle's results by name.
    """

    name: str
    operands: tuple[Operand, ...]
    outputs: tuple[Output, ...]
    options: tuple[Option, ...] = ()
    scalars: tuple[str, ...] = ()
    layout_groups: tuple[tuple[str, ...], ...] = ()
    variants: tuple[str, ...]
    offers: Callable[[str, Key], bool] = lambda variant, key: True
    default_variant: Callable[[Key, Chip], str] | None = None
    moves_inputs: bool = True
    reads_heads: bool = False
    bind: Callable[[Problem, Candidate], Launch]
    reference: Callable[..., object]
    forms: Mapping[str, str]
    callers: Mapping[str, str] = field(default_factory=dict)
    more_forms: tuple[str, ...] = ()
    unsupported: Callable[[Key], Sequence[str]] = lambda key: ()
    tolerances: Mapping[str, float] = field(default_factory=dict)
    term_rms: Callable[..., Mapping[str, torch.Tensor]] | None = None
    by_reference: Callable[[OpSpec, Problem, tuple[Value, ...]], Launch] | None = None

    @functools.cached_property
    def sizes(self) -> frozenset[str]:
        """The symbols of the sizes this op has."""
        return frozenset(symbol for operand in self.operands for symbol in operand.dims.split()) & frozenset(SIZES)

    @functools.cached_property
    def time_operands(self) -> tuple[str, ...]:
        """Names of the time-axis tensors it reads or writes, in the order of `layout_groups`."""
        return tuple(itertools.chain.from_iterable(self.layout_groups))

    @functools.cached_property
    def with_channels(self) -> tuple[str, ...]:
        """Names of the time-axis tensors `[B, T, HV, C]`."""
        tensors = [(operand.name, operand.time_axis, operand.dims.split()) for operand in self.operands]
        tensors += [(output.name, output.time_axis, self.shape_of(output)) for output in self.outputs]
        return tuple(name for name, time_axis, dims in tensors if time_axis and len(dims) > 3)

    @functools.cached_property
    def standard_forms(self) -> Mapping[str, Form]:
        """The standard forms by name."""
        return {name: Form.parse(text) for name, text in self.forms.items()}

    @functools.cached_property
    def every_form(self) -> tuple[Form, ...]:
        """Every form that the tests and Ascend's matrix cover, the standard ones first."""
        more = [Form.parse(text) for text in self.more_forms]
        return tuple(dict.fromkeys([*self.standard_forms.values(), *self.caller_forms.values(), *more]))

    @functools.cached_property
    def caller_forms(self) -> Mapping[str, Form]:
        """The forms of known callers by `caller/use`."""
        return {name: Form.parse(text) for name, text in self.callers.items()}

    @functools.cached_property
    def warmed_forms(self) -> tuple[Form, ...]:
        """The forms that warm-up tunes where it is not told which: what is called, as far as that is known."""
        return tuple(dict.fromkeys((self.caller_forms or self.standard_forms).values()))

    @functools.cached_property
    def gradient_option(self) -> Option | None:
        """The option that says that gradients are wanted, where the op has one."""
        return next((option for option in self.options if option.differentiates), None)

    @functools.cached_property
    def withheld(self) -> tuple[None, ...]:
        """None for each operand that no caller passes: the gradients of outputs."""
        return (None,) * len([operand for operand in self.operands if operand.given_with])

    @property
    def is_chain(self) -> bool:
        """Whether its candidates run other ops, forward and backward, and launch few kernels of their own."""
        return self.gradient_option is not None

    def v_first(self, form: Form) -> bool:
        """Whether states of a form have V ahead of K."""
        return any(option.turns_states and form.flag(option.label) for option in self.options)

    @functools.cached_property
    def revision(self) -> str:
        """Hash of kernels, tiles and launches: a candidate of another revision is another candidate."""
        return source_revision(self.bind.__module__)

    def shape_of(self, output: Output) -> list[str]:
        """The symbols of an output's shape, states with K ahead of V."""
        if output.dims:
            return output.dims.split()
        return next(operand.dims for operand in self.operands if f"d{operand.name}" == output.name).split()

    def arguments(self, call: Call) -> dict[str, object]:
        """The call's arguments by name, as the public function and the oracle take them."""
        named: dict[str, object] = {operand.name: tensor for operand, tensor in zip(self.operands, call.tensors)}
        named |= {option.name: value for option, value in zip(self.options, call.options)}
        named |= dict(zip(self.scalars, call.scalars))
        if "T" in self.sizes:
            named["cu_seqlens"] = call.cu_seqlens
        return named

    # -- the key of a call -------------------------------------------------------------------------------------

    def key(self, call: Call) -> Key:
        """The exact key (T unrounded) of a call, after checking every operand against the declaration.

        Raises:
            TypeError: An operand that is no tensor.
            ValueError: Missing operands, wrong shapes, dtypes or devices; every mistake in one message.
            UnsupportedProblemError: A well-formed call that no kernel serves.
        """
        sizes = check_call(self, call)
        entries: dict[str, str] = {}
        main = dtype_name(call.tensors[0])
        for operand, tensor in zip(self.operands, call.tensors):
            if tensor is None or operand.given_with:
                continue
            dtype = dtype_name(tensor)
            if operand.time_axis:
                entries[operand.name] = f"{dtype}@{arrival(tensor).value}"
            elif dtype != main:
                entries[operand.name] = dtype
            elif operand.optional:
                entries[operand.name] = "1"
        for option, value in zip(self.options, call.options):
            if isinstance(value, bool):
                if value != option.default:
                    entries[option.label] = str(int(value))
            else:
                entries[option.label] = str(value)
        if "BT" in sizes:
            entries["BT"] = str(sizes["BT"])
        key = Key(
            op=self.name,
            **{name: sizes.get(name, 0) for name in SIZES},
            varlen=call.cu_seqlens is not None,
            dtype=main,
            form=Form(entries),
        )
        self.require(key)
        return key

    def require(self, key: Key) -> None:
        """Raise `UnsupportedProblemError` with every reason where no kernel serves the key."""
        reasons = [*common_reasons(self, key), *self.unsupported(key)]
        if reasons:
            raise UnsupportedProblemError(self.name, reasons)

    # -- what may run it ---------------------------------------------------------------------------------------

    def plans(self, key: Key) -> tuple[LayoutPlan, ...]:
        """The layouts worth trying for a key, STRIDE_HV first.

        Nothing is a choice with one head or one token, nor for a group whose operand arrives T_CONTIG: it is used
        as it is.
        """
        form = key.form
        present = {operand.name for operand in self.operands if operand.time_axis and operand.name in form}
        present |= {out.name for out in self.outputs if out.time_axis and (not out.needs or out.needs in form)}
        as_they_lie = {operand.name for operand in self.operands if operand.as_it_lies}
        groups = [tuple(name for name in group if name in present) for group in self.layout_groups]
        groups = [group for group in groups if group]
        choices: list[tuple[Layout, ...]] = []
        for group in groups:
            arrives = {form.arrival(name) for name in group}
            if key.HV == 1 or key.T == 1:
                choices.append((Layout.STRIDE_HV,))
            elif Layout.T_CONTIG in arrives:
                choices.append((Layout.T_CONTIG,))
            elif as_they_lie.issuperset(group):
                choices.append((Layout.STRIDE_HV,))
            else:
                choices.append((Layout.STRIDE_HV, Layout.T_CONTIG))
        return tuple(
            LayoutPlan(tuple((name, layout) for group, layout in zip(groups, layouts) for name in group))
            for layouts in itertools.product(*choices)
        )

    def candidates(self, key: Key, *, buffers: bool = False) -> tuple[Candidate, ...]:
        """Every candidate of a key, in a fixed order; made once.

        Args:
            key: The key.
            buffers: As `Chip.buffers` of the device they are for.
        """
        return candidates_of(self, key, self.revision, buffers)

    @property
    def unbuffered(self) -> tuple[str, ...]:
        """Variants that are candidates without automatic multi-buffering too, where a compiler does that."""
        return self.variants[:1]

    def default(self, key: Key, chip: Chip) -> Candidate:
        """What runs where nothing was measured: T_CONTIG on an NPU (the published fix), STRIDE_HV elsewhere.

        Tensors with channels stay as they arrive: a token's channels lie together in both layouts, and a copy moves as
        many times more.
        """
        plans = self.plans(key)
        published_fix = chip.kind == "npu" and not self.reads_heads
        if published_fix and self.with_channels:
            plans = tuple(p for p in plans if all(p[name] is plans[0][name] for name in self.with_channels))
        variant = self.default_variant(key, chip) if self.default_variant else self.variants[0]
        return Candidate(variant=variant, plan=plans[-1] if published_fix else plans[0], revision=self.revision)

    def nothing_to_choose(self, key: Key) -> bool:
        """Whether the key is never tuned: one head or one token, where every layout is the same memory."""
        return key.HV == 1 or key.T == 1

    def key_for(self, sizes: Mapping[str, int], *, dtype: str, form: Form, varlen: bool = False) -> Key:
        """The key that a call of these sizes and this form has.

        Args:
            sizes: By symbol; those the op does not have are left out.
            dtype: Of the model's tensors. An op whose first tensor is a gate has the gate's dtype, as the form says.
            form: The form; a dtype that goes without saying is dropped, as in a call's own key.
            varlen: Whether the batch is packed.
        """
        entries = dict(form.entries)
        dtype = form.dtype(self.operands[0].name) or dtype
        for operand in self.operands:
            if operand.optional and not operand.time_axis and entries.get(operand.name) == dtype:
                entries[operand.name] = "1"
            elif not operand.optional and not operand.time_axis and entries.get(operand.name) == dtype:
                del entries[operand.name]
        return Key(
            op=self.name,
            **{name: sizes[name] if name in self.sizes else 0 for name in SIZES},
            varlen=varlen,
            dtype=dtype,
            form=Form(entries),
        )

    def forms_named(self, name: str) -> tuple[Form, ...]:
        """The forms that a name stands for: a standard form, a caller's (all or one), a use of every caller, or a text.

        Raises:
            ConfigError: None of these.
        """
        called = [form for each, form in self.caller_forms.items() if f"/{name}/" in f"/{each}/"]
        if name in self.forms:
            called.insert(0, self.standard_forms[name])
        return tuple(dict.fromkeys(called)) or (self.form_named(name),)

    def form_named(self, name: str) -> Form:
        """The standard form of that name, or the form that the text describes.

        Raises:
            ConfigError: Neither.
        """
        if name in self.forms:
            return self.standard_forms[name]
        if name in self.callers:
            return self.caller_forms[name]
        if "=" in name:
            form = self.arrived(Form.parse(name))
            faults = self.form_faults(form)
            if faults:
                raise ConfigError(f"form {name!r}: " + "; ".join(faults))
            # As a call writes it: a flag only where it is not at its default, every other option always.
            flags = {each.label: str(int(each.default)) for each in self.options if isinstance(each.default, bool)}
            entries = {each.label: str(each.default) for each in self.options if each.label not in flags}
            entries |= form.entries
            return Form({entry: value for entry, value in entries.items() if flags.get(entry) != value})
        raise ConfigError(f"{self.name} has no form {name!r} (it has {', '.join([*self.forms, *self.callers])})")

    def arrived(self, form: Form) -> Form:
        """A form with the layout of every time-axis tensor: one that states a dtype alone arrives as models have it."""
        time_axis = {operand.name: operand.dtypes for operand in self.operands if operand.time_axis}
        bare = {name: value for name, value in form.entries.items() if value in time_axis.get(name, ())}
        return form.changed(**{name: f"{dtype}@{Layout.STRIDE_HV.value}" for name, dtype in bare.items()})

    def form_faults(self, form: Form) -> list[str]:
        """What is wrong with the entries of a form: names the op does not have, values no call leads to, gaps."""
        wanted = self.form_values
        unknown = [entry for entry in form.entries if entry not in wanted]
        faults = []
        if any(entry in REFUSED for entry in unknown):
            faults.append(REFUSAL)
        elif unknown:
            faults.append(f"{self.name} has no {', '.join(unknown)} (it has {', '.join(sorted(wanted))})")
        faults += [
            f"{entry}: wanted one of {', '.join(wanted[entry])}, got {value!r}"
            for entry, value in form.entries.items()
            if entry in wanted and value not in wanted[entry]
        ]
        needed = [operand.name for operand in self.operands if operand.time_axis and not operand.optional]
        return faults + [f"{name}: missing, no call of {self.name} is without" for name in needed if name not in form]

    @functools.cached_property
    def form_values(self) -> dict[str, list[str]]:
        """What the entries of a form may be, by name."""
        values: dict[str, list[str]] = {"BT": [str(size) for size in CHUNK_SIZES]}
        for operand in self.operands:
            if operand.time_axis:
                values[operand.name] = [
                    f"{dtype}@{layout}" for dtype in operand.dtypes for layout in Layout.__members__
                ]
            elif not operand.given_with:
                values[operand.name] = ["1", *operand.dtypes]
        for option in self.options:
            if option.label not in values:
                values[option.label] = ["0", "1"] if isinstance(option.default, bool) else list(DTYPES)
        return values


@functools.lru_cache(maxsize=4096)
def candidates_of(spec: OpSpec, key: Key, revision: str, buffers: bool) -> tuple[Candidate, ...]:
    """Every candidate of an op for a key, with the revision of the op's sources."""
    variants = [variant for variant in spec.variants if spec.offers(variant, key)]
    if buffers:
        variants += [f"{variant}+{SINGLE_BUFFER}" for variant in spec.unbuffered if variant in variants]
    return tuple(
        Candidate(variant=variant, plan=plan, revision=revision) for variant in variants for plan in spec.plans(key)
    )


def compile_options(variant: str) -> tuple[str, Mapping[str, bool]]:
    """A variant as the op knows it, and the options of the compiler that it carries in its name.

    Options change how a kernel is compiled, never what it computes.
    """
    name, plus, option = variant.partition("+")
    return name, OPTIONS[option] if plus else {}
