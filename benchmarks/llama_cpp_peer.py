"""llama.cpp on the same shapes: a GGUF file of random Q4_0 weights, and its speed as llama-bench measures it.

    python -m benchmarks.llama_cpp_peer qwen3.6-35b-a3b FILE.gguf [--layers N] [--experts N] [--threads N]

Writes FILE.gguf if there is none, then times a prompt of 512 and 64 tokens. Experts, projections, embedding and head
are Q4_0, which llama.cpp repacks for the processor at load. 4 layers take 2.4 GB.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.synthetic_store import SPREAD, check_space, read_shape
from mlx_ttd.spec import FULL, ModelSpec, model_spec

BLOCK, BLOCK_BYTES = 32, 18
POOL = 1 << 20
MATRIX, VECTOR = "Q4_0", "F32"
Entry = tuple[str, tuple[int, ...], str]


def entries(spec: ModelSpec) -> Iterator[Entry]:
    """(name, shape [out, in], form) of every tensor of llama.cpp's qwen35moe."""
    h, e, inter, shared = spec.hidden, spec.experts, spec.inter, spec.shared_inter
    yield "token_embd.weight", (spec.vocab, h), MATRIX
    yield "output_norm.weight", (h,), VECTOR
    yield "output.weight", (spec.vocab, h), MATRIX
    for i, kind in enumerate(spec.layer_types):
        full = {
            "attn_q.weight": (2 * spec.heads * spec.head_dim, h),
            "attn_k.weight": (spec.kv_heads * spec.head_dim, h),
            "attn_v.weight": (spec.kv_heads * spec.head_dim, h),
            "attn_output.weight": (h, spec.heads * spec.head_dim),
            "attn_q_norm.weight": (spec.head_dim,),
            "attn_k_norm.weight": (spec.head_dim,),
        }
        linear = {
            "attn_qkv.weight": (spec.conv_width, h),
            "attn_gate.weight": (spec.value_width, h),
            "ssm_conv1d.weight": (spec.conv_width, spec.conv),
            "ssm_dt.bias": (spec.value_heads,),
            "ssm_a": (spec.value_heads,),
            "ssm_beta.weight": (spec.value_heads, h),
            "ssm_alpha.weight": (spec.value_heads, h),
            "ssm_norm.weight": (spec.value_dim,),
            "ssm_out.weight": (h, spec.value_width),
        }
        mlp = {
            "attn_norm.weight": (h,),
            "post_attention_norm.weight": (h,),
            "ffn_gate_inp.weight": (e, h),
            "ffn_gate_exps.weight": (e, inter, h),
            "ffn_up_exps.weight": (e, inter, h),
            "ffn_down_exps.weight": (e, h, inter),
            "ffn_gate_inp_shexp.weight": (h,),
            "ffn_gate_shexp.weight": (shared, h),
            "ffn_up_shexp.weight": (shared, h),
            "ffn_down_shexp.weight": (h, shared),
        }
        for name, shape in ((full if kind == FULL else linear) | mlp).items():
            plain = len(shape) == 1 or name in ("ssm_conv1d.weight", "ffn_gate_inp.weight")
            yield f"blk.{i}.{name}", shape, VECTOR if plain else MATRIX


def vector(name: str, shape: tuple[int, ...], draws: np.random.Generator) -> np.ndarray:
    """Values of a tensor kept in F32."""
    if name.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    if name.endswith("ssm_a"):
        return -draws.uniform(1, 16, shape).astype(np.float32)
    if name.endswith("ssm_dt.bias"):
        return draws.uniform(-6, -2, shape).astype(np.float32)
    if name.endswith("ssm_conv1d.weight"):
        return draws.uniform(-0.5, 0.5, shape).astype(np.float32)
    return (draws.standard_normal(shape) * SPREAD).astype(np.float32)


def header(writer: Any, spec: ModelSpec) -> None:
    """What llama.cpp has to know of the model; it runs without a vocabulary."""
    writer.add_block_count(len(spec.layer_types))
    writer.add_context_length(spec.max_context)
    writer.add_embedding_length(spec.hidden)
    writer.add_vocab_size(spec.vocab)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.eps)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_rope_dimension_count(spec.rope_dim)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_expert_count(spec.experts)
    writer.add_expert_used_count(spec.top_k)
    writer.add_expert_feed_forward_length(spec.inter)
    writer.add_expert_shared_feed_forward_length(spec.shared_inter)
    writer.add_ssm_conv_kernel(spec.conv)
    writer.add_ssm_state_size(spec.key_dim)
    writer.add_ssm_group_count(spec.key_heads)
    writer.add_ssm_time_step_rank(spec.value_heads)
    writer.add_ssm_inner_size(spec.value_width)
    writer.add_array("qwen35moe.attention.recurrent_layers", [kind != FULL for kind in spec.layer_types])
    writer.add_tokenizer_model("no_vocab")


def write_gguf(spec: ModelSpec, path: Path, seed: int = 0) -> Path:
    """Random weights of `spec`'s shapes in the file `path`; blocks come from one pool, cut at random places."""
    import gguf

    draws = np.random.default_rng(seed)
    pool = draws.integers(0, 256, (POOL, BLOCK_BYTES), np.uint8)
    scales = draws.uniform(0.5, 1.5, POOL) * SPREAD * 12**0.5 / 16
    pool[:, :2] = scales.astype(np.float16).view(np.uint8).reshape(POOL, 2)
    listed = list(entries(spec))
    packed = sum(int(np.prod(shape)) for _, shape, form in listed if form == MATRIX) // BLOCK * BLOCK_BYTES
    check_space(packed, path.parent)
    draft = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(draft, "qwen35moe")
    header(writer, spec)
    for name, shape, form in listed:
        kind = gguf.GGMLQuantizationType[form]
        width = shape if form == VECTOR else (*shape[:-1], shape[-1] // BLOCK * BLOCK_BYTES)
        dtype = np.dtype(np.float32 if form == VECTOR else np.uint8)
        writer.add_tensor_info(name, width, dtype, int(np.prod(width)) * dtype.itemsize, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape, form in listed:
        if form == VECTOR:
            writer.write_tensor_data(vector(name, shape, draws))
            continue
        blocks = int(np.prod(shape)) // BLOCK
        tiles = [int(draws.integers(0, POOL // 2)) for _ in range(-(-blocks // (POOL // 2)))]
        data = np.concatenate([pool[start : start + POOL // 2] for start in tiles])[:blocks]
        writer.write_tensor_data(data.reshape(-1))
    writer.close()
    os.replace(draft, path)
    return path


class LlamaCpp:
    """A loaded GGUF file, driven as llama-bench does: random tokens, no sampling, its own defaults.

    mapped: read from the file when touched; weights are not repacked then, since that copies all of them into memory.
    GCC 12 loses the AMX tile configuration of llama.cpp, which then ends on an illegal instruction: build it with
    CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'".
    """

    def __init__(self, path: str, threads: int, context: int, mapped: bool = False):
        import llama_cpp

        self.api, self.draws = llama_cpp, np.random.default_rng(1)
        self.silence = llama_cpp.llama_log_callback(lambda level, text, user: None)
        llama_cpp.llama_log_set(self.silence, None)
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_default_params()
        model.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP if mapped else llama_cpp.LLAMA_LOAD_MODE_NONE
        assert model.use_extra_bufts, "weight repacking must be on"
        model.use_extra_bufts = not mapped
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), model)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context, 2048, 512
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def run(self, count: int) -> float:
        """Seconds for `count` tokens in one batch, logits of the last included."""
        tokens = (ctypes.c_int32 * count)(*self.draws.integers(0, self.vocab, count).tolist())
        began = time.perf_counter()
        if self.api.llama_decode(self.context, self.api.llama_batch_get_one(tokens, count)):
            raise RuntimeError(f"llama.cpp could not decode {count} tokens.")
        self.api.llama_synchronize(self.context)
        return time.perf_counter() - began

    def prefill(self, count: int) -> float:
        """Seconds for a fresh prompt of `count` tokens."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), False)
        return sum(self.run(min(2048, count - start)) for start in range(0, count, 2048))

    def decode(self, count: int) -> list[float]:
        """Seconds of each of `count` tokens after what came before."""
        return [self.run(1) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape")
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--experts", type=int)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    if not arguments.file.exists():
        write_gguf(model_spec(read_shape(arguments.shape, arguments.layers, arguments.experts)), arguments.file)
    peer = LlamaCpp(str(arguments.file), arguments.threads, 4096)
    peer.prefill(512)
    for _ in range(3):
        prompt, steps = peer.prefill(512), peer.decode(64)
        print(f"prefill 512: {512 / prompt:.0f} tok/s   decode: {1 / statistics.median(steps):.1f} tok/s")


if __name__ == "__main__":
    main()
