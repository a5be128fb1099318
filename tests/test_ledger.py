"""What a model holds is in its ledger, or bounded by a constant, measured over a long generation in another process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_ttd
from mlx_ttd.streaming import provider

# Of Python objects for each token, while it is generated and in the last response: 530 seen, with log-probabilities.
HELD_BYTES_PER_TOKEN = 700
LONG = """
import json, gc, tracemalloc
from pathlib import Path
import mlx.core as mx, numpy as np
import mlx_ttd

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

mx.eval(mx.zeros(8) + 1)
np.unique(np.zeros(4))
before = resident()
with mlx_ttd.load("demo", "150MB", context=4096, slots=SLOTS) as llm:
    llm.generate(list(range(2, 600)), max_tokens=40, ignore_eos=True, logprobs=True)
    allowed = llm.ledger.used
    live, sizes = 0, []
    for i, _ in enumerate(llm.stream([7], max_tokens=3000, ignore_eos=True, logprobs=True)):
        live = max(live, mx.get_active_memory())
        if i in (500, 2999):
            sizes.append(resident())
    top = resident()
    tracemalloc.start()
    llm.last_response = None
    response = llm.generate([7], max_tokens=1000, ignore_eos=True, logprobs=True)
    traced = tracemalloc.get_traced_memory()[1]
    over = top - before - allowed
print(json.dumps({"live": live, "allowed": allowed, "growth": sizes[1] - sizes[0], "over": over, "traced": traced}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="not run: reads /proc")
@pytest.mark.parametrize("slots", [6, 24])
def test_a_long_generation_holds_no_more_than_the_ledger_says(slots):
    program = LONG.replace("SLOTS", str(slots))
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["live"] <= found["allowed"], found
    assert found["over"] <= 0, found
    assert found["growth"] < 2500 * HELD_BYTES_PER_TOKEN + (4 << 20), found
    assert found["traced"] < 1000 * HELD_BYTES_PER_TOKEN + (1 << 20), found


def test_choices_that_are_not_counted_yet_are_bounded_also_in_prefill(monkeypatch):
    monkeypatch.setattr(provider, "UNREAD_IDS", 1000)
    with mlx_ttd.load("demo", "150MB", slots=24) as llm:
        banks = len(llm.provider.banks)
        chunk = mx.zeros((50, 2), mx.uint32)
        for _ in range(40):
            for layer in range(banks):
                llm.provider.count_later(layer, chunk)
                assert sum(ids.size for _, ids in llm.provider._unread_ids) <= 1000 + (2 * banks + 1) * chunk.size
        assert llm.provider._unread == sum(ids.size for _, ids in llm.provider._unread_ids)
        llm.provider.settle()
        assert llm.provider._unread == 0
        assert llm.stats().counters.requests == 40 * banks
