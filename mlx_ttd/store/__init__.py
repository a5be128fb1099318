"""The on-disk form of a model: reading, checking and making stores."""

from .convert import convert
from .foreign import refuse_file
from .format import Norms
from .hub import is_hub_id
from .hub_size import hub_bytes
from .info import info
from .manifest import Manifest
from .planned import planned_store, store_of_plan
from .policy import policies
from .progress import Progress
from .reader import MX_DTYPES, MTPStore, Store, open_store, read_tensor
from .safetensors_file import Header, TensorInfo, make_header, parse_header, read_header
from .stamp import Stamp, stamp_of
from .verify import VerifyReport, verify
from .writer import sync_directory

__all__ = [
    "MX_DTYPES",
    "Header",
    "MTPStore",
    "Manifest",
    "Norms",
    "Progress",
    "Stamp",
    "Store",
    "TensorInfo",
    "VerifyReport",
    "convert",
    "hub_bytes",
    "info",
    "is_hub_id",
    "make_header",
    "open_store",
    "parse_header",
    "planned_store",
    "policies",
    "read_header",
    "read_tensor",
    "refuse_file",
    "stamp_of",
    "store_of_plan",
    "sync_directory",
    "verify",
]
