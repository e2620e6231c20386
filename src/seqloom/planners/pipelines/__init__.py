"""Planner ``pipeline``: layers cut into stages, long documents in pieces through them, short ones packed beside."""

from __future__ import annotations
