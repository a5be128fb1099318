"""From a prompt to text: the decode loop, sampling, when to stop."""

from .decode import Running, Step, decode, prefill
from .defaults import GenerationDefaults, read_eos_ids, read_generation_defaults
from .options import GenerationOptions, generation_options
from .penalties import make_processors
from .response import Chunk, Record, Response, array_digest, peak_bytes, token_digest
from .sampling import make_sampler
from .stopping import stop_ids
from .text_stream import IdStream, TextStream

__all__ = [
    "Chunk",
    "GenerationDefaults",
    "GenerationOptions",
    "IdStream",
    "Record",
    "Response",
    "Running",
    "Step",
    "TextStream",
    "array_digest",
    "decode",
    "generation_options",
    "make_processors",
    "make_sampler",
    "peak_bytes",
    "prefill",
    "read_eos_ids",
    "read_generation_defaults",
    "stop_ids",
    "token_digest",
]
