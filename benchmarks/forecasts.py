"""The table of forecasts that README.md and RESULTS.md show: `python -m benchmarks.forecasts`; seconds, no weights."""

from __future__ import annotations

from pathlib import Path

from benchmarks.synthetic_store import plan_store, read_shape
from mlx_ttd.machine import machine_named
from mlx_ttd.options import make_options
from mlx_ttd.plan import forecast
from mlx_ttd.spec import model_spec
from mlx_ttd.store import Store, store_of_plan
from mlx_ttd.store.checkpoint import Checkpoint

SHAPE, PROMPT = "qwen3.6-35b-a3b", 2048
ASKED = (
    ("m1-8gb", 3),
    ("m1-8gb", 4),
    ("m2-8gb", 3),
    ("m2-8gb", 4),
    ("m4-16gb", 3),
    ("m4-16gb", 8),
    ("m5-24gb", 3),
    ("m4-pro-24gb", 12),
    ("m3-max-36gb", 18),
)
COLUMNS = ("machine", "memory", "slots a layer (bf16 head)", "hits", "bf16 head", "4-bit head")


def planned(head_bits: int | None) -> Store:
    """The store that a conversion to int4 would make."""
    config = read_shape(SHAPE)
    plan = plan_store(config, head_bits, None, Path(SHAPE))
    return store_of_plan(Checkpoint(Path(SHAPE), config, model_spec(config), {}, ""), plan)


def table() -> list[str]:
    """Rows of markdown: tok/s with a bf16 and with a 4-bit head."""
    stores, options = [planned(bits) for bits in (None, 4)], make_options({})
    rows = [f"| {' | '.join(COLUMNS)} | first token (bf16 head) |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, gigabytes in ASKED:
        machine = machine_named(name)
        wide, narrow = (forecast(store, options, machine, gigabytes * 10**9, PROMPT) for store in stores)
        cells = (machine.name, f"{gigabytes} GB", wide.slots, f"{wide.hit_rate:.0%}", f"{wide.tok_s:.1f}")
        speeds = (f"{narrow.tok_s:.1f}", f"{wide.first_token_seconds:.0f} s")
        rows.append(f"| {' | '.join(map(str, cells + speeds))} |")
    return rows


if __name__ == "__main__":
    print("\n".join(table()))
