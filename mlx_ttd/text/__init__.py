"""Text to token ids and back: tokenizer, chat template, incremental decoding, reasoning and tool calls.

`tokenizers` and `jinja2` are imported when text is first encoded, decoded or rendered, not before.
"""

from .chat_template import normalise_messages, read_templates, render
from .detokenizer import Detokenizer
from .limits import DEFAULT_LIMITS, Limits
from .reasoning import ReasoningSplitter, opens_reasoning
from .tagged import held_suffix
from .token_ids import token_ids
from .tokenizer import Tokenizer
from .tool_calls import ToolCallSplitter, parameter_schemas, parse_tool_calls

__all__ = [
    "DEFAULT_LIMITS",
    "Detokenizer",
    "Limits",
    "ReasoningSplitter",
    "Tokenizer",
    "ToolCallSplitter",
    "held_suffix",
    "normalise_messages",
    "opens_reasoning",
    "parameter_schemas",
    "parse_tool_calls",
    "read_templates",
    "render",
    "token_ids",
]
