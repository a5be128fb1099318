"""The on-disk form of a model: reading, checking and making stores."""

from .convert import convert
from .format import Norms
from .manifest import Manifest
from .progress import Progress
from .reader import MTPStore, Store, open_store, read_tensor
from .safetensors_file import TensorInfo

__all__ = ["MTPStore", "Manifest", "Norms", "Progress", "Store", "TensorInfo", "convert", "open_store", "read_tensor"]
