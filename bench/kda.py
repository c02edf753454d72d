"""Device time of each stage of Kimi Delta Attention beside the time that its bytes take at least.

    python bench/kda.py [--shape 8,4096,16,16,128,128] [--dtype bfloat16] [--gbps 4800] [--stages OP,OP]

Prints every candidate of every stage: median microseconds of the kernels alone, the bytes of its operands and results
(each once), the floor that these make at the given bandwidth, and how many floors the stage takes.
"""

import argparse
import statistics

import torch

from layout_tuner import ops
from layout_tuner.spec import registry
from layout_tuner.spec.declaration import OpSpec
from layout_tuner.spec.keys import Form
from layout_tuner.tuning.experiment import Experiment

assert ops, "importing the ops registers them"
GATES = "beta=float32@STRIDE_HV,g=float32@STRIDE_HV"
INTRA = "dAkk=float32,dAqk=float32,db=float32@STRIDE_HV,dg=float32@STRIDE_HV,dk=float32,dq=float32"
STAGES = {
    "kda_gate_chunk_cumsum": "BT=64,A_log=float32,dt_bias=float32,g=bfloat16@STRIDE_HV,output_dtype=float32",
    "chunk_local_cumsum_channels": "BT=64,g=float32@STRIDE_HV,output_dtype=float32",
    "chunk_kda_fwd_intra": "BT=64,beta=float32@STRIDE_HV,gk=float32@STRIDE_HV,safe_gate=1",
    "recompute_w_u_fwd_kda": "BT=64,beta=float32@STRIDE_HV,gk=float32@STRIDE_HV,q=1",
    "chunk_gated_delta_rule_fwd_h": "BT=64,gk=float32@STRIDE_HV",
    "chunk_gla_fwd_o_gk": "BT=64,g=float32@STRIDE_HV",
    "chunk_kda_bwd_dAv": "BT=64",
    "chunk_gated_delta_rule_bwd_dhu": "BT=64,gk=float32@STRIDE_HV",
    "chunk_kda_bwd_wy_dqkg_fused": f"BT=64,{GATES}",
    "chunk_kda_bwd_intra": f"BT=64,{GATES},{INTRA},safe_gate=1",
    "kda_gate_bwd": "A_log=float32,dt_bias=float32,dyg=float32@STRIDE_HV,g=bfloat16@STRIDE_HV",
}
# Operands of which sizes are read only, or one row a chunk.
UNREAD = {"chunk_kda_bwd_dAv": ("q", "k")}
ONE_ROW = "gk"


def traffic(spec: OpSpec, experiment: Experiment, results: tuple[torch.Tensor | None, ...]) -> int:
    """Bytes of all operands and results, each once."""
    read = 0
    for operand, tensor in zip(spec.operands, experiment.call.tensors):
        if tensor is not None and operand.name not in UNREAD.get(spec.name, ()):
            rows = experiment.problem.BT if operand.name == ONE_ROW and operand.as_it_lies else 1
            read += tensor.numel() * tensor.element_size() // rows
    return read + sum(tensor.numel() * tensor.element_size() for tensor in results if tensor is not None)


def median_us(run: object, rounds: int = 20) -> float:
    """Median device time of a call, the level-2 cache flushed before each."""
    flush = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    found = []
    for _ in range(rounds):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()  # type: ignore[operator]
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) * 1000)
    return statistics.median(found)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8,4096,16,16,128,128", help="B,T,H,HV,K,V")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--gbps", type=float, default=4800.0, help="bandwidth of the device's memory")
    parser.add_argument("--stages", default=",".join(STAGES))
    options = parser.parse_args()
    sizes = dict(zip(("B", "T", "H", "HV", "K", "V"), map(int, options.shape.split(","))))
    print(f"{torch.cuda.get_device_name()}, {sizes}, {options.dtype}")
    for name in options.stages.split(","):
        spec = registry.lookup(name)
        key = spec.key_for(sizes, dtype=options.dtype, form=Form.parse(STAGES[name]))
        experiment = Experiment(spec, key, torch.device("cuda"))
        for candidate in spec.candidates(key):
            runs = experiment.prepare(candidate)
            run = runs.kernel or runs.end_to_end
            results = run()
            run()
            torch.cuda.synchronize()
            took, moved = median_us(run), traffic(spec, experiment, results)
            floor = moved / options.gbps / 1e3
            numbers = f"{took:9.1f} us {moved / 2**20:8.0f} MiB {floor:7.1f} us {took / floor:5.2f}"
            print(f"{name:30} {candidate.id:60} {numbers}")
        del experiment


if __name__ == "__main__":
    main()
