"""The one place that states the version: the build reads this line, the package and `mlx-ttd --version` import it."""

__version__ = "0.1.0"
