"""Traces, their differences, profiles and counters: a wrong line is found and named by layer and quantity."""

from __future__ import annotations

import dataclasses
import time

import goldens
import mlx.core as mx
import numpy as np
import pytest
from test_cli import call

import mlx_ttd
from mlx_ttd import kernels
from mlx_ttd.errors import StoreError
from mlx_ttd.layers import ResidentWeights
from mlx_ttd.observe import MODEL, Counters, Profile, first_difference, incomparable, load_trace, note, probing
from mlx_ttd.observe.diff import ulps
from mlx_ttd.store import Store
from mlx_ttd.streaming import Lease
from mlx_ttd.streaming.provider import ExpertProvider

MEMORY = "300MB"
ATOL = 2e-4


@pytest.fixture(scope="module")
def oracle_trace():
    return load_trace(goldens.FOLDER / "trace")


def record(folder, **options):
    tokens = load_trace(goldens.FOLDER / "trace").tokens
    return mlx_ttd.trace("demo", tokens, folder, memory=MEMORY, kv_bits=32, **options)


def test_every_quantity_equals_transformers(oracle_trace, tmp_path):
    own = record(tmp_path / "own")
    assert own.arrays.keys() == oracle_trace.arrays.keys()
    assert incomparable(own, oracle_trace) is None
    assert first_difference(own, oracle_trace, ATOL) is None


def test_a_trace_repeats_and_survives_the_disk(tmp_path):
    first, second = record(tmp_path / "a"), record(tmp_path / "b", slots=4)
    assert first.digest == second.digest == load_trace(tmp_path / "a").digest
    assert first_difference(first, load_trace(tmp_path / "b")) is None
    with pytest.raises(StoreError, match="already"):
        second.save(tmp_path / "a")
    path = tmp_path / "a" / "trace.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"abcd")
    with pytest.raises(StoreError, match="digest"):
        load_trace(tmp_path / "a")


def test_a_place_that_cannot_hold_a_trace_is_refused_before_the_prompt_runs(tmp_path, monkeypatch):
    file, taken = tmp_path / "file", tmp_path / "taken"
    file.touch()
    record(taken)
    monkeypatch.setattr("mlx_ttd.api.load", lambda *arguments, **options: pytest.fail("loaded"))
    for folder in (taken, file, file / "below", tmp_path / ("x" * 300)):
        with pytest.raises(StoreError, match="another") as caught:
            record(folder)
        assert "\n" not in str(caught.value)


def test_a_trace_that_cannot_be_written_is_one_sentence(oracle_trace, tmp_path):
    (tmp_path / "trace.safetensors").mkdir()
    with pytest.raises(StoreError, match="cannot be written"):
        oracle_trace.save(tmp_path)


def without_norm_offset(monkeypatch):
    monkeypatch.setattr(ResidentWeights, "norm", ResidentWeights.vector)


def reversed_conv(monkeypatch):
    vector = ResidentWeights.vector
    monkeypatch.setattr(
        ResidentWeights, "vector", lambda self, n: vector(self, n)[:, ::-1] if n.endswith("conv") else vector(self, n)
    )


def tiled_key_heads(monkeypatch):
    monkeypatch.setenv("MLX_TTD_BACKEND", "reference")
    monkeypatch.setattr(mx, "repeat", lambda a, n, axis: mx.concatenate([a] * n, axis))


def wider_rope(monkeypatch):
    inputs = kernels.attention_inputs

    def widened(q, k, q_norm, k_norm, eps, dims, *rest):
        return inputs(q, k, q_norm, k_norm, eps, 2 * dims, *rest)

    monkeypatch.setattr(kernels, "attention_inputs", widened)


def wrong_slot(monkeypatch):
    init = Lease.__init__

    def shifted(self, records, slot_of, *rest, **named):
        init(self, records, mx.where(slot_of > 0, slot_of - 1, slot_of), *rest, **named)

    monkeypatch.setattr(Lease, "__init__", shifted)


def wrong_record_offset(monkeypatch):
    layout = ExpertProvider.layout

    def shifted(self, layer):
        found = layout(self, layer)
        return dataclasses.replace(found, down=dataclasses.replace(found.down, codes=found.down.codes - 64))

    monkeypatch.setattr(ExpertProvider, "layout", shifted)


FAULTS = [
    (without_norm_offset, 0, "gdn"),
    (reversed_conv, 0, "gdn"),
    (tiled_key_heads, 0, "gdn"),
    (wider_rope, 3, "attention"),
    (wrong_slot, 0, "experts"),
    (wrong_record_offset, 0, "experts"),
]


@pytest.mark.parametrize(("fault", "layer", "quantity"), FAULTS)
def test_a_planted_fault_is_named(oracle_trace, tmp_path, monkeypatch, fault, layer, quantity):
    fault(monkeypatch)
    found = first_difference(record(tmp_path / "faulty", slots=12), oracle_trace, ATOL)
    assert (found.layer, found.quantity) == (layer, quantity)


def descending_sum(monkeypatch):
    ffn = kernels.expert_ffn

    def backwards(x, lease, rows, weights, layout):
        contributions = kernels.expert_contributions(x, lease, rows, layout)
        return kernels.combine(contributions[:, ::-1], weights[:, ::-1])

    assert ffn is not backwards
    monkeypatch.setattr(kernels, "expert_ffn", backwards)


def test_the_order_of_the_sum_is_seen_in_the_last_bits(tmp_path, monkeypatch):
    own = record(tmp_path / "own", slots=12)
    descending_sum(monkeypatch)
    found = first_difference(own, record(tmp_path / "faulty", slots=12))
    assert (found.layer, found.quantity) == (0, "experts")
    assert 0 < found.ulps < 10_000


def test_a_tie_that_goes_to_the_highest_id_is_a_router_difference(tmp_path, monkeypatch):
    # Every expert of layer 0 equally likely: the four lowest ids are right.
    packed = ResidentWeights.packed

    def flat(self, name):
        found = packed(self, name)
        return kernels.Weight(mx.zeros_like(found.weight)) if name == "layers.0.moe.router" else found

    monkeypatch.setattr(ResidentWeights, "packed", flat)
    own = record(tmp_path / "own")
    assert (own.arrays["0.router.ids"] == np.arange(4)).all()
    route = kernels.route

    def highest(x, y, norm, eps, w, k, mode):
        routed = route(x, y, norm, eps, kernels.Weight(w.weight[::-1]), k, mode)
        return routed._replace(ids=mx.sort(w.rows - 1 - routed.ids, axis=-1), weights=routed.weights[:, ::-1])

    monkeypatch.setattr(kernels, "route", highest)
    found = first_difference(own, record(tmp_path / "faulty"))
    assert (found.layer, found.quantity) == (0, "router.ids")


def test_other_tokens_or_stores_are_not_comparable(oracle_trace):
    shorter = dataclasses.replace(oracle_trace, tokens=oracle_trace.tokens[:-1])
    assert "tokens" in incomparable(oracle_trace, shorter)
    assert "stores" in incomparable(oracle_trace, dataclasses.replace(oracle_trace, store="0" * 64))


def test_diff_exits_with_0_if_equal_1_if_different_2_if_not_comparable(tmp_path, capsys, monkeypatch):
    own = record(tmp_path / "own")
    hidden = own.arrays["1.hidden"].copy()
    hidden[3, 7] = np.nextafter(hidden[3, 7], np.float32(np.inf))
    dataclasses.replace(own, arrays=own.arrays | {"1.hidden": hidden}).save(tmp_path / "changed")
    dataclasses.replace(own, store="0" * 64).save(tmp_path / "foreign")

    def diff(other):
        code, out, errors = call(capsys, monkeypatch, "diff", tmp_path / "own", tmp_path / other)
        return code, out + errors

    assert diff("own") == (0, "equal\n")
    code, said = diff("changed")
    assert code == 1
    assert all(words in said for words in ("layer 1", "hidden", "token 3", "1 ULP"))
    assert diff("foreign")[0] == diff("missing")[0] == 2


def test_ulps_count_representable_numbers():
    one = np.float32(1)
    assert ulps(np.array([one]), np.array([np.nextafter(one, np.float32(2))]))[0] == 1
    assert ulps(np.array([0.0]), np.array([-0.0]))[0] == 0
    tiny = np.float32(1e-45)
    assert ulps(np.array([tiny]), np.array([-tiny]))[0] == 2


def test_a_profile_accounts_for_the_whole_time():
    with mlx_ttd.load("demo", MEMORY, slots=6) as llm:
        profile = Profile()
        with probing(profile):
            profile.note(MODEL, "begin", ())
            started = time.perf_counter()
            llm.generate(list(range(300)), max_tokens=8, ignore_eos=True)
            wall = time.perf_counter() - started
    phases = {"embed", "norms", "gdn", "attention", "router", "read", "expert_ffn", "shared", "head", "sample", "host"}
    assert set(profile.seconds) == phases
    assert profile.total == pytest.approx(wall, rel=0.03)
    assert sum(profile.by_layer.values()) == pytest.approx(profile.total)
    assert profile.speed_up_if_free("gdn") > 1
    assert len(profile.table().splitlines()) == len(phases) + 1
    assert 0 < profile.scratch_bytes <= llm.division.scratch


def test_nothing_is_evaluated_when_nobody_watches():
    made = mx.zeros(4) + 1
    before = mx.get_active_memory()
    note(0, "hidden", made)
    assert mx.get_active_memory() == before
    with probing(Profile()):
        note(0, "hidden", made)
    assert mx.get_active_memory() > before


def test_counters_are_exact():
    with mlx_ttd.load("demo", MEMORY, slots=24) as llm:
        stride = llm.provider.banks[0].stride
        llm.generate(list(range(200)), max_tokens=3, ignore_eos=True)
        cold = llm.stats(reset=True).counters
        assert cold.bytes_read == cold.records * stride
        assert cold.records == cold.misses
        assert cold.requests == cold.hits + cold.misses
        assert (cold.prefill_tokens, cold.decode_steps) == (199, 3)
        assert cold.resident_bytes == sum(info.nbytes for info in llm.store.resident.values())
        for layer in range(4):
            for lease in llm.provider.waves(layer, np.arange(24)):
                lease.release(())
        llm.stats(reset=True)
        llm.generate(list(range(50)), max_tokens=4, ignore_eos=True)
        warm = llm.stats().counters
        assert (warm.misses, warm.records, warm.bytes_read, warm.resident_bytes) == (0, 0, 0, 0)
        # Prefill reads four layers choices back; a decode step waits for its token only: every expert is resident.
        assert warm.host_syncs == 4 + 4
        assert warm.requests == warm.hits > 0
        assert warm.reallocations == 0
        if kernels.chosen("linear") == "native":
            assert (warm.launches, warm.weight_bytes_copied) == (0, 0)
        llm.set_memory("100MB")
        llm.clear_experts()
        assert llm.stats().counters.reallocations == 4 + 4


def test_weights_that_a_product_converts_are_counted():
    x, plain = mx.zeros((2, 64)), kernels.Weight(mx.zeros((8, 64), mx.bfloat16))
    packed = kernels.Weight(*mx.quantize(mx.zeros((8, 64), mx.bfloat16)), 4, 64, "affine")
    with kernels.forced("reference"):
        for weight, converted in ((plain, plain.weight.nbytes), (packed, packed.nbytes - packed.weight.nbytes)):
            counters = Counters()
            with kernels.counting(counters):
                kernels.linear(x, weight, "decode")
            kernels.linear(x, weight, "decode")
            assert counters.weight_bytes_copied == 2 * converted > 0


def test_a_fresh_model_has_no_hit_rate():
    with mlx_ttd.load("demo", MEMORY) as llm:
        assert llm.stats().hit_rate is None


def test_the_store_is_not_read_again_after_load(monkeypatch):
    with mlx_ttd.load("demo", MEMORY) as llm:
        monkeypatch.setattr(Store, "resident", property(lambda self: pytest.fail("read after load")), raising=False)
        llm.generate([1, 2, 3], max_tokens=2)
