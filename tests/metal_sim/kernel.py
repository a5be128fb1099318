"""`metal_kernel` with the signature of mx.fast.metal_kernel, run on the CPU."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from .compile import HERE, build, compiler, keep, kept_as, llvm
from .errors import LaunchError, SourceError
from .launch import Argument, Order, Schedule, array_of, bytes_of, launch
from .lint import lint_sums, lint_text
from .report import Findings
from .source import KernelSource, take_apart, trace

THREADGROUP_BYTES = 32_768
make_metal_kernel = mx.fast.metal_kernel
read_source = cache(take_apart)


@dataclass(frozen=True)
class Options:
    """How launches run where the call does not say."""

    diag: bool = False
    lint: bool = True
    order: Order = "forward"
    seed: int = 0


@dataclass
class Run:
    """One launch: the kernel, its geometry, threadgroup memory in bytes, and what was found."""

    source: KernelSource
    schedule: Schedule
    threadgroup_bytes: int
    findings: Findings = field(default_factory=Findings)


_options = [Options()]
_logs: list[list[Run]] = []


@contextmanager
def options(**changes: Any) -> Iterator[list[Run]]:
    """Launches inside run with these of diag, lint, order and seed; the list grows by one Run each."""
    log: list[Run] = []
    _options.append(replace(_options[-1], **changes))
    _logs.append(log)
    try:
        yield log
    finally:
        _options.pop()
        _logs.remove(log)


class Outputs(list[mx.array]):
    """The outputs, and the Run they come from."""

    def __init__(self, arrays: Sequence[mx.array], run: Run) -> None:
        super().__init__(arrays)
        self.run = run

    @property
    def reports(self) -> list[str]:
        return self.run.findings.reports


@dataclass(frozen=True)
class SimKernel:
    """A kernel to be called as MLX's are, and with the fields of Options."""

    kernel: Any
    output_names: tuple[str, ...]

    def source(self, inputs: Sequence[mx.array], **call: Any) -> KernelSource:
        """The text that MLX makes of this call."""
        return read_source(trace(self.kernel, inputs, **call))

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] = (),
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
        **changes: Any,
    ) -> Outputs:
        how = replace(_options[-1], **changes)
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        mx.eval(arrays)
        source = self.source(
            arrays,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            grid=grid,
            threadgroup=threadgroup,
            template=list(template),
        )
        if verbose:
            print(source.text)
        if how.lint and (found := complaints(source)):
            raise SourceError("\n".join(found))
        program = build(source, how.diag)
        run = Run(source, Schedule(grid, threadgroup, how.order, how.seed), sum(a.bytes for a in program.arrays))
        _check_limits(run)
        outputs = {
            name: Argument(name, _initial(shape, dtype, init_value), written=True, initialised=init_value is not None)
            for name, shape, dtype in zip(self.output_names, output_shapes, output_dtypes, strict=True)
        }
        arguments = [*_read_arguments(source, arrays), *outputs.values()]
        run.findings = launch(program, arguments, run.schedule, how.diag)
        for log in _logs:
            log.append(run)
        results = [
            array_of(argument.data, shape, dtype)
            for argument, shape, dtype in zip(outputs.values(), output_shapes, output_dtypes, strict=True)
        ]
        return Outputs(results, run)


@cache
def complaints(source: KernelSource) -> list[str]:
    """What is wrong with the text although clang takes it; see lint.py."""
    texts = [(HERE / name).read_text() for name in ("lint.py", "metal_stdlib")]
    kept = kept_as(compiler().version, source.text, *texts).with_suffix(".lint")
    if not kept.exists():
        keep(kept, json.dumps(lint_text(source) or lint_sums(llvm(source))))
    return json.loads(kept.read_text())


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: dict[str, Any] | None = None,
) -> SimKernel:
    """As mx.fast.metal_kernel, but the kernel runs on the CPU, at once, when called."""
    if atomic_outputs or not ensure_row_contiguous:
        raise SourceError("Atomic outputs and inputs that are not row-contiguous are not simulated.")
    mode = (compile_options or {}).get("math_mode", "safe")
    if mode != "safe":
        raise SourceError(f"{name}: math mode {mode}; roundings are kept only by safe.")
    kernel = make_metal_kernel(
        name=name,
        input_names=list(input_names),
        output_names=list(output_names),
        source=source,
        header=header,
        compile_options=compile_options,
    )
    return SimKernel(kernel, tuple(output_names))


def _check_limits(run: Run) -> None:
    threads = math.prod(run.schedule.threadgroup)
    if not 0 < threads <= 1024 or min(run.schedule.grid) < 1:
        raise LaunchError(f"{run.source.name}: {threads} threads a threadgroup, grid {run.schedule.grid}.")
    if run.threadgroup_bytes > THREADGROUP_BYTES:
        raise LaunchError(f"{run.source.name}: {run.threadgroup_bytes} bytes of threadgroup memory; Metal has 32,768.")


def _initial(shape: Sequence[int], dtype: mx.Dtype, value: float | None) -> np.ndarray:
    if value is not None:
        return bytes_of(mx.full(shape, value, dtype))
    return np.full(math.prod(shape) * dtype.size, 0xFF, np.uint8)


def _read_arguments(source: KernelSource, arrays: Sequence[mx.array]) -> list[Argument]:
    """Inputs in the order of the signature, each followed by what MLX tells of its shape."""
    arguments: list[Argument] = []
    remaining = iter(arrays)
    array = None
    for parameter in source.parameters:
        if parameter.written:
            break
        told = parameter.name.rpartition("_")[2] if arguments and array is not None else ""
        if array is not None and told in ("shape", "strides", "ndim") and parameter.space == "constant":
            strides = [math.prod(array.shape[i + 1 :]) for i in range(array.ndim)]
            values = {"shape": (array.shape, np.int32), "strides": (strides, np.int64), "ndim": (array.ndim, np.int32)}
            numbers, kind = values[told]
            data = np.atleast_1d(np.array(numbers, kind)).view(np.uint8)
        else:
            array = next(remaining)
            data = bytes_of(array)
        arguments.append(Argument(parameter.name, data, parameter.space))
    return arguments
