"""Whole models of Qwen3.6-35B-A3B's shapes, everything resident, int4 everywhere: this library beside llama.cpp.

    python -m benchmarks.decode [--json FILE] [--quick] [--work DIR] [--option NAME=VALUE ...]
    python -m benchmarks.decode --work DIR --prepare    writes the files alone
    python -m benchmarks.decode --device gpu ...        beside mlx-lm; takes the options of benchmarks.gpu_model

4 and 8 layers of each are timed in turn; a whole model of 40 takes t4 + 9 (t8 - t4). Prompts are random tokens; a
decode step is timed without sampling there, with greedy choice here. Needs 12 GB of disk in --work (the files are used
again by the next run), 10 GB of memory and about 8 minutes; --quick 60 seconds (16 experts a layer, one round of 16
steps, no depth of 4,096).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import command, gpu_model
from benchmarks.arms import Arm, Resident, load_options
from benchmarks.bandwidth import read_bandwidth
from benchmarks.block import Block, cores, spread
from benchmarks.llama_cpp_peer import LlamaCpp, write_gguf
from benchmarks.synthetic_store import read_shape, write_store
from mlx_ttd.spec import ModelSpec, model_spec, trunk_tensors

LAYERS, WHOLE = (4, 8), 40
PROMPT, DEPTH, STEPS = 512, 4096, 64
Times = dict[str, dict[str, list[float]]]


def bytes_a_token(spec: ModelSpec) -> int:
    """Bytes of int4 weights that one decoded token multiplies by."""
    shares = {"experts": spec.top_k / spec.experts, "matrix": 1.0}
    used = [t for t in trunk_tensors(spec) if t.kind in shares and t.name != "embedding"]
    return int(sum(np.prod(t.shape, dtype=float) * shares[t.kind] * 9 / 16 for t in used))


def files(work: Path, shape: str, layers: int, experts: int) -> tuple[Path, Path]:
    """The store and the GGUF file of these shapes, written if they are not there."""
    name = f"{Path(shape).name.removesuffix('.json')}-{layers}x{experts}"
    store, peer = work / name, work / f"{name}.gguf"
    if not store.exists():
        write_store(shape, store, layers, 0.0, 4, experts=experts, embed_bits=4)
    if not peer.exists():
        write_gguf(model_spec(read_shape(shape, layers, experts)), peer)
    return store, peer


def measure(
    store: Path, peer: Path, rounds: int, depth: int, steps: int, options: dict[str, Any], block: Block
) -> Times:
    """Seconds a prompt or a step, by what was done and by arm, a median a round."""
    context = max(depth + (rounds + 1) * (steps + 1), 2048) + 1
    times: Times = {}
    with Arm(Resident, str(store), context, options) as ours, Arm(LlamaCpp, str(peer), cores(), context) as theirs:
        arms = {"ours": ours, "llama_cpp": theirs}

        def timed(name: str, *request: Any) -> None:
            for arm, process in arms.items():
                answer = process.ask(*request)
                value = statistics.median(answer) if isinstance(answer, list) else answer
                times.setdefault(name, {}).setdefault(arm, []).append(value)

        for process in arms.values():
            process.ask("prefill", PROMPT if depth else PROMPT // 8)
            process.ask("decode", 4)
        for _ in range(rounds):
            timed(f"prefill_{PROMPT}", "prefill", PROMPT)
            timed("decode", "decode", steps)
        if depth:
            timed(f"prefill_{depth}", "prefill", depth)
            for _ in range(rounds):
                timed(f"decode_{depth}", "decode", steps)
        block.note("ours", ours.ask("about"))
    return times


def whole(few: Times, many: Times, name: str, arm: str) -> tuple[float, float]:
    """(seconds at 40 layers, seconds a layer) from the medians at 4 and 8."""
    short, long = (statistics.median(t[name][arm]) for t in (few, many))
    slope = (long - short) / (LAYERS[1] - LAYERS[0])
    return short + slope * (WHOLE - LAYERS[0]), slope


def compare(block: Block, measured: dict[int, Times]) -> None:
    few, many = (measured[n] for n in LAYERS)
    for name in few:
        for n, times in measured.items():
            for arm, values in times[name].items():
                block.note(f"{name} {n} layers, {arm}", f"ms {spread([v * 1e3 for v in values])}")
        (ours, our_layer), (theirs, their_layer) = (whole(few, many, name, arm) for arm in ("ours", "llama_cpp"))
        block.results[f"{name}.vs_llama_cpp"] = theirs / ours
        block.results[f"{name}.vs_llama_cpp.slope"] = their_layer / our_layer
        tokens = int(name.removeprefix("prefill_")) if name.startswith("prefill_") else 1
        block.results[f"{name}.tok_s"], block.results[f"{name}.llama_cpp_tok_s"] = tokens / ours, tokens / theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--work", type=Path, help="directory for stores and files; left out: a temporary one")
    parser.add_argument("--prepare", action="store_true", help="write the files and measure nothing")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--shape", default="qwen3.6-35b-a3b", help="a name in benchmarks/shapes, or a config.json")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of mlx_ttd.load")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    arguments, rest = parser.parse_known_args()
    if arguments.device == "gpu":
        shared = (("--json", arguments.json), ("--rounds", arguments.rounds))
        sys.argv[1:] = rest + [str(part) for pair in shared if pair[1] for part in pair]
        return gpu_model.main()
    if rest:
        parser.error(f"unknown: {' '.join(rest)}")
    experts, depth, steps = (16, 0, 16) if arguments.quick else (256, DEPTH, STEPS)
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    options = load_options(arguments.option)
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        if arguments.prepare:
            print([files(work, arguments.shape, n, experts) for n in LAYERS])
            return
        effective = {"quick": arguments.quick, "shape": arguments.shape, "experts": experts, "layers": LAYERS}
        block = Block("decode", effective | {"rounds": rounds} | options, work)
        prepared = {n: files(work, arguments.shape, n, experts) for n in LAYERS}
        block.results["read_gb_s"] = read_bandwidth()
        spec = model_spec(read_shape(arguments.shape))
        block.results["decode.floor_ms"] = bytes_a_token(spec) / block.results["read_gb_s"] / 1e6
        block.note("cache", "every weight resident in both, warm")
        compare(block, {n: measure(*prepared[n], rounds, depth, steps, options, block) for n in LAYERS})
        block.finish(arguments.json)


if __name__ == "__main__":
    command.run(main)
