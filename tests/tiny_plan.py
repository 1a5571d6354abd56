"""The plan of a small train step, computed once for several test modules."""

from __future__ import annotations

import functools

import pytest

import toast
from tests.helpers import analyzed
from toast import api
from toast.hardware import Mesh, load
from toast.plan import Plan

MESH = "data=2,model=2"


@functools.cache
def machine() -> toast.Hardware:
    return api.small_scale(analyzed("t2b-tiny"), Mesh.parse(MESH), load("tpu-v5e"))


@functools.cache
def tiny() -> Plan:
    return toast.plan(analyzed("t2b-tiny"), mesh=MESH, hardware=machine())


@pytest.fixture(scope="session")
def plan() -> Plan:
    return tiny()
