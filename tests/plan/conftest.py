"""The plan of a small train step, for all tests of this folder."""

from tests.tiny_plan import plan

__all__ = ["plan"]
