"""The command line: parses, calls the API, prints. Text goes to standard output, everything else to standard error."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from . import __version__, api
from .bench import bench as run_bench
from .bench import draw_knee, sweep
from .errors import ContextError, OptionError, StoreError, TTDError
from .generation import Chunk, GenerationOptions
from .kernels import native_status
from .machine import machines
from .observe import Profile, first_difference, incomparable, load_trace, probing
from .observe.doctor import report
from .options import PREFIX, Options
from .plan import PROMPT, TARGET
from .plan import plan as forecast_plan
from .progress_line import ProgressLine
from .spec import user_path
from .store import Norms, Progress
from .streaming import machine_memory, policy_names, show_size

app = typer.Typer(
    name="mlx-ttd",
    help="Run mixture-of-experts language models that are larger than memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

STORE = "A *.ttd directory, a hub id that was converted, or 'demo', the bundled model."
DEFAULTS = Options()
StoreArgument = Annotated[str, typer.Argument(metavar="STORE", help=STORE)]
ModelOption = Annotated[str, typer.Option("--model", "-m", help=STORE)]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        help="Bound on all memory used: '3GB' (10^9), '2.5GiB', bytes, or 'auto'.", show_default=str(DEFAULTS.memory)
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        help="Tokens, prompt and answer together, that memory is reserved for.", show_default=str(DEFAULTS.context)
    ),
]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", "-n", help="Tokens to generate at most.")]
TemperatureOption = Annotated[float, typer.Option(help="0 takes the likeliest token; 1 samples as the model says.")]
TopKOption = Annotated[int, typer.Option(help="Sample among the k likeliest tokens; 0: among all.")]
TopPOption = Annotated[float, typer.Option(help="Sample among the likeliest tokens that together have this share.")]
MinPOption = Annotated[float, typer.Option(help="Leave out tokens less likely than this share of the likeliest.")]
SeedOption = Annotated[int, typer.Option(help="Seed of the sampling; the same seed gives the same text.")]
PolicyOption = Annotated[
    str | None,
    typer.Option(help=f"Which expert leaves full memory: {', '.join(policy_names())}.", show_default=DEFAULTS.policy),
]
ThinkingOption = Annotated[
    bool | None, typer.Option("--thinking/--no-thinking", help="Ask the chat template for reasoning, or for none.")
]
LinksOption = Annotated[
    bool | None,
    typer.Option("--follow-links", help="Follow links that lead outside the store, as to experts/ on another disk."),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print the text alone, no statistics.")]


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def _say(error: object) -> None:
    _note(f"mlx-ttd: {error}")


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _given(**options: Any) -> dict[str, Any]:
    """The options that the user gave: what is left out may be set in the environment."""
    return {name: value for name, value in options.items() if value is not None}


def _load(model: str, quiet: bool, **options: Any) -> api.LLM:
    """A model with the options that were given; it is wired unless the environment says otherwise."""
    progress = False if quiet else None
    wire = None if f"{PREFIX}WIRE" in os.environ else True
    return api.load(model, **_given(progress=progress, wire=wire, **options))


def _print_chunks(chunks: Iterator[Chunk], before: str = "") -> dict[str, str]:
    """Print `before` and the text as it comes; Ctrl-C ends it with the text so far.

    Returns the text, reasoning apart, as a message.
    """
    message = {"role": "assistant", "content": "", "reasoning_content": ""}
    try:
        for chunk in chunks:
            message["content"] += chunk.text
            message["reasoning_content"] += chunk.reasoning
            print(before + chunk.reasoning + chunk.text, end="", flush=True)
            before = ""
    except KeyboardInterrupt:
        _note("\ninterrupted")
    print(flush=True)
    return message


def _report(llm: api.LLM) -> None:
    stats = llm.stats()
    counts = stats.counters
    parts = [f"{counts.prefill_tokens + counts.decode_steps} tokens through the model"]
    if stats.hit_rate is not None:
        parts.append(f"{counts.hits:,} of {counts.requests:,} expert requests in memory ({stats.hit_rate:.0%})")
        parts.append(f"{show_size(counts.bytes_read)} of experts read")
        parts.append(f"{stats.division.slots} of {llm.store.spec.experts} experts a layer held")
    parts.append(f"peak memory {show_size(stats.peak_bytes)}")
    _note("; ".join(parts))


def _sampling(**options: Any) -> dict[str, Any]:
    """The options of a generation. OptionError, before anything is loaded or printed, for one out of range."""
    GenerationOptions(**options).sampler()
    return options


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue, or with --chat the message.")],
    model: ModelOption = "demo",
    memory: MemoryOption = None,
    max_tokens: MaxTokensOption = 128,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a message of a chat.")] = False,
    thinking: ThinkingOption = None,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    seed: SeedOption = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    context: ContextOption = None,
    policy: PolicyOption = None,
    follow_links: LinksOption = None,
    profile: Annotated[bool, typer.Option("--profile", help="Say where the time went; the run is slower.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Continue PROMPT and print the text as it comes."""
    sampling = _sampling(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    given = {"memory": memory, "context": context, "policy": policy, "follow_links": follow_links}
    with _load(model, quiet, **given) as llm:
        template = {} if thinking is None else {"enable_thinking": thinking}
        message: Any = [{"role": "user", "content": prompt}] if chat else prompt
        chunks = llm.stream(message, stop=tuple(stop or ()), template=template, **sampling)
        times = Profile()
        with probing(times) if profile else nullcontext():
            _print_chunks(chunks, before="" if chat or quiet else prompt)
        if profile:
            _note(times.table())
        if not quiet:
            _report(llm)


@app.command()
def chat(
    model: ModelOption = "demo",
    memory: MemoryOption = None,
    max_tokens: MaxTokensOption = 512,
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    thinking: ThinkingOption = None,
    temperature: TemperatureOption = 0.6,
    top_k: TopKOption = 20,
    top_p: TopPOption = 0.95,
    min_p: MinPOption = 0.0,
    seed: SeedOption = 0,
    context: ContextOption = None,
    policy: PolicyOption = None,
    follow_links: LinksOption = None,
    quiet: QuietOption = False,
) -> None:
    """Talk with a model. An empty line or Ctrl-D ends; Ctrl-C ends an answer."""
    history: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    template = {} if thinking is None else {"enable_thinking": thinking}
    sampling = _sampling(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    if sys.stdin is None:
        raise OptionError("standard input is closed, and chat reads its messages there; open it, or use generate.")
    sign = "> " if sys.stdin.isatty() and sys.stderr.isatty() else ""
    given = {"memory": memory, "context": context, "policy": policy, "follow_links": follow_links}
    with _load(model, quiet, **given) as llm:
        while True:
            print(sign, end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline().strip()
            if not line:
                break
            asked = [*history, {"role": "user", "content": line}]
            try:
                history = [*asked, _print_chunks(llm.stream(asked, template=template, **sampling))]
            except ContextError as error:
                _say(error)
        if not quiet:
            _report(llm)


def _progress(label: str) -> Callable[[Progress], None]:
    """Shows bytes, speed and time left on a terminal."""
    line = ProgressLine(label)

    def show(state: Progress) -> None:
        left = "" if state.eta is None else f", {state.eta:.0f} s left"
        line.show(f"{show_size(state.done)} of {show_size(state.total)}, {show_size(state.rate)}/s{left}")
        if state.done >= state.total:
            line.clear()

    return show


def _shown(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int):
        return str(value)
    return f"{value:,} ({show_size(value)})" if key.endswith("bytes") else f"{value:,}"


def _print_table(data: dict[str, Any], indent: str = "") -> None:
    for key, value in data.items():
        if isinstance(value, dict):
            print(f"{indent}{key}:")
            _print_table(value, indent + "  ")
        else:
            print(f"{indent}{key}: {_shown(key, value)}")


@app.command()
def info(
    store: StoreArgument = "demo",
    context: ContextOption = None,
    follow_links: LinksOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What a store holds, what it costs in memory, and the least budget it runs in."""
    found = api.info(store, **_given(context=context, follow_links=follow_links))
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        _print_table(found)


@app.command()
def verify(store: StoreArgument = "demo", follow_links: LinksOption = None) -> None:
    """Check a store's structure, and every byte of it against the digests in its manifest."""
    found = api.verify(store, progress=_progress("verify"), **_given(follow_links=follow_links))
    parts = f"{found.records:,} records, {found.tensors:,} tensors and {found.files:,} files"
    speed = f"{show_size(found.bytes)} in {found.seconds:.1f} s"
    print(f"{store}: every digest matches: {parts}, policy {found.policy}, {speed}; store digest {found.digest}")


@app.command()
def convert(
    source: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A folder with config.json and *.safetensors, or a hub id.")
    ],
    destination: Annotated[Path, typer.Argument(metavar="STORE", help="The directory to make, such as model.ttd.")],
    policy: Annotated[
        str | None,
        typer.Option(help="How each role is quantised: a policy's name, or a JSON file.", show_default="int4"),
    ] = None,
    head_bits: Annotated[int | None, typer.Option(help="Bits of the head: 16 (as stored), 8 or 4.")] = None,
    embed_bits: Annotated[int | None, typer.Option(help="Bits of the embedding: 16 (as stored), 8 or 4.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    norms: Annotated[
        Norms | None, typer.Option(help="What the norms hold, where their values leave it open.", show_default=False)
    ] = None,
) -> None:
    """Make a store from a checkpoint. Codes that are already quantised are kept bit for bit."""
    made = api.convert(source, destination, policy, head_bits, embed_bits, _progress("convert"), revision, norms)
    print(f"{made} is ready; `mlx-ttd info {quote(str(made))}` tells what it costs in memory.")


@app.command()
def trace(
    store: StoreArgument,
    prompt: Annotated[str, typer.Option(help="The text to pass through the model.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The directory to write.")],
    memory: MemoryOption = None,
    follow_links: LinksOption = None,
) -> None:
    """Record what every layer makes of every token of a prompt."""
    found = api.trace(store, prompt, output, **_given(memory=memory, follow_links=follow_links))
    print(f"{output}: {len(found.tokens)} tokens, digest {found.digest}")


@app.command()
def diff(
    left: Annotated[Path, typer.Argument(metavar="A", help="A directory that trace wrote.")],
    right: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    atol: Annotated[float, typer.Option(help="Numbers this near are equal; 0: only equal bits are.")] = 0.0,
) -> None:
    """Compare two traces: exit code 0 if equal, 1 if different, 2 if they cannot be compared."""
    traces = load_trace(left), load_trace(right)
    if reason := incomparable(*traces):
        raise StoreError(f"{left} and {right} cannot be compared: {reason}.")
    difference = first_difference(*traces, atol)
    print("equal" if difference is None else str(difference))
    raise typer.Exit(0 if difference is None else 1)


@app.command()
def plan(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A store, a checkpoint directory or a hub id.")],
    memory: MemoryOption = None,
    machine: Annotated[str, typer.Option(help=f"The machine to forecast for: {', '.join(machines())}.")] = TARGET,
    probe: Annotated[bool, typer.Option("--probe", help="Measure this machine and forecast for it.")] = False,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Length of the prompt whose first token is forecast.", show_default=str(PROMPT)),
    ] = None,
    wanted: Annotated[float | None, typer.Option(help="A wanted tok/s: say what stands in its way.")] = None,
    context: ContextOption = None,
    head_bits: Annotated[int | None, typer.Option(help="Bits of the head of a checkpoint: 16, 8 or 4.")] = None,
    follow_links: LinksOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Forecast from headers alone whether a model fits, and how fast it will be. Exit code 1 where it does not fit."""
    found = forecast_plan(
        source,
        machine="this" if probe else machine,
        prompt_tokens=prompt_tokens,
        wanted_tok_s=wanted,
        head_bits=head_bits,
        **_given(memory=memory, context=context, follow_links=follow_links),
    )
    print(json.dumps(found.to_json(), indent=1) if as_json else found)
    raise typer.Exit(0 if found.fits else 1)


def _check_png(path: Path) -> Path:
    """Where a sweep will be drawn. OptionError where it could not be, told before it is measured."""
    path = user_path(path)
    if path.suffix.lower() != ".png":
        raise OptionError(f"--png {path} is no name of a PNG; end it in .png.")
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise OptionError(f"--png {path} cannot be written; name a file in a directory that can be written to.")
    if find_spec("matplotlib") is None:
        raise OptionError("--png needs matplotlib; install it, or leave --png out.")
    return path


@app.command()
def bench(
    store: StoreArgument = "demo",
    memory: MemoryOption = None,
    tokens: Annotated[int, typer.Option(help="Tokens to decode after each prompt.")] = 32,
    budgets: Annotated[str | None, typer.Option("--sweep", help="LOW:HIGH, budgets to compare, as 2.5GB:8GB.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the sweep here; needs matplotlib.")] = None,
    follow_links: LinksOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a store on this machine and print a block to paste, with the forecast beside it."""
    if png is not None:
        png = _check_png(png)
    if budgets is None:
        report = run_bench(store, tokens=tokens, **_given(memory=memory, follow_links=follow_links))
        print(json.dumps(report.to_json(), indent=1) if as_json else report)
        return
    low, _, high = budgets.partition(":")
    found = sweep(store, low, high or low, **_given(follow_links=follow_links))
    if png is not None:
        draw_knee(found, png)
    lines = [f"{show_size(budget)}: {rate:.2f} tok/s" for budget, rate in found.items()]
    print(json.dumps(found, indent=1) if as_json else "\n".join(lines))


@app.command()
def doctor() -> None:
    """Print versions, backend, native part, disk and memory, to paste into a bug report."""
    print(report(machine_memory(), native_status()))


def _run() -> None:
    try:
        app(standalone_mode=True)
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()


def _abandon_output() -> None:
    """Let what standard output could not take be forgotten, so that ending does not try it again."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """Entry point: what goes wrong is one sentence on standard error and exit code 2."""
    sys.stderr = sys.stderr or io.StringIO()
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        _run()
    except TTDError as error:
        _say(error)
        sys.exit(2)
    except BrokenPipeError:
        _abandon_output()
        sys.exit(1)
    except OSError as error:
        if error.filename is None:
            _abandon_output()
            _say(f"standard output cannot be written: {error.strerror}; free some space or send it elsewhere.")
        else:
            _say(f"{error.filename} cannot be used: {error.strerror}; name another path.")
        sys.exit(2)
