"""A model in use: its engine, and how callers reach it."""

from .llm import LLM

__all__ = ["LLM"]
