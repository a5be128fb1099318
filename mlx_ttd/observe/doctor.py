"""What a bug report needs to say about this machine and this installation, and what is plainly wrong with it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

BACKENDS = ("mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-metal")
LIBRARIES = ("numpy", "safetensors", "tokenizers", "jinja2", "huggingface_hub", "typer")
INSTRUCTIONS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_int8", "asimd", "sve")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def backends_installed() -> dict[str, str]:
    """Distributions that bring mlx/lib/libmlx, with their versions. Sound is exactly one, at the version of mlx."""
    return {name: found for name in BACKENDS if (found := _version(name))}


def problems() -> list[str]:
    """One sentence for each thing wrong with the installation: what, and what to do. Empty when it is sound."""
    backends = backends_installed()
    mlx = _version("mlx")
    found = []
    if len(backends) > 1:
        names = " ".join(backends)
        found.append(
            f"{' and '.join(backends)} are installed together and overwrite each other's libmlx; run "
            f"`pip uninstall -y {names}`, then install the one that you want: mlx-cpu=={mlx} or mlx-cuda-13=={mlx}."
        )
    for name, backend in backends.items():
        if backend != mlx:
            found.append(f"{name} is {backend} but mlx is {mlx}; install both at one version.")
    return found


def _instruction_sets() -> list[str]:
    if sys.platform == "darwin":
        return [platform.machine()]
    fields = (line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    flags = next((words.split() for key, words in fields if key.strip() in ("flags", "Features")), [])
    return [name for name in INSTRUCTIONS if name in flags]


def _processor() -> str:
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    fields = (line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    return next((name.strip() for key, name in fields if key.strip() == "model name"), platform.machine())


def report(memory: tuple[int, int], native: str, folder: str | os.PathLike[str] = ".") -> str:
    """The block that `mlx-ttd doctor` prints. `memory` is (total, free) bytes of RAM, `native` one phrase about the
    native part, `folder` where the disk is measured."""
    import mlx.core as mx

    from .._version import __version__

    disk = shutil.disk_usage(folder)
    device = mx.device_info()
    backends = ", ".join(f"{name} {found}" for name, found in backends_installed().items())
    facts = {
        "mlx_ttd": __version__,
        "mlx": f"{_version('mlx')} with {backends or 'no backend'}",
        "device": f"{mx.default_device()}, {device.get('device_name', '')} ({device.get('architecture', '')})",
        "native part": native,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": platform.platform(),
        "processor": f"{_processor()}, {os.cpu_count()} threads",
        "instructions": " ".join(_instruction_sets()),
        "memory": f"{memory[0] / 1e9:.1f} GB, {memory[1] / 1e9:.1f} GB free",
        "disk": f"{disk.total / 1e9:.1f} GB, {disk.free / 1e9:.1f} GB free",
        "libraries": ", ".join(f"{name} {_version(name) or 'missing'}" for name in LIBRARIES),
    }
    environment = sorted(f"{key}={value}" for key, value in os.environ.items() if key.startswith("MLX_"))
    if environment:
        facts["environment"] = " ".join(environment)
    lines = [f"{name + ':':<14}{fact}" for name, fact in facts.items()]
    return "\n".join(lines + [f"problem:      {sentence}" for sentence in problems()])
