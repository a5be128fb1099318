"""Each kind of checkpoint: MLX transcoded bit for bit, qwen3_next untangled, block FP8 decoded as it was encoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import (
    DENSE,
    DENSE_TEXT,
    FP8,
    MOE,
    NEXT,
    TEXT,
    TIED,
    f32,
    fp8_tensors,
    hf_tensors,
    mlx_tensors,
    next_tensors,
    packed,
    tiny,
    values,
    write,
)
from test_convert import bits, check_store, record_parts

import mlx_ttd
from mlx_ttd.errors import CheckpointError, ConfigError
from mlx_ttd.spec import Quantisation, model_spec
from mlx_ttd.store import convert, open_store, read_tensor
from mlx_ttd.store.importers.base import concat, cut, reshape, take
from mlx_ttd.store.overrides import canonical

ALL = {"group_size": 64, "bits": 4, "mode": "affine"}
ROUTER = {"group_size": 64, "bits": 8}


def as_mlx_lm(default: dict[str, Any], overrides: dict[str, Any]) -> Any:
    """What mlx-lm packs: every matrix by the default, or by the override whose path ends the module's."""

    def choose(module: str) -> tuple[int, int, str] | None:
        said = next((v for k, v in overrides.items() if module.endswith(k)), default)
        return (said["bits"], said["group_size"], said.get("mode", "affine")) if said else None

    return choose


def mlx_checkpoint(
    path: Path,
    config: dict[str, Any],
    default: dict[str, Any],
    overrides: dict[str, Any],
    prefix: str = "language_model.model.",
) -> Path:
    spec = model_spec(config)
    tensors = mlx_tensors(spec, values(spec), as_mlx_lm(default, overrides))
    paths = {prefix + k: v for k, v in overrides.items()}
    return write(
        path, config | {"quantization": default | paths, "quantization_config": default | paths}, tensors, shards=2
    )


def router_overrides(layers: int = 4) -> dict[str, Any]:
    gates = ("mlp.gate", "mlp.shared_expert_gate")
    return {f"layers.{i}.{gate}": ROUTER for i in range(layers) for gate in gates}


@pytest.mark.parametrize(
    "default", [ALL, ALL | {"group_size": 32}, ALL | {"bits": 8}, {"group_size": 32, "bits": 4, "mode": "mxfp4"}]
)
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.", "model.language_model."])
def test_mlx_is_transcoded_bit_for_bit(tmp_path: Path, default: dict[str, Any], prefix: str) -> None:
    spec = model_spec(MOE)
    store = open_store(
        convert(mlx_checkpoint(tmp_path / "src", MOE, default, router_overrides(), prefix), tmp_path / "dst")
    )
    weights = values(spec)
    plus_one = {
        n: ("BF16", mlx_tensors(spec, weights)[s][1]) for n, s in (("norm", "language_model.model.norm.weight"),)
    }
    assert store.norms == "1+w"
    np.testing.assert_array_equal(bits(read_tensor(store.resident["norm"])), plus_one["norm"][1])
    mode, scale = ("mxfp4", "uint8") if default["mode"] == "mxfp4" else ("affine", "bfloat16")
    usual = Quantisation(default["bits"], default["group_size"], mode, scale)
    assert store.quantisation("layers.2.moe.router") == Quantisation(8, 64)
    assert store.quantisation("layers.2.shared.scale") == Quantisation(8, 64)
    for name in ("head", "embedding", "layers.0.gdn.in_a", "layers.3.attn.q", "layers.1.shared.down"):
        assert store.quantisation(name) == usual
    norms = {n for n in weights if n.endswith("norm") and "gdn" not in n}
    for name in norms:
        weights[name] = ("BF16", bits(read_tensor(store.resident[name])))
    check_store(store, spec, weights)


def test_norms_are_one_plus_w_and_the_gated_norm_is_not(tmp_path: Path) -> None:
    spec = model_spec(MOE)
    store = open_store(convert(mlx_checkpoint(tmp_path / "src", MOE, ALL, router_overrides()), tmp_path / "dst"))
    weights = values(spec)
    for name in ("layers.0.input_norm", "layers.3.attn.k_norm", "norm"):
        found = np.array(read_tensor(store.resident[name]).astype(mx.float32))
        np.testing.assert_allclose(found, f32(weights[name]) + 1, atol=8e-3)
    np.testing.assert_array_equal(
        bits(read_tensor(store.resident["layers.0.gdn.norm"])), weights["layers.0.gdn.norm"][1]
    )
    np.testing.assert_array_equal(
        bits(read_tensor(store.resident["layers.0.gdn.conv"])), weights["layers.0.gdn.conv"][1]
    )


@pytest.mark.parametrize("config", [DENSE, TIED])
def test_dense_mlx(tmp_path: Path, config: dict[str, Any]) -> None:
    store = open_store(convert(mlx_checkpoint(tmp_path / "src", config, ALL, {}), tmp_path / "dst"))
    assert store.quantisation("embedding") == Quantisation(4, 64)
    assert store.quantisation("layers.1.mlp.down") == Quantisation(4, 64)


def test_mlx_without_quantisation_follows_the_policy(tmp_path: Path) -> None:
    spec = model_spec(MOE)
    store = open_store(convert(write(tmp_path / "src", MOE, mlx_tensors(spec, values(spec))), tmp_path / "dst"))
    assert store.norms == "1+w"
    wanted = packed(values(spec)["layers.1.moe.gate_up"], 4, 64)
    for found, (_, array) in zip(record_parts(store, 1, 3), wanted, strict=False):
        np.testing.assert_array_equal(found, array[3])


def test_parts_of_a_record_may_differ(tmp_path: Path) -> None:
    overrides = router_overrides() | {"layers.1.mlp.switch_mlp.down_proj": {"group_size": 32, "bits": 6}}
    overrides |= {"layers.2.mlp.switch_mlp.gate_proj": ROUTER, "layers.2.mlp.switch_mlp.up_proj": ROUTER}
    store = open_store(convert(mlx_checkpoint(tmp_path / "src", MOE, ALL, overrides), tmp_path / "dst"))
    widths = [((m.gate_up.bits, m.gate_up.group), (m.down.bits, m.down.group)) for m in store.layouts]
    assert widths == [((4, 64), (4, 64)), ((4, 64), (6, 32)), ((8, 64), (4, 64)), ((4, 64), (4, 64))]
    wanted = packed(values(model_spec(MOE))["layers.1.moe.down"], 6, 32)
    for found, (_, array) in zip(record_parts(store, 1, 5)[3:], wanted, strict=True):
        np.testing.assert_array_equal(found, array[5])


@pytest.mark.parametrize("dtype", ["F32", "F16"])
@pytest.mark.parametrize("config", [MOE, DENSE], ids=["experts", "dense"])
def test_scales_keep_the_dtype_found(tmp_path: Path, dtype: str, config: dict[str, Any]) -> None:
    spec = model_spec(config)
    weights = values(spec, dtype=dtype)
    tensors = mlx_tensors(spec, weights, as_mlx_lm(ALL, {}))
    store = open_store(convert(write(tmp_path / "src", config | {"quantization": ALL}, tensors), tmp_path / "dst"))
    scale = {"F32": "float32", "F16": "float16"}[dtype]
    assert store.quantisation("layers.3.attn.q") == Quantisation(4, 64, scale_dtype=scale)
    for layout in store.layouts if spec.is_moe else ():
        assert (layout.gate_up.scale_dtype, layout.down.scale_dtype) == (scale, scale)
    norms = {n for n in weights if n.endswith("norm") and "gdn" not in n}
    weights |= {name: (dtype, bits(read_tensor(store.resident[name]))) for name in norms}
    check_store(store, spec, weights)


@pytest.mark.parametrize("config", [MOE, DENSE], ids=["experts", "dense"])
def test_every_backend_multiplies_by_f32_scales(tmp_path: Path, config: dict[str, Any]) -> None:
    spec = model_spec(config)
    tensors = mlx_tensors(spec, values(spec, dtype="F32"), as_mlx_lm(ALL, {}))
    store = convert(write(tmp_path / "src", config | {"quantization": ALL}, tensors), tmp_path / "dst")
    logits = []
    for backend in ("reference", "auto"):
        with mlx_ttd.load(store, "300MB", kv_bits=32, backend=backend) as llm:
            logits.append(np.array(llm.model(mx.array([[1, 2, 3, 4, 5]])))[0])
    np.testing.assert_allclose(*logits, atol=1e-4)


def test_gate_and_up_in_different_precisions_are_refused(tmp_path: Path) -> None:
    overrides = router_overrides() | {"layers.2.mlp.switch_mlp.gate_proj": ROUTER}
    with pytest.raises(CheckpointError, match=r"layers\.2\.moe\.gate_up is made of tensors in different precisions"):
        convert(mlx_checkpoint(tmp_path / "src", MOE, ALL, overrides), tmp_path / "dst")


def test_a_config_that_contradicts_its_tensors(tmp_path: Path) -> None:
    spec = model_spec(MOE)
    tensors = mlx_tensors(spec, values(spec), as_mlx_lm(ALL, router_overrides()))
    with pytest.raises(
        CheckpointError, match=r"mlp\.gate has 8 bits in groups of 64 \(affine\) where config\.json says 4"
    ):
        convert(write(tmp_path / "src", MOE | {"quantization": ALL}, tensors), tmp_path / "dst")


def test_formats_that_no_kernel_reads_are_refused(tmp_path: Path) -> None:
    spec = model_spec(MOE)
    tensors = mlx_tensors(
        spec, values(spec), as_mlx_lm({"group_size": 32, "bits": 8, "mode": "mxfp8"}, router_overrides())
    )
    with pytest.raises(CheckpointError, match="mxfp4 has 4 bits, groups of 32"):
        convert(write(tmp_path / "src", MOE, tensors), tmp_path / "dst")


def test_what_is_quantised_stays_unless_asked(tmp_path: Path) -> None:
    source = mlx_checkpoint(tmp_path / "src", MOE, ALL, router_overrides())
    store = open_store(convert(source, tmp_path / "dst", policy="int8", head_bits=8, embed_bits=16))
    assert store.layouts[0].gate_up.bits == 4
    codes, scales, biases = (mx.array(p) for _, p in packed(values(store.spec)["head"], 4, 64))
    scales, biases = (x.view(mx.bfloat16).astype(mx.float32) for x in (scales, biases))
    again = mx.quantize(mx.dequantize(codes, scales, biases, 64, 4), 64, 8)
    assert mx.array_equal(read_tensor(store.resident["head"]), again[0])
    assert mx.array_equal(read_tensor(store.resident["head.scales"]), again[1].astype(mx.bfloat16))
    assert store.embedding["embedding"].dtype == "BF16"


def left_plain(path: Path, *left: str) -> Path:
    """An MLX checkpoint that leaves some modules in bf16."""
    spec, choose = model_spec(MOE), as_mlx_lm(ALL, router_overrides())
    tensors = mlx_tensors(spec, values(spec), lambda module: None if module.endswith(left) else choose(module))
    said = ALL | {"language_model.model." + k: v for k, v in router_overrides().items()}
    return write(path, MOE | {"quantization": said}, tensors)


def test_what_a_quantised_checkpoint_left_plain_stays_so_unless_asked(tmp_path: Path) -> None:
    source = left_plain(tmp_path / "src", "self_attn.q_proj", "lm_head", "linear_attn.out_proj")
    kept = open_store(convert(source, tmp_path / "kept"))
    for name in ("layers.3.attn.q", "head", "layers.0.gdn.out"):
        assert kept.quantisation(name) is None
        np.testing.assert_array_equal(bits(read_tensor(kept.resident[name])), values(kept.spec)[name][1])
    assert kept.quantisation("layers.3.attn.k") == Quantisation(4, 64)
    headed = open_store(convert(source, tmp_path / "headed", head_bits=8))
    assert (headed.quantisation("head"), headed.quantisation("layers.3.attn.q")) == (Quantisation(8, 64), None)
    asked = open_store(convert(source, tmp_path / "asked", policy="int4"))
    assert (asked.quantisation("head"), asked.quantisation("layers.3.attn.q")) == (None, Quantisation(4, 64))


def test_experts_that_a_quantised_checkpoint_left_plain_wait_for_a_policy(tmp_path: Path) -> None:
    source = left_plain(tmp_path / "src", "layers.2.mlp.switch_mlp.down_proj")
    with pytest.raises(CheckpointError, match=r"layers\.2\.moe\.down: it is plain where .* name a policy"):
        convert(source, tmp_path / "dst")
    wanted = packed(values(model_spec(MOE))["layers.2.moe.down"], 8, 64)
    store = open_store(convert(source, tmp_path / "dst", policy="int8"))
    for found, (_, array) in zip(record_parts(store, 2, 5)[3:], wanted, strict=True):
        np.testing.assert_array_equal(found, array[5])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"quantization": ALL | {"model.layers.0.mlp.gate": ROUTER, "layers.0.mlp.gate": ALL}},
            "says both .* of layers",
        ),
        (
            {"quantization": ALL | {"lm_head": False, "language_model.lm_head": ROUTER}},
            "says both False and .* of lm_head",
        ),
        ({"quantization": ALL, "quantization_config": ALL | {"bits": 8}}, "contradict each other"),
        ({"quantization": ALL, "quantization_config": ALL | {"lm_head": ROUTER}}, "contradict each other"),
        ({"quantization": ALL | {"lm_head": ROUTER}}, "lm_head is not packed where config.json says that it is"),
        ({"quantization_config": ALL | {"bits": 8}}, "4 bits in groups of 64 .* where config.json says 8"),
    ],
)
def test_overrides_that_contradict_each_other_or_tensors(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    spec = model_spec(MOE)
    choose = as_mlx_lm(ALL, {})
    tensors = mlx_tensors(spec, values(spec), lambda module: None if module.endswith("lm_head") else choose(module))
    with pytest.raises(CheckpointError, match=words):
        convert(write(tmp_path / "src", MOE | fields, tensors), tmp_path / "dst")


def test_qwen3_next_rows_are_untangled(tmp_path: Path) -> None:
    spec = model_spec(NEXT)
    store = open_store(convert(write(tmp_path / "src", NEXT, next_tensors(spec, values(spec))), tmp_path / "dst"))
    check_store(store, spec, values(spec))


def test_configs_nested_flat_by_list_or_by_interval_are_one_model() -> None:
    listed = {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "rope_parameters": TEXT["rope_parameters"]}
    flat_rope = {k: v for k, v in TEXT.items() if k != "rope_parameters"} | {
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
    }
    configs = [MOE, TEXT, TEXT | listed, TEXT | {"full_attention_interval": 4}, flat_rope]
    assert len({model_spec(config) for config in configs}) == 1


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def test_absent_keys_take_the_defaults_of_the_family(kind: str) -> None:
    """As the configuration classes of transformers document them; test_oracle_importers compares."""
    config = (DENSE_TEXT if kind == "qwen3_5_text" else TEXT) | {"model_type": kind}
    absent = {k: v for k, v in config.items() if k not in ("rope_parameters", "max_position_embeddings")}
    spec = model_spec({k: v for k, v in absent.items() if k != "tie_word_embeddings"})
    assert (spec.rope_theta, spec.rope_dim, spec.max_context, spec.tied) == (1e4, 8, 32_768, False)
    assert model_spec(absent | {"rope_parameters": {"partial_rotary_factor": 0.5}}).rope_theta == 1e4
    assert model_spec(absent | {"rope_scaling": {"type": "default"}, "rope_theta": 5e5}).rope_theta == 5e5


def test_two_objects_that_disagree_on_the_rope_are_refused() -> None:
    with pytest.raises(ConfigError, match="disagree on rope_theta"):
        model_spec(TEXT | {"rope_scaling": {"rope_type": "default", "rope_theta": 1e4}})


@pytest.mark.parametrize(
    ("outside", "inside", "tied"),
    [(None, None, False), (True, None, True), (False, True, True), (True, False, False), (True, True, True)],
)
def test_the_tie_of_text_config_wins(outside: bool | None, inside: bool | None, tied: bool) -> None:
    text = {k: v for k, v in DENSE_TEXT.items() if k != "tie_word_embeddings"}
    text |= {} if inside is None else {"tie_word_embeddings": inside}
    config = {"model_type": "qwen3_5", "text_config": text} | (
        {} if outside is None else {"tie_word_embeddings": outside}
    )
    assert model_spec(config).tied == tied


def test_a_tie_that_is_neither_true_nor_false_is_refused() -> None:
    with pytest.raises(ConfigError, match="tie_word_embeddings is 'no'; true or false is needed"):
        model_spec(TEXT | {"tie_word_embeddings": "no"})


MULTIMODAL = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": TEXT["rope_parameters"] | MULTIMODAL},
        {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25}},
        {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "type": "default"} | MULTIMODAL},
        {"rope_parameters": None, "rope_scaling": None, "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        {
            "rope_parameters": None,
            "rope_scaling": {"type": "mrope", "rope_type": "default"} | MULTIMODAL,
            "rope_theta": 1e7,
        },
        {"rope_scaling": {"rope_type": None}},
        {"hidden_act": "silu"},
    ],
)
def test_published_forms_of_plain_rope_are_one_model(rope: dict[str, Any]) -> None:
    assert model_spec({"model_type": "qwen3_5_moe", "text_config": TEXT | rope}) == model_spec(MOE)
    assert model_spec(TEXT | rope) == model_spec(MOE)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"rope_parameters": TEXT["rope_parameters"] | {"rope_type": "yarn", "factor": 4.0}}, "RoPE of type 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "RoPE of type 'linear'"),
        ({"rope_parameters": {"rope_type": "default", "type": "dynamic"}}, "RoPE of type 'dynamic'"),
        ({"rope_type": "llama3"}, "RoPE of type 'llama3'"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, r"RoPE of type \['yarn'\]"),
        ({"rope_scaling": 4.0}, "rope_scaling is a float where an object is needed"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_arithmetic_that_is_not_done_is_refused(field: dict[str, Any], words: str) -> None:
    for config in ({"model_type": "qwen3_5_moe", "text_config": TEXT | field}, TEXT | field):
        with pytest.raises(ConfigError, match=rf"^here: {words}"):
            model_spec(config, "here")


@pytest.mark.parametrize("scale", ["F32", "BF16", "F8_E8M0"])
@pytest.mark.parametrize("experts", ["fused", "each"])
def test_block_fp8_is_decoded_to_bf16(tmp_path: Path, scale: str, experts: str) -> None:
    spec = model_spec(FP8)
    source = fp8_tensors(hf_tensors(spec, values(spec), experts=experts), scale)
    store = open_store(convert(write(tmp_path / "src", FP8, source.encoded), tmp_path / "dst", policy="experts-only"))
    decoded = values(spec)
    for name, array in source.decoded(spec).items():
        decoded[name] = array
    check_store(store, spec, decoded)
    assert store.resident["layers.3.attn.q"].dtype == "BF16"


def test_fp8_scales_of_another_block_are_refused(tmp_path: Path) -> None:
    spec = model_spec(FP8)
    source = fp8_tensors(hf_tensors(spec, values(spec)), "F32").encoded
    name = "model.language_model.layers.3.self_attn.q_proj.weight_scale_inv"
    source[name] = "F32", np.ones((1, 1), np.float32)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight_scale_inv is \[1, 1\] where \[2, 2\] is needed"):
        convert(write(tmp_path / "src", FP8, source), tmp_path / "dst")


def test_fp8_in_place_of_a_vector_is_refused(tmp_path: Path) -> None:
    spec = model_spec(FP8)
    tensors = hf_tensors(spec, values(spec))
    name = "model.language_model.layers.3.input_layernorm.weight"
    tensors[name] = "F8_E4M3", np.zeros(spec.hidden, np.uint8)
    tensors[name + "_scale_inv"] = "F32", np.ones(2, np.float32)
    with pytest.raises(CheckpointError, match=r"input_layernorm\.weight is F8_E4M3 \[256\]; block scales are read for"):
        convert(write(tmp_path / "src", FP8, tensors), tmp_path / "dst")


def test_a_shard_that_is_missing_or_outside(tmp_path: Path) -> None:
    spec = model_spec(MOE)
    source = write(tmp_path / "src", MOE, hf_tensors(spec, values(spec)), shards=3)
    index = source / "model.safetensors.index.json"
    text = index.read_text()
    (source / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of 3 shards \(model-00002-of-00003"):
        convert(source, tmp_path / "dst")
    index.write_text(text.replace("model-00002", "../model-00002"))
    with pytest.raises(CheckpointError, match="leads outside the checkpoint"):
        convert(source, tmp_path / "dst")
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="has no weight_map"):
        convert(source, tmp_path / "dst")


def test_a_source_cut_short(tmp_path: Path) -> None:
    source = tiny(tmp_path / "src")
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor .* it is cut short"):
        convert(source, tmp_path / "dst")


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        convert(tmp_path / "none", tmp_path / "dst")
    source = write(tmp_path / "src", MOE, {})
    (source / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors"):
        convert(source, tmp_path / "dst")


def test_moves() -> None:
    assert [(r.start, r.stop) for r in take("a", (3, 4, 5))] == [(0, 12)]
    assert [(r.start, r.stop) for r in take("a", (7,))] == [(0, 1)]
    assert [(r.shape, r.stop) for r in reshape("a", (6, 4, 1), (6, 4))] == [((6, 4, 1), 6)]
    assert [r.start for r in concat(cut("a", (9, 2), 4, 6), cut("a", (9, 2), 0, 2))] == [4, 0]


def test_module_paths_lose_their_prefix() -> None:
    for path in ("layers.0.mlp.gate", "model.layers.0.mlp.gate", "language_model.model.layers.0.mlp.gate"):
        assert canonical(path) == "layers.0.mlp.gate"
    assert canonical("language_model.mtp.layers.0.mlp.gate") == "mtp.layers.0.mlp.gate"
    assert canonical("language_model.lm_head") == "lm_head"
    assert canonical("visual.blocks") == "visual.blocks"
