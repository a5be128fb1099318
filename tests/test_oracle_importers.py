"""Checkpoints written by other programs: mlx-lm's quantised ones, transformers' FP8 and qwen3_next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the oracle extra")
pytest.importorskip("transformers", reason="needs the oracle extra")

import oracle
import torch
import transformers
from checkpoints import (
    DENSE,
    FP8,
    MOE,
    NEXT,
    TEXT,
    TIED,
    f32,
    fp8_tensors,
    hf_tensors,
    mlx_tensors,
    tiny,
    values,
    write,
)
from test_oracle import assert_close

import mlx_ttd
from mlx_ttd.spec import model_spec
from mlx_ttd.store import open_store

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

TOKENS = np.random.default_rng(5).integers(0, TEXT["vocab_size"], 70).tolist()


def logits(store: Path) -> np.ndarray:
    with mlx_ttd.load(store, "400MB", kv_bits=32) as llm:
        return np.array(llm.model(mx.array([TOKENS])))[0]


def from_mlx_lm(path: Path) -> dict[str, np.ndarray]:
    """The weights that mlx-lm dequantises from its own checkpoint, under transformers' names."""
    from mlx.utils import tree_flatten
    from mlx_lm.utils import dequantize_model, load_model

    model, _ = load_model(path)
    # In f32, since mlx-lm dequantises in the dtype of the scales.
    model.set_dtype(mx.float32)
    found = {}
    for name, array in tree_flatten(dequantize_model(model).parameters()):
        name = name.removeprefix("language_model.")
        values = np.array(array.astype(mx.float32))
        if name.endswith("norm.weight") and "linear_attn" not in name:
            values = values - 1
        if "conv1d" in name:
            values = values.transpose(0, 2, 1)
        found[name.replace("switch_mlp", "experts").replace("experts.down_proj.weight", "experts.down_proj")] = values
    for gate in [n for n in found if n.endswith("experts.gate_proj.weight")]:
        up = gate.replace("gate_proj", "up_proj")
        found[gate.replace("gate_proj.weight", "gate_up_proj")] = np.concatenate([found.pop(gate), found.pop(up)], 1)
    return found


@pytest.mark.parametrize(("group", "bits", "mode"), [(64, 4, "affine"), (32, 8, "affine"), (32, 4, "mxfp4")])
@pytest.mark.parametrize("kind", [MOE, TIED], ids=["moe", "dense, tied"])
def test_what_mlx_lm_quantised(tmp_path: Path, kind: dict[str, Any], group: int, bits: int, mode: str) -> None:
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    text = kind["text_config"] | {"full_attention_interval": 4, "model_type": kind["model_type"]}
    model, config = load_model(tiny(tmp_path / "hf", kind | {"text_config": text}))
    model, config = quantize_model(model, config, group, bits, mode=mode)
    save_model(tmp_path / "mlx", model)
    save_config(config, tmp_path / "mlx" / "config.json")
    store = mlx_ttd.convert(tmp_path / "mlx", tmp_path / "store")
    weights = from_mlx_lm(tmp_path / "mlx")
    if kind is TIED:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    peer = oracle.with_weights(random_model(kind), weights)
    assert_close(logits(store), oracle.oracle_logits(peer, TOKENS))


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def test_defaults_of_absent_keys(kind: str) -> None:
    theirs = transformers.AutoConfig.for_model(kind)
    shape = (DENSE if kind == "qwen3_5_text" else MOE)["text_config"]
    absent = ("rope_parameters", "max_position_embeddings", "tie_word_embeddings", "head_dim", "linear_conv_kernel_dim")
    spec = model_spec({k: v for k, v in shape.items() if k not in absent} | {"model_type": kind})
    rope = theirs.rope_parameters
    assert (spec.rope_theta, spec.rope_dim) == (rope["rope_theta"], spec.head_dim * rope["partial_rotary_factor"])
    assert (spec.max_context, spec.tied) == (theirs.max_position_embeddings, theirs.tie_word_embeddings)
    assert (spec.head_dim, spec.conv, spec.eps) == (theirs.head_dim, theirs.linear_conv_kernel_dim, theirs.rms_norm_eps)


@pytest.mark.parametrize("inside", [True, False])
def test_the_tie_of_text_config_wins_over_the_one_outside(tmp_path: Path, inside: bool) -> None:
    text = DENSE["text_config"] | {"tie_word_embeddings": inside}
    config = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": not inside}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == model_spec(config).tied == inside


def test_a_head_beside_a_tied_flag(tmp_path: Path) -> None:
    """transformers too takes the head that the files hold."""
    spec = model_spec(DENSE)
    source = write(tmp_path / "src", TIED, hf_tensors(spec, values(spec)))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert_close(
        logits(mlx_ttd.convert(source, tmp_path / "dst", policy="int8")),
        oracle.oracle_logits(oracle.with_weights(theirs, oracle.store_weights(open_store(tmp_path / "dst"))), TOKENS),
    )
    assert not torch.equal(theirs.lm_head.weight, theirs.model.embed_tokens.weight)


def random_model(kind: dict[str, Any]) -> Any:
    family = "Qwen3_5Moe" if kind is MOE else "Qwen3_5"
    fields = {k: v for k, v in kind["text_config"].items() if k != "model_type"}
    config = getattr(transformers, f"{family}TextConfig")(**fields)
    return getattr(transformers, f"{family}ForCausalLM")(config).float().eval()


@pytest.mark.parametrize("config", [MOE, DENSE], ids=["moe", "dense"])
def test_f32_scales(tmp_path: Path, config: dict[str, Any]) -> None:
    spec, q = model_spec(config), {"group_size": 64, "bits": 4, "mode": "affine"}
    tensors = mlx_tensors(spec, values(spec, dtype="F32"), lambda _: (4, 64, "affine"))
    store = mlx_ttd.convert(write(tmp_path / "src", config | {"quantization": q}, tensors), tmp_path / "dst")
    peer = oracle.with_weights(random_model(config), oracle.store_weights(open_store(store)))
    assert_close(logits(store), oracle.oracle_logits(peer, TOKENS))


def test_fp8_equals_the_dequantised_load_of_transformers(tmp_path: Path) -> None:
    text = FP8["text_config"]
    spec = model_spec(text)
    tensors = fp8_tensors(hf_tensors(spec, values(spec), "model.", "each"), "BF16").encoded
    config = text | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    }
    source = write(tmp_path / "src", config, tensors)
    wanted = transformers.AutoModelForCausalLM.from_pretrained(
        source,
        dtype=torch.bfloat16,
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True),
        experts_implementation="eager",
    )
    wanted = {k: v.float().numpy() for k, v in wanted.state_dict().items()}
    found = oracle.store_weights(open_store(mlx_ttd.convert(source, tmp_path / "dst", policy="experts-only")))
    assert open_store(tmp_path / "dst").resident["layers.3.attn.q"].dtype == "BF16"
    assert set(found) == set(wanted)
    for name, array in found.items():
        if ".experts." not in name:
            rounded = np.array(mx.array(array).astype(mx.bfloat16).astype(mx.float32))
            np.testing.assert_array_equal(rounded, wanted[name], err_msg=name)
            continue
        codes, scales, biases = mx.quantize(mx.array(wanted[name]), 64, 8)
        scales, biases = (x.astype(mx.bfloat16).astype(mx.float32) for x in (scales, biases))
        np.testing.assert_array_equal(array, np.array(mx.dequantize(codes, scales, biases, 64, 8)), err_msg=name)


def test_qwen3_next(tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = transformers.Qwen3NextConfig(**{k: v for k, v in NEXT.items() if k not in ("model_type", "architectures")})
    model = transformers.Qwen3NextForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "A_log" not in name:
                parameter.add_(torch.randn_like(parameter) * (0.2 if "norm" in name else 0.06))
    source = oracle.save(model, tmp_path / "src", fused=False)
    store = mlx_ttd.convert(source, tmp_path / "dst", policy="experts-only")
    experts = {k: v for k, v in oracle.store_weights(open_store(store)).items() if ".experts." in k}
    _, extra = model.load_state_dict({k: torch.from_numpy(v) for k, v in experts.items()}, strict=False)
    assert not extra
    assert len(experts) == 8
    assert_close(logits(store), oracle.oracle_logits(model, TOKENS))


def test_every_width_runs_as_transformers_does_on_the_dequantised_weights(tmp_path: Path) -> None:
    spec = model_spec(MOE)
    store = mlx_ttd.convert(tiny(tmp_path / "src"), tmp_path / "dst", policy="mxfp4")
    weights = oracle.store_weights(open_store(store))
    np.testing.assert_array_equal(weights["lm_head.weight"], f32(values(spec)["head"]))
    assert_close(logits(store), oracle.oracle_logits(oracle.with_weights(random_model(MOE), weights), TOKENS))
