"""The matrix that tests of every op are generated from.

Most faults vanish at B = 1, HV = 1 or T a multiple of the chunk, so none of these has that: B = 2, HV = 2 H, K and V
different and no powers of two, T past one chunk. The interpreter takes some 30 ms a program, so the standard forms run
with four value heads, every other form with two. Packed batches have sequences of unequal length, an empty one, and
tokens before the first and after the last sequence.
"""

import itertools
from collections.abc import Collection
from dataclasses import replace

import torch

from layout_tuner.launch.prepared import Prepared
from layout_tuner.spec.declaration import OpSpec
from layout_tuner.spec.keys import Form, Key
from layout_tuner.spec.operands import DTYPES
from layout_tuner.tuning import inputs
from layout_tuner.tuning.experiment import Experiment

SIZES = {"B": 2, "T": 67, "H": 1, "HV": 2, "K": 24, "V": 40}
# Variants whose every kernel one of two others has; nightly tests run them over the matrix.
PUT_TOGETHER = ("fused_forward",)
MORE_HEADS = {"H": 2, "HV": 4}
CU_SEQLENS = (3, 3, 20, 20, 72, 75)  # first token 3, two empty sequences
T_PACKED = 80


def key_for(spec: OpSpec, form: Form | str, dtype: str = "float32", varlen: bool = False, **sizes: int) -> Key:
    """A key of the matrix, with the sizes that the op has."""
    wanted = SIZES | ({"B": 1, "T": T_PACKED} if varlen else {}) | sizes
    form = form if isinstance(form, Form) else Form.parse(form)
    return spec.key_for(wanted, dtype=dtype, form=form, varlen=varlen)


def experiment_for(
    spec: OpSpec, key: Key, device: torch.device, cu_seqlens: tuple[int, ...] = CU_SEQLENS, seed: int = 0
) -> Experiment:
    """A key's candidates on arguments whose memory ends in NaN, so that an overrun shows."""
    starts = torch.tensor(cu_seqlens, dtype=torch.int32, device="cpu") if key.varlen else None
    call = inputs.synthesize(spec, key, device, seed, starts)
    tensors = tuple(None if tensor is None else inputs.poisoned(tensor) for tensor in call.tensors)
    return Experiment(spec, key, device, replace(call, tensors=tensors))


def faults(experiment: Experiment, variants: Collection[str] | None = None) -> list[str]:
    """What the tuner finds wrong with any candidate: an error over its tolerance, or layouts that differ in a bit.

    Args:
        experiment: The candidates of a key.
        variants: Which to look at; None: all but those that are put together from two others.
    """
    found = []
    for candidate in experiment.spec.candidates(experiment.key):
        if candidate.variant not in variants if variants is not None else candidate.variant in PUT_TOGETHER:
            continue
        prepared = Prepared(experiment.spec, experiment.problem, candidate, experiment.call)
        check = experiment.check(prepared)
        if not check.right:
            found.append(f"{experiment.key}: {candidate.id}: {check}")
    return found


def matrix(spec: OpSpec) -> list[tuple[Form, str, bool]]:
    """Form, dtype and packing: every form in fp32, the standard forms in every dtype, those of callers as called."""
    standard = set(spec.standard_forms.values())
    packings = (False, True) if "T" in spec.sizes else (False,)
    called = {form: name.startswith("vllm/") for name, form in spec.caller_forms.items() if form not in standard}
    cases = [
        (form, dtype, varlen)
        for form in spec.every_form
        if form not in called
        for dtype in (DTYPES if form in standard else ("float32",))
        for varlen in packings
    ]
    return cases + [(form, "bfloat16", packed) for form, packed in called.items()]


def gate_dtypes(spec: OpSpec) -> list[tuple[Form, bool]]:
    """Form and packing: the standard forms in every combination of dtypes of their time-axis operands.

    A layout may be reached by a copy that widens, and so decide the dtype of what is computed behind it.
    """
    found = []
    for form in spec.standard_forms.values():
        names = [operand.name for operand in spec.operands if operand.time_axis and operand.name in form]
        for dtypes in itertools.product(DTYPES, repeat=len(names)) if names else ():
            arrivals = {name: f"{dtype}@STRIDE_HV" for name, dtype in zip(names, dtypes)}
            mixed = form.changed(**arrivals, **({"BT": "16"} if "BT" in form else {}))
            found += [(mixed, varlen) for varlen in ((False, True) if "T" in spec.sizes else (False,))]
    return list(dict.fromkeys(found))
