"""The on-disk form of a model: reading, checking and making stores."""

from .convert import convert
from .format import Norms
from .info import info
from .manifest import Manifest
from .policy import policies
from .progress import Progress
from .reader import MTPStore, Store, open_store, read_tensor
from .safetensors_file import TensorInfo
from .verify import VerifyReport, verify

__all__ = [
    "MTPStore",
    "Manifest",
    "Norms",
    "Progress",
    "Store",
    "TensorInfo",
    "VerifyReport",
    "convert",
    "info",
    "open_store",
    "policies",
    "read_tensor",
    "verify",
]
