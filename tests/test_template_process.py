"""The process that renders templates: what a template cannot outrun, and that nothing which befalls it is left over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from worker_use import AT_REST, live, use_of_workers

from mlx_ttd.errors import TemplateError
from mlx_ttd.text import Limits, render, template_rendering, template_worker
from mlx_ttd.text.process_memory import resident_bytes

USER = [{"role": "user", "content": "Hi"}]
ROOT = Path(__file__).parents[1]
LIMITS = Limits(characters=2_000_000, seconds=0.5, memory=64 << 20)


def rendered(template: str, messages=USER, **options) -> str:
    return render({"default": template}, messages, **options)


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def wait_until(is_so, seconds=10.0) -> bool:
    end = time.monotonic() + seconds
    while not (found := is_so()) and time.monotonic() < end:
        time.sleep(0.01)
    return found


NESTED = (
    "{%% set ns = namespace(a=[1], b=[1], c=(1,), d={}) %%}{%% for i in range(60) %%}{%% set ns.a = [ns.a, ns.a] %%}"
    "{%% set ns.b = [ns.b, ns.b] %%}{%% set ns.c = (ns.c, ns.c) %%}{%% set ns.d = dict(a=ns.d, b=ns.d) %%}"
    "{%% endfor %%}{%% set x = %s %%}"
)
DEEP = "{%% set ns = namespace(a=[], b=[]) %%}{%% for i in range(99999) %%}{%% set ns.a = [ns.a] %%}"
DEEP += "{%% set ns.b = [ns.b] %%}{%% endfor %%}{%% set x = %s %%}"
ATTACKS = {
    "equal lists": NESTED % "ns.a == ns.b",
    "lists in order": NESTED % "ns.a < ns.b",
    "a list in a list": NESTED % "ns.a in [ns.b]",
    "a test of equality": NESTED % "ns.a is eq(ns.b)",
    "lists sorted": NESTED % "[ns.a, ns.b] | sort",
    "the greatest list": NESTED % "[ns.a, ns.b] | max",
    "the place of a list": NESTED % "[ns.a].index(ns.b)",
    "lists counted": NESTED % "[ns.a].count(ns.b)",
    "a key": NESTED % "{ns.c: 1}",
    "a key looked for": NESTED % "{}[ns.c]",
    "unique keys": NESTED % "[ns.c] | unique | list",
    "groups": NESTED % "[ns.a, ns.b] | groupby(0)",
    "a list as text": NESTED % "ns.a | string",
    "a list through a format": NESTED % "'%s' % [ns.a]",
    "a list through format": NESTED % "'{}'.format(ns.a)",
    "dicts as JSON": NESTED % "ns.d | tojson",
    "dicts printed": NESTED % "ns.d | pprint",
    "a list as a name": NESTED % "messages[ns.a | string]",
    "deep lists as text": DEEP % "ns.a | string",
    "deep lists as JSON": DEEP % "ns.a | tojson",
    "deep lists compared": DEEP % "ns.a == ns.b",
    "a sum of lists": "{% set x = ([[1] * 100000] * 100000) | sum(start=[]) %}",
    "a sum of tuples": "{% set x = ([(1,) * 100] * 1000000) | sum(start=()) %}",
    "tags stripped": "{% set x = ('<!---->' * 900000) | striptags %}",
    "more tags stripped": "{% set x = ('<a>' * 9000000) | striptags %}",
    "words wrapped": "{% set x = ('a-' * 9000000) | wordwrap(1) %}",
    "text centred": "{{ 'a' | center(10**11) }}",
    "text filled": "{{ 'a'.zfill(10**11) }}",
    "tabs expanded": "{{ ('\\t' * 100000).expandtabs(10**6) }}",
    "text times a number": "{{ 'a' * 10**10 }}",
    "text that doubles": "{% set n = namespace(s='aa') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "a width": "{{ '%999999999d' % 1 }}",
    "a width of its own": "{{ '{:{}}'.format(1, 10**9) }}",
    "a power": "{% set x = 9 ** (9 ** 9) %}",
    "a remainder": "{% set x = (7 ** 9999999) % (3 ** 9999999) %}",
    "ranges": "{% set x = range(99999) | list * 1000 %}",
    "ranges in ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "pairs": "{% set ns = namespace(n=0) %}{% for a in range(99999) if range(99999) | sum %}{% endfor %}",
    "batches": "{% set x = range(9) | batch(10**10, 0) | list %}",
    "slices": "{% set x = range(9) | slice(10**10) | list %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loops": "{% for a in [[1]] recursive %}{{ loop(a) }}{{ loop([a]) }}{% endfor %}",
    "words made up": "{{ lipsum(n=10**7) }}",
    "attributes": "{{ {'a': 'b' * 9000000} | xmlattr }}" * 9,
    "text without end": "{% for a in range(99999) %}{{ messages }}{{ messages }}{{ messages }}{% endfor %}",
    "a template nested deeply": "{{ " + "[" * 9000 + "]" * 9000 + " }}",
    "a long sum": "{{ " + "1 + " * 90000 + "1 }}",
    "blocks nested deeply": "{% if x %}" * 9000 + "{% endif %}" * 9000,
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_template_outruns_its_time_or_memory(attack):
    rendered("warm")
    begun = time.monotonic()
    with use_of_workers() as use, pytest.raises(TemplateError) as caught:
        rendered(ATTACKS[attack], limits=LIMITS)
    assert time.monotonic() - begun < 20
    assert use.memory
    use.check(LIMITS)
    assert 20 < len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)
    assert rendered("{{ messages[0].content }}") == "Hi"


@pytest.mark.parametrize("template", ["{% set x = [0] * 10**8 %}", ATTACKS["text that doubles"]])
def test_memory_is_watched_where_the_kernel_does_not_bind_it(template, monkeypatch):
    unbound = template_worker.PROGRAM.replace("from", "sys.platform = 'other'; from")
    monkeypatch.setattr(template_worker, "PROGRAM", unbound)
    monkeypatch.setattr(template_rendering, "processes", template_rendering.Processes())
    with pytest.raises(TemplateError, match="takes more than 64 MB"):
        rendered(
            template + "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            limits=Limits(seconds=100, memory=64 << 20),
        )


def test_what_a_template_is_given_arrives_as_it_was():
    odd = {1: "a", None: "b", "\0": [True, 1.5], "n": float("inf"), "s": "\ud83d\ude00", "b": 10**100, "": {}}
    assert rendered("{{ odd }}|{{ odd[1] }}", variables={"odd": odd}) == f"{odd}|a"
    assert rendered("{{ a }}", variables={"a": "\ud83d\0é🌍\r\n"}) == "\ud83d\0é🌍\r\n"
    assert rendered("{{ a }} {{ a is number }}", variables={"a": float("nan")}) == "nan True"


@pytest.mark.parametrize(
    "value", [b"x", {(1, 2): 3}, object(), {1, 2}, 10**5000], ids=lambda value: type(value).__name__
)
def test_what_is_no_json_is_refused(value):
    with pytest.raises(TemplateError):
        rendered("{{ a | length }}", variables={"a": value})


def test_what_is_nested_without_end_is_refused():
    deep: list = []
    deep.append(deep)
    with pytest.raises(TemplateError, match="nested"):
        rendered("{{ a }}", variables={"a": deep})


def test_a_conversation_longer_than_is_handed_over_is_refused(monkeypatch):
    monkeypatch.setattr(template_rendering, "REQUEST_BYTES", 1 << 20)
    with pytest.raises(TemplateError, match="longer than 1 MB"):
        rendered("x", [{"role": "user", "content": "x" * (1 << 20)}])


def test_a_long_conversation_passes_whole():
    text = "Ä🌍x" * 1_000_000
    assert rendered("{{ messages[0].content }}", [{"role": "user", "content": text}]) == text


def test_a_template_keeps_nothing_for_the_next():
    assert rendered("{% set kept = 1 %}{{ kept }}") == "1"
    assert rendered("{{ kept is defined }}") == "False"
    with pytest.raises(TemplateError, match="unsafe"):
        rendered("{{ messages[0].update(kept=1) }}")


def test_the_same_process_renders_again_and_holds_nothing_of_mlx():
    rendered("x")
    (worker, *_) = template_rendering.processes.idle
    for _ in range(20):
        rendered("x")
    assert worker in template_rendering.processes.idle
    assert resident_bytes(worker.pid) < AT_REST
    if Path("/proc").exists():
        assert "mlx" not in Path(f"/proc/{worker.pid}/maps").read_text()
        descriptors = os.listdir(f"/proc/{worker.pid}/fd")
        assert sorted(descriptors) == ["0", "1", "2"]


def test_a_process_that_was_killed_is_replaced():
    rendered("x")
    for pid in live():
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert rendered("y") == "y"


def test_threads_render_at_once():
    def talk(number: int) -> str:
        return rendered("{{ messages[0].content }}", [{"role": "user", "content": str(number)}])

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(talk, range(200))) == [str(n) for n in range(200)]
    assert len(live()) <= template_rendering.WORKERS


def test_a_hostile_template_holds_up_no_other():
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(rendered, ATTACKS["equal lists"], limits=Limits(seconds=3))
        begun = time.monotonic()
        while not slow.done():
            assert rendered("x") == "x"
        assert time.monotonic() - begun < 10
        assert isinstance(slow.exception(), TemplateError)


def interrupted_at(step: int, template: str) -> bool:
    """Whether a rendering runs at least `step` bytecodes, at which a KeyboardInterrupt is raised."""
    seen = 0

    def trace(frame, event, argument):
        nonlocal seen
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen += 1
            if seen == step:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        rendered(template)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return seen >= step


def test_an_interrupt_at_any_bytecode_leaves_nothing_behind():
    rendered("x")
    descriptors, step = len(os.listdir("/dev/fd")), 1
    while interrupted_at(step, "{{ messages[0].content }}"):
        if step % 20 == 0:
            assert rendered("y") == "y"
        step += 1
    assert step > 500
    assert rendered("z") == "z"
    assert wait_until(lambda: len(template_rendering.processes.idle) == len(live()))
    assert template_rendering.processes.slots.qsize() == template_rendering.WORKERS
    # Two for each process more than there was.
    assert len(os.listdir("/dev/fd")) <= descriptors + 2 * (template_rendering.WORKERS - 1)


def test_an_interrupt_while_a_template_runs_ends_its_process():
    rendered("x")
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        rendered(ATTACKS["equal lists"])
    assert time.monotonic() - begun < 5
    assert rendered("y") == "y"
    assert wait_until(lambda: len(template_rendering.processes.idle) == len(live()))


def run_program(program: str, **options) -> subprocess.CompletedProcess:
    lines = (
        "import os, signal, sys, threading, time\nfrom mlx_ttd.text import render\n"
        "from mlx_ttd.text import template_rendering as r\nU = [{'role': 'user', 'content': 'Hi'}]\n"
        f"SLOW = {ATTACKS['equal lists']!r}\n"
        "def rendered(text): return render({'default': text}, U)\n"
        "def live(): return [w.pid for w in r.processes.live]\n"
    )
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", lines + program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        **options,
    )


def test_importing_starts_no_process_and_no_thread():
    ran = run_program("print(live(), threading.active_count(), 'jinja2' in sys.modules)")
    assert ran.stdout.split()[:2] == ["[]", "1"], ran.stderr
    assert ran.stdout.split()[2] == "False"


ENDINGS = {
    "in the usual way": ("rendered('x')", 0),
    "by an error": ("rendered('x'); 1 / 0", 1),
    "without clearing up": ("rendered('x'); os._exit(0)", 0),
    "by SIGKILL": ("rendered('x'); print(*live(), flush=True); os.kill(os.getpid(), signal.SIGKILL)", -9),
    "by Ctrl-C": ("threading.Timer(1, os.kill, [os.getpid(), 2]).start(); rendered(SLOW)", -2),
    "while a thread renders": (
        "rendered('x'); threading.Thread(target=rendered, args=[SLOW], daemon=True).start(); time.sleep(0.3)",
        0,
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_no_process_outlives_its_program(ending):
    program, code = ENDINGS[ending]
    note = "import atexit\nold = r.Worker.__init__\ndef new(self):\n    old(self); print(self.pid, flush=True)\n"
    ran = run_program(note + "r.Worker.__init__ = new\n" + program)
    assert ran.returncode == code, ran.stderr
    assert "Warning" not in ran.stderr
    assert wait_until(lambda: not any(runs(int(pid)) for pid in ran.stdout.split()), 3)


def test_a_forked_child_starts_its_own():
    ran = run_program(
        "import warnings; warnings.simplefilter('ignore'); rendered('x'); mine = live()\n"
        "if (child := os.fork()) == 0:\n"
        "    assert live() == []\n    print(rendered('child'), live() != mine, flush=True)\n    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\nprint(rendered('parent'), live() == mine)"
    )  # fmt: skip
    assert ran.stdout.split() == ["child", "True", "parent", "True"], ran.stderr


def test_no_process_that_ended_waits_to_be_reaped():
    for attack in ("equal lists", "a power"):
        with pytest.raises(TemplateError, match=r"ran for more than 0\.2 s"):
            rendered(ATTACKS[attack], limits=Limits(seconds=0.2))
    states = [Path(f"/proc/{pid}/stat") for pid in subprocess_children()]
    assert not [state for state in states if state.read_text().rsplit(")", 1)[1].split()[0] == "Z"]


def subprocess_children() -> list[int]:
    found = []
    for task in Path("/proc/self/task").glob("*/children"):
        found += map(int, task.read_text().split())
    return found


@pytest.mark.parametrize(
    ("executable", "reason"),
    [("/no/such/python", "none could be started"), ("", "none could be started"), ("/bin/false", "exit code 1")],
)
def test_where_no_process_can_be_started_the_error_says_so(executable, reason, monkeypatch):
    monkeypatch.setattr(template_rendering, "processes", template_rendering.Processes())
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(TemplateError, match=reason):
        rendered("x")
    assert live() == []


def test_where_no_more_processes_or_threads_are_allowed_the_error_says_so():
    ran = run_program(
        "def refuse(*a, **k): raise OSError(11, 'Resource temporarily unavailable')\n"
        "from mlx_ttd.errors import TemplateError\nspawn, os.posix_spawn = os.posix_spawn, refuse\n"
        "try: rendered('x')\nexcept TemplateError as error: print(error)\n"
        "os.posix_spawn = spawn\nprint(rendered('then'))"
    )
    assert "Resource temporarily unavailable" in ran.stdout, ran.stderr
    assert ran.stdout.endswith("then\n")


def test_it_runs_from_anywhere_and_under_any_settings(tmp_path):
    """The folder a program runs in, and variables that are meant for the program, are not the process's."""
    (tmp_path / "json.py").write_text("raise SystemExit(3)")
    (tmp_path / "jinja2.py").write_text("raise SystemExit(3)")
    program = (
        "import os, sys; sys.path.insert(0, sys.argv.pop()); from mlx_ttd.text import render; os.chdir('/')\n"
        "print(render({'default': '{{ messages | tojson }}'}, [{'role': 'user', 'content': 'Hi'}]))"
    )
    environment = {**os.environ, "PYTHONSTARTUP": "x", "PYTHONWARNINGS": "error", "PYTHONIOENCODING": "latin-1"}
    ran = subprocess.run(
        [sys.executable, "-P", "-c", program, str(ROOT)] if sys.version_info >= (3, 11) else
        [sys.executable, "-c", program, str(ROOT)],
        capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60,
    )  # fmt: skip
    assert json.loads(ran.stdout) == USER, ran.stderr
