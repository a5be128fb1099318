"""A checkpoint becomes a store that holds its very numbers, whatever its layout; a failure leaves nothing."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import DENSE, MOE, TEXT, TIED, bf16, f32, hf_tensors, packed, tiny, values, write

from mlx_ttd.errors import CheckpointError, ConversionError, OptionError, StoreError
from mlx_ttd.spec import ModelSpec, Quantisation, RecordLayout, model_spec, mtp_tensors, trunk_tensors
from mlx_ttd.store import Store, convert, open_store, policies, read_tensor, verify
from mlx_ttd.store.policy import FOLDER, known_roles, load_policy, policy_role
from mlx_ttd.text import Tokenizer


def bits(array: mx.array) -> np.ndarray:
    """The bytes of an array as numpy integers or floats."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def record_parts(store: Store, layer: int | None, expert: int) -> list[np.ndarray]:
    """Codes, scales and biases of gate_up, then of down, read from a record by the layout's offsets alone."""
    holder, index = (store.mtp, 0) if layer is None else (store, layer)
    path, start, _ = holder.expert_file(index)
    layout: RecordLayout = holder.layouts[index]
    raw = np.fromfile(path, np.uint8, layout.stride, offset=start + expert * layout.stride)
    found = []
    for m in (layout.gate_up, layout.down):
        kinds = {"bfloat16": np.uint16, "float16": np.float16, "float32": np.float32, "uint8": np.uint8}
        found.append(raw[m.codes :][: m.codes_bytes].view(np.uint32).reshape(m.rows, m.words))
        for offset in (m.scales, m.biases):
            if offset is not None:
                found.append(raw[offset:][: m.scales_bytes].view(kinds[m.scale_dtype]).reshape(m.rows, m.groups))
    return found


def check_store(store: Store, spec: ModelSpec, weights: dict) -> int:
    """Compare every tensor and every record with mx.quantize of the checkpoint's values; the number of tensors seen."""
    infos = store.resident | store.embedding
    infos |= {f"mtp.{name}": info for name, info in store.mtp.resident.items()} if store.mtp else {}
    tensors = trunk_tensors(spec) + (mtp_tensors(spec) if store.mtp else [])
    for t in tensors:
        if t.kind == "experts":
            continue
        holder = store.mtp if t.name.startswith("mtp.") else store
        q = holder.quantisation(t.name.removeprefix("mtp."))
        wanted = (weights[t.name],) if q is None else packed(weights[t.name], q.bits, q.group, q.mode)
        for suffix, (dtype, array) in zip(("", ".scales", ".biases"), wanted, strict=False):
            info = infos[t.name + suffix]
            assert (info.dtype, info.shape) == (dtype, array.shape), t.name
            np.testing.assert_array_equal(bits(read_tensor(info)), array, err_msg=t.name)
    for layer in [*range(len(spec.layer_types)), *([None] if store.mtp else [])] if spec.is_moe else []:
        layout = store.layouts[layer] if layer is not None else store.mtp.layouts[0]
        base = f"layers.{layer}." if layer is not None else "mtp.layers.0."
        wanted = [
            part
            for role, m in (("moe.gate_up", layout.gate_up), ("moe.down", layout.down))
            for _, part in packed(weights[base + role], m.bits, m.group, m.mode)
        ]
        for expert in range(spec.experts):
            for found, part in zip(record_parts(store, layer, expert), wanted, strict=True):
                np.testing.assert_array_equal(found, part[expert])
    return len(tensors)


@pytest.mark.parametrize("experts", ["fused", "each"])
@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model.", ""])
def test_layouts_and_prefixes_give_the_same_records(tmp_path: Path, experts: str, prefix: str) -> None:
    spec = model_spec(MOE)
    weights = values(spec)
    store = open_store(
        convert(write(tmp_path / "src", MOE, hf_tensors(spec, weights, prefix, experts), shards=3), tmp_path / "dst")
    )
    assert check_store(store, spec, weights) == len(trunk_tensors(spec))
    assert store.norms == "w"
    assert store.layouts[0] is not None
    assert store.layouts[0].gate_up.bits == 4


@pytest.mark.parametrize("config", [DENSE, TIED])
def test_dense_models(tmp_path: Path, config: dict) -> None:
    spec = model_spec(config)
    store = open_store(convert(tiny(tmp_path / "src", config), tmp_path / "dst"))
    check_store(store, spec, values(spec))
    assert store.layouts == (None,) * 4
    assert not (tmp_path / "dst" / "experts").exists()
    assert bool(store.embedding) != spec.tied
    assert ("embedding" in store.resident) == spec.tied
    assert ("head" in store.resident) != spec.tied


@pytest.mark.parametrize("config", [MOE, DENSE])
def test_the_mtp_layer_gets_its_own_files_at_eight_bits(tmp_path: Path, config: dict) -> None:
    spec = model_spec(config)
    store = open_store(convert(tiny(tmp_path / "src", config, mtp=True), tmp_path / "dst"))
    check_store(store, spec, values(spec, mtp=True))
    assert store.mtp is not None
    assert store.mtp.quantisation("layers.0.attn.q") == Quantisation(8, 64)
    assert [None if m is None else (m.gate_up.bits, m.down.bits) for m in store.mtp.layouts] == [
        (8, 8) if spec.is_moe else None
    ]
    assert store.mtp.spec.layer_types == ("full_attention",)
    assert store.mtp.digest != store.digest
    assert not any(name.startswith("mtp") for name in store.resident)


def test_the_mtp_layer_may_differ_in_expert_layout_from_the_trunk(tmp_path: Path) -> None:
    spec = model_spec(MOE)
    weights = values(spec, mtp=True)
    tensors = hf_tensors(spec, weights, experts="fused")
    tensors = {k: v for k, v in tensors.items() if not k.startswith("mtp.")}
    tensors |= {k: v for k, v in hf_tensors(spec, weights, experts="each").items() if k.startswith("mtp.")}
    check_store(open_store(convert(write(tmp_path / "src", MOE, tensors), tmp_path / "dst")), spec, weights)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_what_stays_plain_keeps_its_bits_and_scales_are_bf16(tmp_path: Path, dtype: str) -> None:
    spec = model_spec(MOE)
    store = open_store(convert(tiny(tmp_path / "src", dtype=dtype), tmp_path / "dst"))
    weights = values(spec, dtype=dtype)
    for name in ("head", "norm", "layers.0.gdn.in_a", "layers.3.moe.router", "layers.0.gdn.a_log"):
        np.testing.assert_array_equal(bits(read_tensor(store.resident[name])), weights[name][1])
    codes, scales, biases = mx.quantize(mx.array(f32(weights["layers.3.attn.q"])), 64, 4)
    assert mx.array_equal(read_tensor(store.resident["layers.3.attn.q"]), codes)
    assert mx.array_equal(read_tensor(store.resident["layers.3.attn.q.scales"]), scales.astype(mx.bfloat16))
    assert mx.array_equal(read_tensor(store.resident["layers.3.attn.q.biases"]), biases.astype(mx.bfloat16))


@pytest.mark.parametrize("bits_wanted", [2, 3, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_every_width_and_group(tmp_path: Path, bits_wanted: int, group: int) -> None:
    config = {**TEXT, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "num_hidden_layers": 1}
    config |= {"layer_types": ["full_attention"]}
    spec = model_spec(config)
    roles = json.loads((Path(convert.__code__.co_filename).parent / "policies" / "int4.json").read_text())["roles"]
    roles = {r: {"bits": bits_wanted, "group": group} if isinstance(p, dict) else p for r, p in roles.items()}
    (tmp_path / "p.json").write_text(json.dumps({"roles": roles}))
    store = open_store(convert(tiny(tmp_path / "src", config), tmp_path / "dst", policy=tmp_path / "p.json"))
    check_store(store, spec, values(spec))
    assert store.layouts[0].down.bits == bits_wanted


def test_mxfp4_by_policy(tmp_path: Path) -> None:
    spec = model_spec(MOE)
    store = open_store(convert(tiny(tmp_path / "src"), tmp_path / "dst", policy="mxfp4"))
    check_store(store, spec, values(spec))
    assert store.layouts[0].gate_up.biases is None


@pytest.mark.parametrize("width", [16, 8, 4])
def test_head_and_embedding_widths(tmp_path: Path, width: int) -> None:
    spec = model_spec(MOE)
    store = open_store(convert(tiny(tmp_path / "src"), tmp_path / "dst", head_bits=width, embed_bits=width))
    check_store(store, spec, values(spec))
    q = None if width == 16 else Quantisation(width, 64)
    assert store.quantisation("head") == store.quantisation("embedding") == q


def test_the_head_of_a_tied_model_is_its_embedding(tmp_path: Path) -> None:
    spec = model_spec(TIED)
    source = tiny(tmp_path / "src", TIED)
    store = open_store(convert(source, tmp_path / "dst", head_bits=8))
    check_store(store, spec, values(spec))
    assert store.quantisation("embedding") == Quantisation(8, 64)
    with pytest.raises(OptionError, match="must agree"):
        convert(source, tmp_path / "other", head_bits=8, embed_bits=4)


def test_any_safetensors_tool_opens_every_file(tmp_path: Path) -> None:
    store = open_store(convert(tiny(tmp_path / "src"), tmp_path / "dst"))
    loaded = mx.load(str(tmp_path / "dst" / "experts" / "layer-002.safetensors"))
    assert list(loaded) == ["records"]
    assert loaded["records"].shape == (8, store.layouts[2].stride)
    resident = mx.load(str(tmp_path / "dst" / "resident.safetensors"))
    assert mx.array_equal(resident["layers.3.attn.q"], read_tensor(store.resident["layers.3.attn.q"]))


def test_the_same_checkpoint_gives_the_same_bytes(tmp_path: Path) -> None:
    extra = {"tokenizer.json": "{}", "chat_template.jinja": "héllo", "tokenizer_config.json": "{}", "notes.txt": "no"}
    source = write(tmp_path / "src", MOE, hf_tensors(model_spec(MOE), values(model_spec(MOE))), extra=extra)
    a, b = convert(source, tmp_path / "a"), convert(source, tmp_path / "b")
    files = {p.relative_to(a): p.read_bytes() for p in a.rglob("*") if p.is_file()}
    assert files == {p.relative_to(b): p.read_bytes() for p in b.rglob("*") if p.is_file()}
    assert files[Path("chat_template.jinja")] == "héllo".encode()
    assert files[Path("config.json")] == (source / "config.json").read_bytes()
    assert Path("notes.txt") not in files
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "src"]


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    seen = []
    convert(tiny(tmp_path / "src"), tmp_path / "dst", progress=seen.append)
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    assert seen[-1].done == seen[-1].total == sum(e.bytes for e in open_store(tmp_path / "dst").manifest.files.values())
    assert all(p.rate >= 0 for p in seen)
    assert seen[-1].eta == 0


def test_one_error_lists_everything_that_is_wrong(tmp_path: Path) -> None:
    spec = model_spec(MOE)
    tensors = hf_tensors(spec, values(spec))
    base = "model.language_model.layers."
    del tensors[base + "3.self_attn.k_proj.weight"]
    tensors[base + "0.mlp.gate.weight"] = "BF16", np.zeros((9, 128), np.uint16)
    tensors[base + "1.surprise"] = "BF16", np.zeros(3, np.uint16)
    tensors[base + "2.linear_attn.dt_bias"] = "U8", np.zeros(4, np.uint8)
    tensors["model.visual.patch.weight"] = "BF16", np.zeros(3, np.uint16)
    with pytest.raises(CheckpointError) as error:
        convert(write(tmp_path / "src", MOE, tensors), tmp_path / "dst")
    for words in ("3.self_attn.k_proj.weight", "[9, 128] where [8, 128]", "1.surprise", "dt_bias is U8"):
        assert words in str(error.value)
    assert "visual" not in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["src"]


def test_an_error_is_bounded(tmp_path: Path) -> None:
    tensors = hf_tensors(model_spec(MOE), values(model_spec(MOE)))
    tensors |= {f"extra.{i}": ("U8", np.zeros(1, np.uint8)) for i in range(500)}
    with pytest.raises(CheckpointError, match="and 480 more") as error:
        convert(write(tmp_path / "src", MOE, tensors), tmp_path / "dst")
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize("experts", ["fused", "each"])
def test_an_expert_count_that_disagrees_is_named(tmp_path: Path, experts: str) -> None:
    tensors = hf_tensors(model_spec(MOE), values(model_spec(MOE)), experts=experts)
    config = {"model_type": "qwen3_5_moe", "text_config": TEXT | {"num_experts": 9}}
    with pytest.raises(CheckpointError, match=r"\[8, 128, 128\] where \[9, 128, 128\]|experts\.8\.gate_proj"):
        convert(write(tmp_path / "src", config, tensors), tmp_path / "dst")


def test_rows_that_groups_do_not_divide(tmp_path: Path) -> None:
    config = TEXT | {"moe_intermediate_size": 48}
    with pytest.raises(
        CheckpointError,
        match=r"layers\.0\.moe\.down: rows of 48 values do not divide into groups of 64; no group of 32, 64, 128 d",
    ):
        convert(tiny(tmp_path / "src", config), tmp_path / "dst")


def test_the_groups_that_can_be_had_are_named(tmp_path: Path) -> None:
    source = tiny(tmp_path / "src", TEXT | {"moe_intermediate_size": 96})
    with pytest.raises(CheckpointError, match=r"int4 can be had in groups of 32, as by policy 'int4-g32'"):
        convert(source, tmp_path / "dst")
    assert open_store(convert(source, tmp_path / "dst", policy="int4-g32")).layouts[0].down.group == 32


def test_destination_that_exists(tmp_path: Path) -> None:
    (tmp_path / "dst").mkdir()
    with pytest.raises(ConversionError, match="exists already"):
        convert(tiny(tmp_path / "src"), tmp_path / "dst")


def test_no_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny(tmp_path / "src")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("usage", "total used free")(0, 0, 1000))
    with pytest.raises(ConversionError, match=r"0\.00 GB free; the store needs"):
        convert(source, tmp_path / "dst")
    assert not (tmp_path / "dst").exists()
    assert not list(tmp_path.rglob("*.safetensors.*"))


def test_a_disk_that_fills_leaves_nothing_under_the_name_and_the_next_call_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlx_ttd.store.writer as writer

    source = tiny(tmp_path / "src")
    whole = convert(source, tmp_path / "whole")
    written = 0

    def full(fd: int, data: memoryview, offset: int) -> int:
        nonlocal written
        written += len(data)
        if written > 700_000:
            raise OSError(28, "No space left on device")
        return real(fd, data, offset)

    real = writer.os.pwrite
    monkeypatch.setattr(writer.os, "pwrite", full)
    with pytest.raises(ConversionError, match="No space left on device"):
        convert(source, tmp_path / "dst")
    assert not (tmp_path / "dst").exists()
    monkeypatch.setattr(writer.os, "pwrite", real)
    first = []
    convert(source, tmp_path / "dst", progress=first.append)
    assert first[0].done > 400_000
    assert (whole / "manifest.json").read_bytes() == (tmp_path / "dst" / "manifest.json").read_bytes()
    assert not (tmp_path / "dst.partial").exists()


def test_another_policy_does_not_resume_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx_ttd.store.journal as journal

    source = tiny(tmp_path / "src")
    whole = convert(source, tmp_path / "whole", policy="int8")
    with monkeypatch.context() as patch:
        patch.setattr(journal.Journal, "publish", lambda *_: (_ for _ in ()).throw(ConversionError("stop")))
        with pytest.raises(ConversionError, match="stop"):
            convert(source, tmp_path / "dst")
    convert(source, tmp_path / "dst", policy="int8")
    assert (whole / "manifest.json").read_bytes() == (tmp_path / "dst" / "manifest.json").read_bytes()


def test_policies_are_refused_in_a_sentence(tmp_path: Path) -> None:
    source = tiny(tmp_path / "src")
    with pytest.raises(OptionError, match="neither a file nor one of"):
        convert(source, tmp_path / "dst", policy="int5")
    with pytest.raises(OptionError, match="head_bits is 3"):
        convert(source, tmp_path / "dst", head_bits=3)
    roles = json.loads((Path(convert.__code__.co_filename).parent / "policies" / "int4.json").read_text())["roles"]
    for roles_given, words in (
        ({k: v for k, v in roles.items() if k != "moe.router"}, "lacks role 'moe.router'"),
        (roles | {"attn.q": {"bits": 7, "group": 64}}, "role 'attn.q' is"),
        ({}, "no 'roles' object"),
    ):
        (tmp_path / "p.json").write_text(json.dumps({"roles": roles_given}))
        with pytest.raises(OptionError, match=words):
            convert(source, tmp_path / "dst", policy=tmp_path / "p.json")


def test_an_unknown_role_is_refused(tmp_path: Path) -> None:
    source, roles = tiny(tmp_path / "src"), json.loads((FOLDER / "int4.json").read_text())["roles"]
    for role, words in (
        ("moe.experts", "role 'moe.experts' is unknown; known are embedding, .* moe.gate_up, moe.down"),
        ("moe.gateup", r"did you mean .*moe\.gate_up"),
    ):
        (tmp_path / "p.json").write_text(json.dumps({"roles": roles | {role: {"bits": 3, "group": 64}}}))
        with pytest.raises(OptionError, match=words):
            convert(source, tmp_path / "dst", policy=tmp_path / "p.json")
    assert not (tmp_path / "dst").exists()


def test_each_bundled_policy_names_the_roles_of_every_model() -> None:
    specs = [model_spec(config) for config in (MOE, DENSE, TIED)]
    roles = {policy_role(t) for spec in specs for t in [*trunk_tensors(spec), *mtp_tensors(spec)]}
    for name in policies():
        assert set(load_policy(name).roles) == roles
    assert set(known_roles()) == roles


def test_bf16_rounding_is_nearest_even() -> None:
    from mlx_ttd.store.fp8_block import bfloat16_bytes

    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    np.testing.assert_array_equal(bfloat16_bytes(x).view(np.uint16), bf16(x))


def test_named_templates_are_in_the_store(tmp_path: Path) -> None:
    source = tiny(tmp_path / "src")
    (source / "additional_chat_templates").mkdir()
    for name in (
        "additional_chat_templates/tool_use.jinja",
        "additional_chat_templates/.x.jinja",
        "chat_template.jinja",
    ):
        (source / name).write_text(name)
    store = open_store(convert(source, tmp_path / "dst"))
    kept = {"config.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"}
    assert set(store.manifest.copied) == kept
    assert Tokenizer(store.path).templates["tool_use"] == "additional_chat_templates/tool_use.jinja"
    assert verify(store.path)
    (store.path / "additional_chat_templates/tool_use.jinja").write_text("other")
    with pytest.raises(StoreError, match=r"tool_use\.jinja"):
        verify(store.path)
