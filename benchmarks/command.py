"""The one way into a benchmark's `main`: not where a CPU would time the plain MLX operations instead of the library."""

from __future__ import annotations

from collections.abc import Callable

from mlx_ttd.errors import OptionError
from mlx_ttd.kernels import device_kind, native_status
from mlx_ttd.options import PREFIX, make_options

CURE = (
    "run `pip install -e .` in this checkout (an install without -e leaves the native part out of the checkout, whose "
    "own mlx_ttd hides the installed one)"
)


def require_native() -> None:
    """SystemExit with one sentence where this machine's CPU would run the references."""
    if device_kind() != "cpu":
        return
    try:
        status = native_status()
        backend = make_options({}).backend
    except (ImportError, OptionError) as error:
        raise SystemExit(f"nothing was measured: {error}") from error
    if status.startswith("none: "):
        reason = status.removeprefix("none: ")
        raise SystemExit(f"nothing was measured, since {reason} and the references are no figures: {CURE}.")
    if backend == "reference":
        raise SystemExit(f"nothing was measured, since {PREFIX}BACKEND=reference asks for the references; unset it.")


def run(main: Callable[[], None]) -> None:
    """Run a benchmark's `main`, or refuse as `require_native` does."""
    require_native()
    main()
