"""Run toast on hostile inputs from grammars: no traceback, no hang, no access to other files.

    python benchmarks/hostile.py --count 1000 --seed 0 --processes 2

The script draws StableHLO, rule files, queries, fact bases, plans, hardware files, tables, cache
entries, command lines and streams, and runs ``toast`` on each in a separate process.  It prints a
table of the outcomes: a result, a one-line error, a traceback, an internal error, a signal, or more
than 60 seconds.  It exits with 1 if a case failed, and names the case and its seed.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import hashlib
import io
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from toast.cli.elapsed import elapsed

#: A case that takes longer, in seconds, counts as a hang.
LIMIT_SECONDS = 60.0

#: Exit codes of cases that did not fail: a result, a difference or a misfit, a one-line error.
_GOOD = frozenset({0, 1, 2})

Draw = random.Random


@dataclasses.dataclass(frozen=True)
class Case:
    """A command line, run in its own folder."""

    grammar: str
    seed: int
    arguments: tuple[str, ...]
    #: Shell redirections such as ``> /dev/full``; empty for pipes.
    streams: str = ""
    environment: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a case ended."""

    case: Case
    kind: str
    seconds: float
    said: str


# -- texts ----------------------------------------------------------------------------------------

_ODD = (
    "\x1b[31mred\x1b[0m", "a\0b", "\u202egnp.exe", "'; drop", "../../etc/passwd", "/dev/zero",
    "%s%n",
    "[bold]x[/bold]", "<script>alert(1)</script>", "\\q", "x" * 300, "\ud800", "é", "\r\n",
    '"', "#end.",
)  # fmt: skip
_NUMBERS = (
    "0", "1", "-1", "2", "127", "128", "2147483647", "2147483648", "4294967328",
    "9223372036854775807",
    "9223372036854775808", "1e309", "nan", "inf", "-0", "0x10", "1" * 5000,
)  # fmt: skip


def odd(draw: Draw) -> str:
    """An unusual text."""
    return draw.choice(_ODD)


def escaped(text: str) -> str:
    """A text, escaped as in MLIR strings."""
    data = text.encode("utf-8", "surrogatepass")
    return "".join(chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\{b:02X}" for b in data)


# -- StableHLO ------------------------------------------------------------------------------------


def tensor(draw: Draw) -> str:
    """A type, usually of a tensor."""
    rank = draw.choice((0, 1, 2, 2, 2, 3, 4, draw.choice((64, 65, 130))))
    sizes = [draw.choice(("1", "2", "3", "4", "8", "64", "256")) for _ in range(rank)]
    if draw.random() < 0.06 and sizes:
        sizes[0] = draw.choice(("?", "0", "2147483648", "9223372036854775807"))
    element = draw.choice((
        "f32", "f32", "f32", "bf16", "i1", "i8", "ui64", "f64", "complex<f32>", "f8E4M3FN", "index",
        "i7", f'!llvm.struct<"{escaped(odd(draw))}", (i32)>',
    ))  # fmt: skip
    text = f"tensor<{''.join(f'{size}x' for size in sizes)}{element}>"
    other = ("tensor<*xf32>", "memref<4xf32>", f"tuple<{text}, {text}>", "!stablehlo.token")
    return draw.choice(other) if draw.random() < 0.08 else text


def place(draw: Draw) -> str:
    """A location."""
    file = draw.choice(("model.py", "/etc/passwd", "/dev/zero", "fifo", odd(draw)))
    line = draw.choice(("1", "0", "4294967295"))
    name = escaped(odd(draw))
    return draw.choice((
        f'loc("{escaped(file)}":{line}:1)', f'loc("{name}"("{escaped(file)}":{line}:1))',
        f'loc("{name}")', "loc(unknown)", 'loc("\\FF\\FE":1:1)',
    ))  # fmt: skip


def operation(draw: Draw, number: int, kind: str) -> str:
    """An op on values of one type."""
    last = f"%v{number - 1}"
    name = draw.choice((
        "add", "multiply", "abs", "tanh", "negate", "optimization_barrier", "custom_call",
        "reshape",
        "while", "call", "tuple", "partition_id",
    ))  # fmt: skip
    if name in ("abs", "tanh", "negate"):
        body = f"stablehlo.{name} {last} : {kind}"
    elif name == "custom_call":
        body = (
            f'stablehlo.custom_call @x({last}) {{n = "{escaped(odd(draw))}"}} : ({kind}) -> {kind}'
        )
    elif name == "reshape":
        body = f"stablehlo.reshape {last} : ({kind}) -> {tensor(draw)}"
    elif name == "call":
        body = f"func.call @{draw.choice(('f', 'main', 'none'))}({last}) : ({kind}) -> {kind}"
    elif name == "tuple":
        body = f"stablehlo.tuple {last} : tuple<{kind}>"
    elif name == "partition_id":
        body = "stablehlo.partition_id : tensor<ui32>"
    elif name == "while":
        bound = draw.choice(_NUMBERS)
        body = (
            f"stablehlo.while(%c{number} = {last}) : {kind}\n cond {{\n"
            f" %b{number} = stablehlo.constant dense<{bound}> : tensor<i64>\n"
            f" %p{number} = stablehlo.compare LT, %b{number}, %b{number} : "
            "(tensor<i64>, tensor<i64>) -> tensor<i1>\n"
            f" stablehlo.return %p{number} : tensor<i1>\n }} do {{\n"
            f" stablehlo.return %c{number} : {kind}\n }}"
        )
    elif name == "optimization_barrier":
        body = f"stablehlo.optimization_barrier {last} : {kind}"
    else:
        body = f"stablehlo.{name} {last}, {last} : {kind}"
    return f"  %v{number} = {body} {place(draw) if draw.random() < 0.4 else ''}"


def sound(draw: Draw) -> str:
    """A module that is valid, so that the stages behind the parser see something."""
    kind = draw.choice(
        ("tensor<8xf32>", "tensor<4x8xf32>", "tensor<64x64xbf16>", "tensor<2x3x4xi32>")
    )
    lines = []
    for number in range(1, draw.choice((2, 4, 9, 40))):
        one, other = (f"%v{draw.randrange(number)}" for _ in range(2))
        end = draw.choice(("true", "false", "false", "false"))
        body = draw.choice((
            f"stablehlo.add {one}, {other} : {kind}", f"stablehlo.multiply {one}, {one} : {kind}",
            f"stablehlo.negate {one} : {kind}", f"func.call @f({one}) : ({kind}) -> {kind}",
            f'stablehlo.custom_call @{draw.choice(("x", "Sharding", "TopK"))}({one}) '
            f'{{n = "{escaped(odd(draw))}"}} : ({kind}) -> {kind}',
            f"stablehlo.while(%c{number} = {one}) : {kind}\n cond {{\n"
            f" %p{number} = stablehlo.constant dense<{end}> : tensor<i1>\n"
            f" stablehlo.return %p{number} : tensor<i1>\n }} do {{\n"
            f" stablehlo.return %c{number} : {kind}\n }}",
        ))  # fmt: skip
        lines.append(f"  %v{number} = {body} {place(draw) if draw.random() < 0.3 else ''}")
    if draw.random() < 0.1:
        lines.append(
            "  %t = stablehlo.create_token : !stablehlo.token\n"
            f'  %o = "stablehlo.outfeed"(%v0, %t) {{outfeed_config = "{escaped(odd(draw))}"}} : '
            f"({kind}, !stablehlo.token) -> !stablehlo.token"
        )
    alias = draw.choice(("", "", " {tf.aliasing_output = 0 : i32}"))
    return (
        f"func.func private @f(%x: {kind}) -> {kind} {{\n  return %x : {kind}\n}}\n"
        f"func.func public @main(%v0: {kind}{alias}) -> {kind} {{\n"
        + "\n".join(lines) + f"\n  return %v{number} : {kind}\n}}\n"
    )  # fmt: skip


def stablehlo(draw: Draw) -> str | bytes:
    """A module."""
    if draw.random() < 0.4:
        return sound(draw)
    kind = tensor(draw)
    count = draw.choice((0, 1, 2, 3, 5, 8))
    alias = draw.choice(("0", "1", "-1", "99", '"x"', "0.5", "9223372036854775807"))
    attributes = f" {{tf.aliasing_output = {alias} : i32}}" if draw.random() < 0.2 else ""
    lines = [operation(draw, number, kind) for number in range(1, count + 1)]
    inner = draw.choice((f"  return %v{count} : {kind}", f"  return %v0 : {kind}", "  return", ""))
    result = draw.choice((f" -> {kind}", "", f" -> ({kind}, {kind})", f" -> {tensor(draw)}"))
    text = (
        f"func.func @f(%v0: {kind}) -> {kind} {{\n  return %v0 : {kind}\n}}\n"
        f"func.func public @{draw.choice(('main', 'main', 'g'))}"
        f"(%v0: {kind}{attributes}){result} {{\n"
        + "\n".join(lines) + f"\n{inner}\n}}\n"
    )  # fmt: skip
    shape = draw.random()
    if shape < 0.06:
        text = f"module {{ module @inner {{ {text} }} }}"
    elif shape < 0.10:
        text = calls(draw.choice((20, 27, 400)))
    elif shape < 0.14:
        text = blocks()
    elif shape < 0.18:
        text = nested(draw.choice((50, 500, 3000)))
    if draw.random() < 0.25:
        data = bytearray(text.encode("utf-8", "surrogatepass"))
        for _ in range(draw.choice((1, 2, 10))):
            data[draw.randrange(len(data))] = draw.randrange(256)
        return bytes(data)
    return text if draw.random() < 0.9 else b"ML\xefR" + draw.randbytes(200)


def calls(depth: int) -> str:
    """Functions that call the previous one twice: 2^depth ops."""
    kind = "tensor<4x4xf32>"
    text = f"func.func private @f0(%x: {kind}) -> {kind} {{ return %x : {kind} }}\n"
    for n in range(1, depth):
        text += (
            f"func.func private @f{n}(%x: {kind}) -> {kind} {{\n"
            f"  %a = func.call @f{n - 1}(%x) : ({kind}) -> {kind}\n"
            f"  %b = func.call @f{n - 1}(%a) : ({kind}) -> {kind}\n"
            f"  %c = stablehlo.add %a, %b : {kind}\n  return %c : {kind}\n}}\n"
        )
    return text + (
        f"func.func public @main(%x: {kind}) -> {kind} {{\n"
        f"  %a = func.call @f{depth - 1}(%x) : ({kind}) -> {kind}\n  return %a : {kind}\n}}\n"
    )


def blocks() -> str:
    """Branches that are not StableHLO."""
    kind = "tensor<4xf32>"
    return (
        f"func.func @main(%x: {kind}) -> {kind} {{\n  cf.br ^next(%x : {kind})\n"
        f"^next(%y: {kind}):\n  return %y : {kind}\n}}\n"
    )


def nested(depth: int) -> str:
    """Nested loops."""
    kind = "tensor<i64>"
    text = f"func.func @main(%x: {kind}) -> {kind} {{\n"
    for n in range(depth):
        text += (
            f"%r{n} = stablehlo.while(%i{n} = %x) : {kind}\n cond {{\n"
            f" %p{n} = stablehlo.compare LT, %i{n}, %i{n} : ({kind}, {kind}) -> tensor<i1>\n"
            f" stablehlo.return %p{n} : tensor<i1>\n}} do {{\n"
        )
    for n in reversed(range(depth)):
        text += f" stablehlo.return %i{n} : {kind}\n}}\n"
    return text + f"return %r0 : {kind}\n}}\n"


# -- logic ----------------------------------------------------------------------------------------


def term(draw: Draw, depth: int = 3) -> str:
    """A term, usually small."""
    if draw.random() < 0.02:
        deep = draw.choice((90, 3000, 100_000))
        return "f(" * deep + "1" + ")" * deep
    if draw.random() < 0.02:
        return "+".join(["1"] * draw.choice((90, 5000, 100_000)))
    choice = draw.random()
    if depth == 0 or choice < 0.4:
        return draw.choice(("X", "Y", "V", "_", "1", "x", draw.choice(_NUMBERS), f'"{odd(draw)}"'))
    if choice < 0.6:
        operator = draw.choice(("+", "-", "*", "/", "\\", "**", ".."))
        return f"({term(draw, depth - 1)}{operator}{term(draw, depth - 1)})"
    return f"f({term(draw, depth - 1)},{term(draw, depth - 1)})"


def atom(draw: Draw) -> str:
    """An atom of an existing or unknown relation."""
    name, arity = draw.choice((
        ("dim", 3), ("color", 2), ("op", 2), ("argument", 2), ("factor", 4), ("mine", 1),
        ("nosuch", 2),
        ("conflict", 3), ("sharding", 4), ("need_replication", 2), ("halo", 3), ("reduction", 3),
    ))  # fmt: skip
    return f"{name}({','.join(term(draw, 1) for _ in range(arity))})"


def body(draw: Draw) -> str:
    """A rule body."""
    parts = [
        draw.choice(("", "", "not ")) + atom(draw) for _ in range(draw.choice((1, 1, 2, 3, 6)))
    ]
    if draw.random() < 0.3:
        parts.append(f"X = #sum{{ {term(draw, 1)},V : {atom(draw)} }}")
    if draw.random() < 0.3:
        parts.append(f"X {draw.choice(('<', '=', '!=', '>'))} {term(draw, 1)}")
    return ", ".join(parts)


def arithmetic(draw: Draw) -> str:
    """A sound query whose numbers may go beyond 32 bits."""
    small = draw.choice(("1", "2", "3", "31", "1024", "65536", "2147483647"))
    value = draw.choice(("A", "B", "A*B", "A+B", "A-B", "A*A", "A**2", "A**B", "-A", "|A-B|"))
    value = f"({value}{draw.choice('*+-/')}{small})" if draw.random() < 0.7 else value
    if draw.random() < 0.3:
        value = f"({value}**{draw.choice('234')})"
    given = "dim(V,_,A), dim(W,_,B), A < B"
    function = draw.choice(("sum", "sum+", "max", "min", "count"))
    return draw.choice((
        f"{given}, X = {value}", f"{given}, {value} > 0", f"{given}, not argument({value},_)",
        f"X = #{function} {{ {value},V,W : {given} }}",
        f"argument(V,_), X = #{function} {{ A,W : {given}, {value} != {small} }}",
        f"{given}, {value} < #count {{ U : argument(U,_) }}",
        f"answers({value}) :- {given}.", f"argument(V,_), {value} > 0 : {given}",
    ))  # fmt: skip


def bad_statement(draw: Draw) -> str:
    """A statement that logic files must not contain."""
    return draw.choice((
        '#include "fifo".', '#include "/etc/passwd".', '#script (lua) os.exit() #end.',
        '#script(x) " #end. #include "fifo". %"', 'p("\\q. #include "fifo". ").',
        "% x\r#include \"fifo\".", "#external a.", "{ mine(1) }.", "mine(1) | mine(2).",
        "mine(1) :- not mine(1).", ":- op(_,_).", "mine(X) :- mine(Y), X = Y + 1.",
        "mine((A,B,C,D,E,F)) :- A=1..99, B=1..99, C=1..99, D=1..99, E=1..99, F=1..99.",
        "mine(@f(1)).", "#show mine/1.", "#minimize { 1 }.", "&x { a }.", "\xff.", f"{odd(draw)}",
    ))  # fmt: skip


def logic(draw: Draw) -> str:
    """A file of rules."""
    lines = ["%! mine(X): mine.", "mine(1)."]
    for _ in range(draw.choice((0, 1, 3, 6))):
        if draw.random() < 0.4:
            lines.append(bad_statement(draw))
        else:
            lines.append(f"{atom(draw)} :- {body(draw)}.")
    lines += draw.choice(
        ([], ["rule(tanh).", "factor(Op,D,T,D) :- op(Op,tanh), tensor_dim(Op,T,D,_)."])
    )
    text = "\n".join(lines)
    return text * draw.choice((1, 1, 1, 1, 20_000)) if len(text) < 600 else text


def facts(draw: Draw) -> str:
    """A fact base."""
    lines = [
        'op(x,argument). result(x,0,v). rank(v,2). dim(v,0,4). dim(v,1,8). dtype(v,"f32").',
        "op(a,tanh). operand(a,0,v). result(a,0,w). rank(w,2). dim(w,0,4). dim(w,1,8).",
        "op(r,return). operand(r,0,w).",
    ]
    number = draw.choice(_NUMBERS)
    for _ in range(draw.choice((0, 1, 2))):
        lines.append(draw.choice((
            f"dim(v,0,{number}).", f"repeats(a,{number}).", "repeats(a,2). repeats(a,3).",
            f'dtype(w,"{odd(draw)}").', f"rank(w,{number}).", f"operand(a,{number},v).",
            "tied(a,b).", "tied(r,x).", bad_statement(draw), f"op({term(draw)},tanh).", "",
        )))  # fmt: skip
    return "\n".join(lines) if draw.random() < 0.95 else ""


# -- data -----------------------------------------------------------------------------------------


def mutated(draw: Draw, data: object, depth: int = 0) -> object:
    """JSON data with one value replaced."""
    if isinstance(data, dict) and data and (depth < 1 or draw.random() < 0.8):
        key = draw.choice([*data])
        if draw.random() < 0.1:
            return {k: v for k, v in data.items() if k != key}
        return {**data, key: mutated(draw, data[key], depth + 1)}
    if isinstance(data, list) and data and draw.random() < 0.8:
        index = draw.randrange(len(data))
        return [*data[:index], mutated(draw, data[index], depth + 1), *data[index + 1 :]]
    return draw.choice((
        None, True, -1, 0, 2**63, 1e308, float("nan"), float("inf"), odd(draw), [], {}, [[]],
        "os:abort",
        "http.server:test", "/etc/passwd", "fifo", [1] * 10_000, "x" * 100_000,
    ))  # fmt: skip


def toml(draw: Draw, text: str) -> str:
    """A hardware file with some lines replaced."""
    lines = text.splitlines()
    for _ in range(draw.choice((1, 1, 2, 5))):
        index = draw.randrange(len(lines))
        key = lines[index].partition("=")[0]
        lines[index] = draw.choice((
            f"{key}= {draw.choice(_NUMBERS)}", f'{key}= """{odd(draw)}"""', "", f"{key}={{",
            f"[{odd(draw)}]", f"{key}= " + "[" * draw.choice((3, 5000)), lines[index] * 2,
        ))  # fmt: skip
    return "\n".join(lines)


def table(draw: Draw) -> str:
    """A CSV of measured times."""
    rows = ["collective,devices,bytes,seconds"]
    for _ in range(draw.choice((0, 1, 20, 20_000))):
        rows.append(",".join((
            draw.choice(("all_gather", "all_reduce", odd(draw))), draw.choice(("8", *_NUMBERS)),
            draw.choice(("1048576", *_NUMBERS)), draw.choice(("1.7e-05", *_NUMBERS)),
        )))  # fmt: skip
    return "\n".join(rows)


# -- cases ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Seeds:
    """The valid files that cases modify: a plan and a hardware file."""

    plan: str
    hardware: str


def write(path: pathlib.Path, text: str | bytes) -> str:
    """Write a drawn text with any content; returns the name of the file."""
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    path.write_bytes(data)
    return path.name


def of_stablehlo(draw: Draw, folder: pathlib.Path, _seeds: Seeds) -> tuple[str, ...]:
    """A program from a file."""
    name = write(folder / "program.mlir", stablehlo(draw))
    return draw.choice((
        ("analyze", name), ("plan", name, "--mesh", "a=2", "--json", "out.json"),
        ("plan", name, "--mesh", "a=2,b=2", "--report", "out.html", "--budget", "2"),
        ("report", name, "--mesh", "a=2", "-o", "out.html", "--sources", "."),
        ("explain", name, "--conflicts"), ("explain", name, "arg0:0", "result[0]:0"),
        ("query", name, "argument(V,P), dim(V,D,S)"), ("rules", "annotate", name),
        ("verify", name, "--mesh", "a=2", "--timeout", "10"),
    ))  # fmt: skip


def of_rules(draw: Draw, folder: pathlib.Path, _seeds: Seeds) -> tuple[str, ...]:
    """A rule file."""
    name = write(folder / "mine.lp", logic(draw))
    return draw.choice((
        ("rules", "check", name), ("analyze", "mlp", "--rules", name),
        ("rules", "list", "--rules", name),
        ("query", "mlp", "mine(X)", "--with", name), ("query", "mlp", name),
    ))  # fmt: skip


def of_queries(draw: Draw, _folder: pathlib.Path, _seeds: Seeds) -> tuple[str, ...]:
    """A query."""
    text = draw.choice((arithmetic, arithmetic, body, body, body, bad_statement))(draw)
    text = text.replace("\0", "?").encode("utf-8", "surrogateescape" * 0 or "replace").decode()
    return ("query", "mlp", text[:100_000])


def of_facts(draw: Draw, folder: pathlib.Path, _seeds: Seeds) -> tuple[str, ...]:
    """A fact base."""
    name = write(folder / "facts.lp", facts(draw))
    return draw.choice((
        ("analyze", name), ("plan", name, "--mesh", "a=2"), ("explain", name, "x:0", "w:0"),
        ("query", name, "op(O,K)"),
    ))  # fmt: skip


def of_plans(draw: Draw, folder: pathlib.Path, seeds: Seeds) -> tuple[str, ...]:
    """A plan."""
    data = json.loads(seeds.plan)
    for _ in range(draw.choice((1, 1, 2))):
        data = mutated(draw, data)
    text = json.dumps(data)
    if draw.random() < 0.2:
        text = draw.choice((text[: draw.randrange(len(text))], "[" * 100_000, "{}", "", text * 3))
    name = write(folder / "plan.json", text)
    return draw.choice((
        ("report", name, "-o", "out.html"), ("explain", name, "--argument", "x"),
        ("explain", name, "--collective", "all"), ("query", name, "argument(V,P)"),
        ("diff", name, name), ("apply", name, "mlp"),
        ("plan", "mlp", "--mesh", "a=2", "--start", name),
    ))  # fmt: skip


def of_hardware(draw: Draw, folder: pathlib.Path, seeds: Seeds) -> tuple[str, ...]:
    """A hardware file, or measured times."""
    if draw.random() < 0.4:
        name = write(folder / "times.csv", table(draw))
        return ("hardware", "calibrate", "h100", "--collectives", name, "-o", "out.toml")
    name = write(folder / "device.toml", toml(draw, seeds.hardware))
    return draw.choice((
        ("hardware", "show", name), ("plan", "mlp", "--mesh", "a=2", "--hardware", name),
        ("hardware", "show", name, "--mesh", draw.choice(("a=2", "a=0", "a=x", odd(draw), "a"))),
    ))  # fmt: skip


def signed(draw: Draw, data: bytes, entry: pathlib.Path) -> bytes:
    """An entry with something else in one array, or in its JSON, under a signature that is good."""
    secret = entry.parents[1] / "key"
    if not secret.is_file():
        return data
    with np.load(io.BytesIO(data[32:])) as members:
        arrays = {name: np.array(members[name]) for name in members.files}
    name = draw.choice(sorted(arrays))
    array = arrays[name]
    if name == "text":
        changed = json.dumps(mutated(draw, json.loads(array.tobytes()))).encode()
        arrays[name] = np.frombuffer(changed, dtype=np.uint8)
    else:
        other = array.copy()
        if other.size:
            other.flat[draw.randrange(other.size)] = draw.choice((-1, 2**31 - 1, 7))
        arrays[name] = draw.choice((other, array[1:], array.astype(float), array.reshape(-1)))
    stream = io.BytesIO()
    np.savez(stream, allow_pickle=False, **arrays)
    content, key = stream.getvalue(), bytes.fromhex(entry.stem)
    own = hashlib.blake2b(secret.read_bytes() + key, digest_size=32).digest()
    return hashlib.blake2b(content, key=own, digest_size=32).digest() + content


def of_cache(draw: Draw, folder: pathlib.Path, _seeds: Seeds) -> tuple[str, ...]:
    """Damaged cache entries: the folder contains the entries of an earlier run."""
    entries = [*(folder / "cache").rglob("*.toast"), *(folder / "cache").rglob("key")]
    for entry in entries:
        way = draw.randrange(8)
        data = bytearray(entry.read_bytes())
        if way == 0:
            del data[draw.randrange(len(data)) :]
        elif way == 1:
            for _ in range(20):
                data[draw.randrange(len(data))] = draw.randrange(256)
        elif way == 2:
            data = bytearray(draw.randbytes(500))
        elif way > 5 and entry.suffix == ".toast":
            data = bytearray(signed(draw, bytes(data), entry))
        entry.unlink()
        if way == 3:
            os.mkfifo(entry)
        elif way == 4:
            entry.symlink_to("/dev/zero")
        elif way == 5:
            entry.mkdir()
        else:
            entry.write_bytes(data)
    return ("query", "mlp", "color(D,C)")


def of_words(draw: Draw, folder: pathlib.Path, _seeds: Seeds) -> tuple[str, ...]:
    """A command line."""
    (folder / "bad_module.py").write_text(draw.choice((
        "raise SystemExit(0)", "raise KeyError('x')", "def __getattr__(n): raise ValueError(n)",
        "f = 5", "def f(): raise SystemExit", "def f(x): 1/0", "raise BaseException", "f(",
        "import sys; sys.exit('bye')",
    )))  # fmt: skip
    strange = draw.choice((
        "mlp", "nosuch", "fifo", "/dev/zero", ".", "", "x" * 5000, "bad_module:f", "os:getcwd", ":",
        "a:b:c",
        "no/such.mlir", "plan.json", "fifo.mlir", "fifo.lp", "t2b",
    ))  # fmt: skip
    number = draw.choice(_NUMBERS)
    word = odd(draw).replace("\0", "").replace("\ud800", "\udc80")
    out = draw.choice(
        ("out.json", "/dev/null", "fifo", ".", "no/such/out.json", "x" * 300, "-", "link")
    )
    return draw.choice((
        ("plan", strange, "--mesh", draw.choice(("a=2", word, f"a={number}"))),
        ("plan", "mlp", "--mesh", "a=2", "--json", out, "--report", draw.choice((out, "out.html"))),
        ("plan", "mlp", "--mesh", "a=2", "-o", out),
        ("plan", "mlp", "--mesh", "a=2", "--memory", number),
        ("plan", "mlp", "--mesh", "a=2", "--pin", f"x=P({word})"),
        ("plan", "t2b", "--layers", number, "--mesh", "a=2"),
        ("plan", "mlp", "--mesh", "a=2", "--start", strange),
        ("analyze", strange, "--arg", f"f32[{number}]"),
        ("analyze", "bad_module:f", "--arg", draw.choice(("f32[2]", "f64[2]", word))),
        ("analyze", "mlp", "--rules", strange), ("explain", "mlp", f"{word}:0", "x:0"),
        ("explain", "mlp", "--conflict", number), ("hardware", "show", strange),
        ("diff", strange, "fifo"),
        ("query", "mlp", word), ("compare", "mlp", "--mesh", "a=2", "--methods", word), (word,),
        ("report", "mlp", "--mesh", "a=2", "-o", out), ("verify", strange, "--mesh", "a=2"),
    ))  # fmt: skip


def of_streams(draw: Draw, _folder: pathlib.Path, _seeds: Seeds) -> tuple[str, ...]:
    """A valid command with unusual streams."""
    return draw.choice((
        ("models",), ("query", "mlp", "color(D,C)"),
        ("plan", "mlp", "--mesh", "a=2", "--json", "-"),
        ("query", "mlp", "argument(V,P)", "--csv", "-"), ("hardware", "list"), ("--help",),
    ))  # fmt: skip


GRAMMARS: dict[str, tuple[int, Callable[[Draw, pathlib.Path, Seeds], tuple[str, ...]]]] = {
    "StableHLO": (30, of_stablehlo), "rules": (14, of_rules), "queries": (12, of_queries),
    "fact bases": (8, of_facts), "plans": (12, of_plans), "hardware": (8, of_hardware),
    "cache": (4, of_cache), "command lines": (8, of_words), "streams": (4, of_streams),
}  # fmt: skip

_STREAMS = (
    "> /dev/full",
    ">&-",
    "2>&-",
    "<&- >&-",
    "| head -c 10",
    "> /dev/full 2>&1",
    "2> /dev/full",
)
_LOCALES = ("C", "POSIX", "C.UTF-8", "en_US.ISO8859-1")


def cases(count: int, seed: int, seeds: Seeds, top: pathlib.Path) -> list[Case]:
    """``count`` cases, each with a folder ``top/NUMBER``; the seed determines all of them."""
    names = [name for name, (weight, _) in GRAMMARS.items() for _ in range(weight)]
    drawn = []
    for number in range(count):
        draw = random.Random(f"{seed}:{number}")
        grammar = draw.choice(names)
        folder = top / str(number)
        folder.mkdir()
        for name in ("fifo", "fifo.mlir", "fifo.lp"):
            os.mkfifo(folder / name)
        (folder / "link").symlink_to("/dev/null")
        if grammar == "cache":
            shutil.copytree(top / "cache", folder / "cache")
        arguments = GRAMMARS[grammar][1](draw, folder, seeds)
        streams = draw.choice(_STREAMS) if grammar == "streams" else ""
        environment = [("LC_ALL", draw.choice(_LOCALES))] if draw.random() < 0.1 else []
        if grammar == "streams" and draw.random() < 0.3:
            environment.append(("JAX_ENABLE_X64", "bogus"))
        if grammar == "cache":
            environment.append(("XDG_CACHE_HOME", str(folder / "cache")))
        drawn.append(Case(grammar, number, arguments, streams, tuple(environment)))
    return drawn


def run(case: Case, top: pathlib.Path) -> Outcome:
    """Run a case in its folder, like a shell."""
    folder = top / str(case.seed)
    command = [sys.executable, "-P", "-m", "toast", *(a.replace("\0", "") for a in case.arguments)]
    environment = {
        **os.environ, "XDG_CACHE_HOME": str(top / "cache"), "JAX_PLATFORMS": "cpu",
        "COLUMNS": "160",
        **dict(case.environment),
    }  # fmt: skip
    environment.pop("PYTHONUTF8", None)
    if case.streams:
        command = ["sh", "-c", f'exec "$@" {case.streams}', "sh", *command]
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return Outcome(case, "hang", LIMIT_SECONDS, "")
    seconds = time.perf_counter() - begin
    said = (output + errors).decode(errors="replace")
    return Outcome(case, _kind(process.returncode, said, case), seconds, said[-600:])


_ESCAPE = re.compile("[\x1b\x9b\u202e]")


def _kind(status: int, said: str, case: Case) -> str:
    if "Traceback (most recent call last)" in said or "Exception ignored" in said:
        return "traceback"
    if "internal error" in said:
        return "internal error"
    if status < 0 or status >= 128:
        return "signal"
    if _ESCAPE.search(said):
        return "escape"
    if "root:x:0:0" in said:
        return "foreign file"
    if status not in _GOOD and not (case.streams and status in (120, 141)):
        return f"exit code {status}"
    return "result" if status != 2 else "one line"


def prepare(top: pathlib.Path) -> Seeds:
    """Write the files that cases modify: a plan, a hardware file, and a used cache."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(top / "cache"), "JAX_PLATFORMS": "cpu"}
    for words in (
        ("plan", "mlp", "--mesh", "data=2,model=2", "--json", "plan.json"),
        ("query", "mlp", "color(D,C)"),
    ):
        subprocess.run(
            [sys.executable, "-P", "-m", "toast", *words], cwd=top, env=environment, check=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    hardware = pathlib.Path(__file__).parents[1] / "hardware" / "tpu-v5e.toml"
    return Seeds((top / "plan.json").read_text(), hardware.read_text())


def campaign(count: int, seed: int, processes: int, limit: float | None = None) -> list[Outcome]:
    """Run ``count`` cases, ``processes`` at a time; no case starts after ``limit`` seconds."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="toast-hostile-") as name:
        top = pathlib.Path(name)
        drawn = cases(count, seed, prepare(top), top)

        def one(case: Case) -> Outcome | None:
            if limit is not None and time.perf_counter() - begin > limit:
                return None
            return run(case, top)

        outcomes = []
        with concurrent.futures.ThreadPoolExecutor(processes) as pool, elapsed() as show:
            for number, outcome in enumerate(pool.map(one, drawn), 1):
                if outcome is not None:
                    outcomes.append(outcome)
                if number % 50 == 0:
                    show(f"{number} of {count} cases")
        return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit", type=float, help="No case starts after this time in seconds.")
    options = parser.parse_args(arguments)
    begin = time.perf_counter()
    outcomes = campaign(options.count, options.seed, options.processes, options.limit)
    kinds = sorted(
        {outcome.kind for outcome in outcomes}, key=lambda k: (k not in ("result", "one line"), k)
    )
    print(f"{'':16}" + "".join(f"{kind:>16}" for kind in ("cases", *kinds)))
    for grammar in (*GRAMMARS, "all"):
        chosen = [o for o in outcomes if grammar in (o.case.grammar, "all")]
        counts = collections.Counter(outcome.kind for outcome in chosen)
        print(
            f"{grammar:16}" + "".join(f"{n:16}" for n in (len(chosen), *(counts[k] for k in kinds)))
        )
    slowest = max((outcome.seconds for outcome in outcomes), default=0.0)
    print(f"{time.perf_counter() - begin:.0f} s, slowest case {slowest:.1f} s, seed {options.seed}")
    bad = [outcome for outcome in outcomes if outcome.kind not in ("result", "one line")]
    for outcome in bad:
        words = " ".join(outcome.case.arguments)[:200]
        print(
            f"\n{outcome.kind}: case {outcome.case.seed} ({outcome.case.grammar}) "
            f"{outcome.case.streams}"
        )
        print(f"  toast {words!a}\n  {outcome.said[-400:]!a}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
