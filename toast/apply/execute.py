"""Runs a sharded program: a callable with the pytrees of the planned function."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np

from toast.apply.annotate import annotate
from toast.apply.device_meshes import Devices, mesh_platform, on_devices
from toast.apply.hosts import check_hosts
from toast.apply.module_functions import (
    aval,
    flat_function_jit,
    is_wide,
    module_function,
    quiet_donation,
    untransformed,
    word_size,
    wrapped_key,
)
from toast.apply.partition_specs import (
    calling_of,
    is_key,
    leaf_specs,
    named_sharding,
    out_shardings,
)
from toast.boundary.printable import shortened
from toast.errors import PlanError
from toast.frontend.jax_libraries import ArgumentVariable, is_weak, nodes_of, write_back
from toast.program import Program, Shardings


class _Argument(NamedTuple):
    """An argument as the compiled program takes it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: jax.sharding.NamedSharding


class PytreeJit(NamedTuple):
    """A sharded program as a function of ``jax.jit`` with the pytrees of the planned function."""

    #: Its arguments are the positional ones, the values of the keywords, and the captured arrays.
    function: Any
    #: The sharding of each leaf of the arguments that are not static, by position or name.
    shardings: Mapping[int | str, list[jax.sharding.NamedSharding]]
    #: The captured arrays.
    captured: Sequence[Any]


class Runnable:
    """A sharded program as a callable with the arguments and results of its function.

    A program from a file takes flat arguments and returns a list.
    """

    def __init__(
        self,
        program: Program,
        shardings: Shardings,
        *,
        devices: Devices | None = None,
        module_of: Callable[[Program, Shardings], Any] = annotate,
    ) -> None:
        """``module_of`` writes the module, from the shardings in the names of the devices' axes."""
        self.mesh, self.shardings = on_devices(shardings, devices)
        check_hosts(program, self.mesh, self.shardings)
        self._calling = calling_of(program)
        self._program = program
        shardings = self.shardings
        self._function = module_function(program, module_of(program, shardings), self.mesh)
        self._jit = flat_function_jit(program, self._function, self.mesh, shardings)
        # A step of a large model has thousands of arguments: what does not change is computed here.
        self._is_wide = is_wide(program)
        self._arguments = [
            _Argument(
                a.shape, np.dtype(a.dtype), named_sharding(self.mesh, shardings.of(program, value))
            )
            for value in program.argument_values
            for a in [aval(program.values[value].type)]
        ]
        avals = () if self._calling is None else self._calling.out_avals
        self._keys = [number for number, leaf in enumerate(avals) if is_key(leaf)]
        self._captured = [] if self._calling is None else list(self._calling.captured)
        self._captured_placed = False
        # Whether it updates or returns nnx variables of its arguments.
        self._has_variables = self._calling is not None and (
            bool(self._calling.updates)
            or any(isinstance(leaf, ArgumentVariable) for leaf in self._calling.out_static.values())
        )

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Places the arguments, runs the program, and returns results with planned shardings.

        Raises :class:`toast.errors.PlanError` for arguments of other types or another structure.
        """
        results = self.run_flat(self._flatten(arguments, keywords))
        if self._calling is None:
            return results
        for number in self._keys:
            results[number] = wrapped_key(results[number], self._calling.out_avals[number])
        if not self._has_variables:
            return self._calling.returned(results, lambda leaf: leaf)
        nodes, _ = nodes_of((arguments, keywords))
        write_back(nodes, self._calling.updated(results))
        return self._calling.returned(
            results, lambda leaf: nodes[leaf.node] if isinstance(leaf, ArgumentVariable) else leaf
        )

    def run_flat(self, arguments: Sequence[Any]) -> list[Any]:
        """Runs the program on flat arguments; returns flat results."""
        self._refuse_shared(arguments)
        words = jax.enable_x64(True) if self._is_wide else contextlib.nullcontext()
        with words, quiet_donation():
            placed = self._placed(untransformed(self._program, arguments))
            with self.naming_platforms():
                return list(self._jit(*placed))

    @contextlib.contextmanager
    def naming_platforms(self) -> Iterator[None]:
        """An error of XLA names the platforms if the program was lowered for another one."""
        try:
            yield
        except Exception as error:
            planned, here = self._program.platform, mesh_platform(self.mesh)
            if planned in ("", here):
                raise
            raise PlanError(
                f"{self._program.name} was lowered for {planned}, and {here} cannot run it: "
                f"{shortened(str(error), 200)}; run it there, or plan a form for platform={here!r}"
            ) from error

    def _refuse_shared(self, arguments: Sequence[Any]) -> None:
        """Refuses a donated array that is also another argument: its buffer is overwritten."""
        if len(set(map(id, arguments))) == len(arguments):
            return
        first: dict[int, int] = {}
        for index, leaf in enumerate(arguments):
            other = first.setdefault(id(leaf), index)
            if other != index and isinstance(leaf, jax.Array):
                for donated, second in ((other, index), (index, other)):
                    if donated in self._program.donated:
                        names = self._program.arguments
                        raise PlanError(
                            f"{self._program.name}: argument {names[donated]} is donated, and the "
                            f"same array is argument {names[second]}; pass a copy of it"
                        )

    def _placed(self, arguments: Sequence[Any]) -> list[Any]:
        """The arguments on the mesh with their planned shardings.

        Arrays that are there already, such as the results of the last step, stay as they are.
        """
        placed, elsewhere = list(arguments), []
        for index, (leaf, planned) in enumerate(zip(arguments, self._arguments, strict=True)):
            there = (
                isinstance(leaf, jax.Array)
                and not isinstance(leaf, jax.core.Tracer)
                and leaf.dtype == planned.dtype
                and leaf.shape == planned.shape
                and leaf.sharding == planned.sharding
            )
            if not there:
                elsewhere.append(index)
        moved = self._moved([placed[index] for index in elsewhere], elsewhere)
        for index, leaf in zip(elsewhere, moved, strict=True):
            placed[index] = leaf
        return placed

    def _moved(self, leaves: Sequence[Any], indices: Sequence[int]) -> list[Any]:
        """Arguments with these indices, of the planned types and on the mesh."""
        checked = [self._checked(index, leaf) for index, leaf in zip(indices, leaves, strict=True)]
        moved = jax.device_put(checked, [self._arguments[index].sharding for index in indices])
        return list(moved)

    def _checked(self, index: int, leaf: Any) -> Any:
        """Argument ``index``, of the planned type; the words of random keys."""
        planned = self._arguments[index]
        leaf = jax.random.key_data(leaf) if is_key(leaf) else leaf
        shape, dtype = np.shape(leaf), jax.dtypes.canonicalize_dtype(jax.dtypes.result_type(leaf))
        if shape != planned.shape or dtype != planned.dtype:
            value = self._program.argument_values[index]
            raise PlanError(
                f"{self._program.name}: argument {self._program.arguments[index]} was planned as "
                f"{self._program.values[value].type}, got {dtype.name}{list(shape)}; pass the "
                "planned type or make a new plan"
            )
        return leaf

    def _flatten(
        self, arguments: tuple[Any, ...], keywords: dict[str, Any], captured: Any = None
    ) -> list[Any]:
        """The arguments of the program; ``captured`` replaces the captured arrays."""
        if self._calling is None:
            expected = len(self._program.arguments)
            if keywords or len(arguments) != expected:
                raise PlanError(
                    f"{self._program.name} takes {expected} flat arguments, got "
                    f"{len(arguments)}; pass them in the order of the file"
                )
            return list(arguments)
        left_out = []
        for name, planned in self._calling.static.items():
            if isinstance(name, str) and name in keywords:
                self._check_static(name, planned, keywords.pop(name))
            elif isinstance(name, str):
                left_out.append(name)
        flat: list[Any]
        flat, tree = jax.tree.flatten((arguments, keywords))
        if tree != self._calling.in_tree:
            by_name = f"{', '.join(left_out)} by name, and the others in " if left_out else ""
            raise PlanError(
                f"{self._program.name} was planned for arguments of another pytree structure; "
                f"pass {by_name}the structure that was planned"
            )
        for number, planned in self._calling.static.items():
            if isinstance(number, int):
                self._check_static(f"leaf {number} of its arguments", planned, flat[number])
        for leaf, first in self._calling.repeated.items():
            if flat[leaf] is not flat[first]:
                raise PlanError(
                    f"{self._program.name}: leaves {first} and {leaf} of its arguments were "
                    "planned as one shared variable; pass modules that share it"
                )
        flat += self._captured_arrays() if captured is None else captured
        return [flat[leaf] for leaf in self._calling.arguments]

    def _captured_arrays(self) -> list[Any]:
        """The captured arrays with their planned shardings; the first call places them."""
        if self._captured and not self._captured_placed:
            last = range(len(self._arguments))[-len(self._captured) :]
            with jax.ensure_compile_time_eval():
                self._captured = self._moved(self._captured, last)
            self._captured_placed = True
        return self._captured

    def pytree_jit(
        self,
        count: int,
        names: Sequence[str] = (),
        *,
        static: Set[int | str] = frozenset(),
        donated: Set[int | str] = frozenset(),
        exact: bool = False,
    ) -> PytreeJit | None:
        """``jax.jit`` of the program with the pytrees of its function, which dispatches the calls.

        A call costs as much as one of ``jax.jit``: nothing is checked or placed in Python.  Keyword
        arguments follow the positional ones.

        :param count: the number of positional arguments.
        :param names: the names of keyword arguments, in the order in which they are passed.
        :param static: the positions and names of static arguments.
        :param donated: the positions and names of donated arguments.
        :param exact: refuse arguments of a weak type if the planned one is not, and the reverse:
            the function may have other results for them.
        :returns: ``None`` for a program from a file, and for one with 64-bit arrays unless JAX's
            setting allows these.
        """
        planned = self._calling
        if planned is None or (self._is_wide and not jax.config.jax_enable_x64):
            return None

        captured = self._captured_arrays()
        end = count + len(names)
        weak = [n for n, o in enumerate(planned.out_avals) if getattr(o, "weak_type", False)]
        weak_leaves = [
            planned.in_avals[leaf].weak_type
            for leaf in planned.arguments if leaf < len(planned.in_avals)
        ]  # fmt: skip

        def run(*values: Any) -> Any:
            by_name = dict(zip(names, values[count:end], strict=True))
            flat = self._flatten(values[:count], by_name, [*values[end:]])
            if exact and [*map(is_weak, flat[: len(weak_leaves)])] != weak_leaves:
                raise PlanError(f"{self._program.name}: a number and an array have other types")
            checked = [
                # A number of Python has a weak type, which the program does not have.
                jax.lax.convert_element_type(self._checked(index, leaf), argument.dtype)
                for index, (leaf, argument) in enumerate(zip(flat, self._arguments, strict=True))
            ]
            results = self._function(*untransformed(self._program, checked))
            for number in self._keys:
                results[number] = wrapped_key(results[number], planned.out_avals[number])
            for number in weak:  # else the next call, with these results, is compiled anew
                results[number] = jax.lax.convert_element_type_p.bind(
                    results[number], new_dtype=results[number].dtype, weak_type=True, sharding=None
                )
            return planned.returned(results, lambda leaf: leaf)

        run.__name__ = re.sub(r"\W", "_", self._program.name)
        places = {name: count + number for number, name in enumerate(names)}
        static_places, donated_places = (
            sorted(key if isinstance(key, int) else places[key] for key in keys)
            for keys in (static, donated)
        )
        specs = [self.shardings.of(self._program, v) for v in self._program.argument_values]
        leaves = [
            jax.sharding.NamedSharding(self.mesh, spec) for spec in leaf_specs(planned, specs)
        ]
        positional, keywords = jax.tree.unflatten(planned.in_tree, leaves)
        every: dict[int | str, Any] = {**dict(enumerate(positional)), **keywords}
        traced = {key: every[key] for key in (*range(count), *names) if key not in static}
        return PytreeJit(
            jax.jit(
                run,
                in_shardings=(
                    *traced.values(),
                    *(array.sharding for array in captured),
                ),
                out_shardings=jax.tree.map(
                    lambda spec: jax.sharding.NamedSharding(self.mesh, spec),
                    out_shardings(self._program, self.shardings),
                    is_leaf=lambda leaf: isinstance(leaf, jax.sharding.PartitionSpec),
                ),
                static_argnums=tuple(static_places),
                donate_argnums=tuple(donated_places),
            ),
            {key: jax.tree.leaves(own) for key, own in traced.items()},
            captured,
        )

    def _check_static(self, name: str, planned: Any, value: Any) -> None:
        """Refuses another value of a static argument: it is a constant of the program."""
        if value is not planned and not bool(value == planned):
            raise PlanError(
                f"{self._program.name} was planned with the static {name} = "
                f"{shortened(repr(planned))}, got {shortened(repr(value))}; make a new plan for it"
            )

    def lower(self) -> Any:
        """JAX's lowering of the sharded program (``jax.jit(...).lower``)."""
        types = [self._program.values[v].type for v in self._program.argument_values]
        with word_size(self._program):
            return self._jit.lower(*map(aval, types))

    def compiled_text(self) -> str:
        """XLA's optimised program for one device, with its collectives."""
        with quiet_donation():
            return str(self.lower().compile().as_text())


def callable_of(
    program: Program, shardings: Shardings, *, devices: Devices | None = None
) -> Callable[..., Any]:
    """The sharded program as a callable (:class:`Runnable`).

    ``devices`` and errors are those of :func:`jax_mesh`; further errors those of :func:`annotate`.
    """
    return Runnable(program, shardings, devices=devices)
