"""Norms of w and of 1 + w are told apart by their values, and the convolution's layout by its own shape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoints import MOE, Stored, Tensors, f32, hf_tensors, mlx_tensors, plain, values, write, write_safetensors
from test_convert import bits
from typer.testing import CliRunner

from mlx_ttd.cli import app
from mlx_ttd.errors import CheckpointError, OptionError
from mlx_ttd.spec import model_spec
from mlx_ttd.store import convert, open_store, read_tensor

SPEC = model_spec(MOE)


def changed(tensors: Tensors, change: Callable[[np.ndarray], np.ndarray], within: str = "") -> Tensors:
    """The tensors with every norm but the gated ones changed."""

    def one(name: str, stored: Stored) -> Stored:
        norm = "norm" in name and "linear_attn" not in name and within in name
        return plain(stored[0], change(f32(stored))) if norm else stored

    return {name: one(name, stored) for name, stored in tensors.items()}


def turned(tensors: Tensors) -> Tensors:
    """The tensors with the convolutions' last two axes exchanged."""
    return {n: (d, a.transpose(0, 2, 1) if "conv1d" in n else a) for n, (d, a) in tensors.items()}


def checkpoint(path: Path, tensors: Tensors, made_by: str | None = None) -> Path:
    write(path, MOE, tensors)
    write_safetensors(path / "model.safetensors", tensors, made_by)
    return path


@pytest.mark.parametrize("layout", [hf_tensors, mlx_tensors], ids=["fused experts", "stacked experts"])
@pytest.mark.parametrize("conv", [(1, 4), (4, 1)])
@pytest.mark.parametrize("norms", ["w", "1+w"])
def test_norms_and_convolution_are_told_apart_each_for_itself(
    tmp_path: Path, layout: Callable[..., Tensors], conv: tuple[int, int], norms: str
) -> None:
    weights = values(SPEC)
    tensors = layout(SPEC, weights)
    as_written = "w" if layout is hf_tensors else "1+w"
    if norms != as_written:
        tensors = changed(tensors, lambda v: v + (1 if norms == "1+w" else -1))
    if next(a for n, (_, a) in tensors.items() if "conv1d" in n).shape[1:] != conv:
        tensors = turned(tensors)
    store = open_store(convert(checkpoint(tmp_path / "src", tensors), tmp_path / "dst"))
    assert store.norms == norms
    for name in ("layers.0.gdn.conv", "layers.0.gdn.norm"):
        np.testing.assert_array_equal(bits(read_tensor(store.resident[name])), weights[name][1])
    name = next(n for n in tensors if n.endswith("layers.3.self_attn.q_norm.weight"))
    np.testing.assert_array_equal(bits(read_tensor(store.resident["layers.3.attn.q_norm"])), tensors[name][1])


@pytest.mark.parametrize(("made_by", "norms"), [("mlx", "1+w"), ("pt", "w")])
def test_a_mark_of_the_maker_settles_what_values_leave_open(tmp_path: Path, made_by: str, norms: str) -> None:
    tensors = changed(hf_tensors(SPEC, values(SPEC)), lambda v: 0.4 + 0 * v)
    assert open_store(convert(checkpoint(tmp_path / "src", tensors, made_by), tmp_path / "dst")).norms == norms
    with pytest.raises(CheckpointError, match=r"centre on 0\.40, which is neither .*; say norms='w' or '1\+w'"):
        convert(checkpoint(tmp_path / "bare", tensors), tmp_path / "other")


@pytest.mark.parametrize(
    ("made_by", "add", "said"), [("mlx", 0, "as w, and .* mean 1"), ("pt", 1, r"as 1\+w, and .* mean w")]
)
def test_values_that_contradict_the_mark_are_refused_until_somebody_says(
    tmp_path: Path, made_by: str, add: int, said: str
) -> None:
    tensors = changed(hf_tensors(SPEC, values(SPEC)), lambda v: v + add)
    source = checkpoint(tmp_path / "src", tensors, made_by)
    with pytest.raises(CheckpointError, match=rf"norms stored {said}"):
        convert(source, tmp_path / "dst")
    assert open_store(convert(source, tmp_path / "dst", norms="1+w")).norms == "1+w"
    result = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "cli"), "--norms", "w"])
    assert result.exit_code == 0
    assert open_store(tmp_path / "cli").norms == "w"


@pytest.mark.parametrize("made_by", [None, "mlx"])
def test_norms_that_were_folded_twice_are_refused(tmp_path: Path, made_by: str | None) -> None:
    tensors = changed(hf_tensors(SPEC, values(SPEC)), lambda v: v + 2)
    with pytest.raises(CheckpointError, match=r"the norms' values centre on (1\.9|2\.0)"):
        convert(checkpoint(tmp_path / "src", tensors, made_by), tmp_path / "dst")


def test_an_mtp_layer_that_was_not_folded_with_the_trunk_is_refused(tmp_path: Path) -> None:
    tensors = hf_tensors(SPEC, values(SPEC, mtp=True))
    assert open_store(convert(checkpoint(tmp_path / "w", tensors), tmp_path / "w.ttd")).norms == "w"
    folded = changed(tensors, lambda v: v + 1)
    assert open_store(convert(checkpoint(tmp_path / "1+w", folded), tmp_path / "1+w.ttd")).norms == "1+w"
    half = changed(tensors, lambda v: v + 1, "model.language_model")
    with pytest.raises(CheckpointError, match=r"and those of its MTP layer on -?0\.\d\d; they must be stored alike"):
        convert(checkpoint(tmp_path / "half", half), tmp_path / "half.ttd")


@pytest.mark.parametrize(("value", "norms"), [(0.0, "w"), (1.0, "1+w")])
def test_norms_as_training_begins_with_them(tmp_path: Path, value: float, norms: str) -> None:
    tensors = changed(hf_tensors(SPEC, values(SPEC)), lambda v: value + 0 * v)
    assert open_store(convert(checkpoint(tmp_path / "src", tensors), tmp_path / "dst")).norms == norms


def test_norms_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    tensors = changed(hf_tensors(SPEC, values(SPEC)), lambda v: np.nan * v)
    with pytest.raises(CheckpointError, match="the norms' values centre on nan"):
        convert(checkpoint(tmp_path / "src", tensors), tmp_path / "dst")


def test_a_wrong_word_for_norms(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="norms is 'folded'"):
        convert(tmp_path, tmp_path / "dst", norms="folded")  # type: ignore[arg-type]
