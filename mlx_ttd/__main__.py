"""python -m mlx_ttd is mlx-ttd."""

from .cli import main

main()
