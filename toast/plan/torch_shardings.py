"""A plan in PyTorch's words: DTensor placements, and a plan for ``parallelize_module``.

Only the methods that return objects of PyTorch import it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from toast.errors import PlanError
from toast.hardware import Mesh
from toast.paths import folded
from toast.program import Spec

#: What a placement does with a tensor: ``Replicate()``, or shards a dimension, in so many parts at
#: once if axes that come later in the mesh are more major.
_Placement = tuple[int, int] | None

#: The dimension of a module's input, and that of its output, which an axis shards; None if it does
#: not, or only as the style of the weight says.
Layout = tuple[int | None, int | None]

_WHOLE: Layout = (None, None)


@dataclasses.dataclass(frozen=True)
class TorchShardings:
    """The shardings of parameters, buffers and inputs for a PyTorch ``DeviceMesh``.

    Names are those of the module, and the parameters of its forward pass or loss.  ``axes`` are
    those of the plan's mesh, in the order in which dimensions with several are sharded, major to
    minor; :meth:`device_mesh` has this order.
    """

    #: The mesh of the plan.
    mesh: Mesh
    #: The axes of the mesh in the order of the device mesh.
    axes: tuple[str, ...]
    #: The mesh axes of each dimension, by the name of the tensor.
    specs: Mapping[str, Spec] = dataclasses.field(repr=False)
    #: The type of the module of each parameter and buffer; empty for a function of JAX.
    owners: Mapping[str, str] = dataclasses.field(repr=False)
    #: The name that each further name of a tied parameter stands for.
    tied: Mapping[str, str] = dataclasses.field(repr=False)
    #: The sharding of each state of the optimizer that is not that of its parameter, by path.
    state_specs: Mapping[str, Spec] = dataclasses.field(repr=False)
    #: Axes, each with two modules between which activations stay sharded on it.
    pairs: frozenset[tuple[str, str, str]] = dataclasses.field(repr=False)
    #: Axes, each with a module whose weight is gathered on it before use.
    gathered: frozenset[tuple[str, str]] = dataclasses.field(repr=False)
    #: The layouts by axis and module, where an axis shards more than linear layers and tables: the
    #: sequence between them, or heads that are normalized.
    layouts: Mapping[tuple[str, str], Layout] = dataclasses.field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        lines = [f"{name}: [{', '.join(of)}]" for name, of in self.folded_text.items()]
        sizes = dict(self.mesh.axes)
        axes = ", ".join(f"{axis}={sizes[axis]}" for axis in self.axes)
        return "\n".join([f"DTensor placements on {axes}", *lines, *self.notes])

    # -- placements --------------------------------------------------------------------------

    @property
    def text(self) -> dict[str, tuple[str, ...]]:
        """The placement on each axis as text, by name: ``("Shard(0)", "Replicate()")``.

        Needs no PyTorch.
        """
        placed = _placements(self.specs, self.mesh, self.axes)
        return {name: tuple(map(_placement_text, of)) for name, of in placed.items()}

    @property
    def folded_text(self) -> dict[str, tuple[str, ...]]:
        """:attr:`text` with ``*`` for list positions, where all of these are alike."""
        return _folded(self.text)

    @property
    def placements(self) -> dict[str, tuple[Any, ...]]:
        """The DTensor placements by name, one for each of :attr:`axes`.

        Raises :class:`toast.errors.TargetError` if PyTorch is not installed.
        """
        return self._placements_on(self.axes)

    def _placements_on(self, axes: Sequence[str]) -> dict[str, tuple[Any, ...]]:
        tensor = _torch("torch.distributed.tensor")

        def placed(placement: _Placement) -> Any:
            if placement is None:
                return tensor.Replicate()
            dimension, factor = placement
            if factor == 1:
                return tensor.Shard(dimension)
            strided = _torch("torch.distributed.tensor.placement_types")._StridedShard
            return strided(dimension, split_factor=factor)

        specs = _placements(self.specs, self.mesh, axes)
        return {name: tuple(map(placed, of)) for name, of in specs.items()}

    def device_mesh(self, device_type: str) -> Any:
        """The ``DeviceMesh`` of the plan, with the names :attr:`axes`; a collective call.

        Ranks are neighbours along the last axis of the plan's mesh.

        :param device_type: such as ``"cuda"`` or ``"cpu"``.
        :raises toast.errors.PlanError: if the number of processes is another one.
        """
        distributed = _torch("torch.distributed")
        if distributed.is_initialized() and distributed.get_world_size() != self.mesh.devices:
            raise PlanError(
                f"the plan is for {self.mesh.devices} devices, and there are "
                f"{distributed.get_world_size()} processes; start one for each device"
            )
        names = self.mesh.names
        ranks = _torch("torch").arange(self.mesh.devices)
        ranks = ranks.reshape([size for _, size in self.mesh.axes])
        ranks = ranks.permute([names.index(axis) for axis in self.axes])
        mesh = _torch("torch.distributed.device_mesh").DeviceMesh
        return mesh(device_type, ranks, mesh_dim_names=self.axes)

    def distribute(self, model: Any, device_mesh: Any) -> Any:
        """Make every parameter and buffer of ``model`` a DTensor, in place; returns ``model``.

        Values are those of rank 0; tied parameters stay tied, and parameters on the meta device
        stay there.  Make the optimizer afterwards.

        :param model: a module with the names and shapes of the planned one.
        :param device_mesh: a ``DeviceMesh`` with the axes of the plan by name, in any order.
        :raises toast.errors.PlanError: if the mesh or the module is another one.
        """
        placements = self._placements_on(self._axes_of(device_mesh))
        nn = _torch("torch.nn")
        place = _torch("torch.distributed.tensor").distribute_tensor
        new: dict[int, Any] = {}
        for path, module in model.named_modules():
            tensors = {**module._parameters, **module._buffers}
            tensors |= {k: v for k, v in vars(module).items() if _is_tensor(v)}
            for key, tensor in tensors.items():
                if tensor is None:
                    continue
                name = f"{path}.{key}" if path else key
                if id(tensor) not in new:
                    if name not in placements:
                        raise PlanError(
                            f"{name}: the plan has no such tensor; plan this module again"
                        )
                    source = None if tensor.is_meta else 0
                    value = place(
                        tensor.detach(), device_mesh, placements[name], src_data_rank=source
                    )
                    if isinstance(tensor, nn.Parameter):
                        value = nn.Parameter(value, tensor.requires_grad)
                    new[id(tensor)] = value
                setattr(module, key, new[id(tensor)])
        return model

    def _axes_of(self, device_mesh: Any) -> tuple[str, ...]:
        """The axes of a ``DeviceMesh``, which must be those of the plan."""
        names = tuple(device_mesh.mesh_dim_names or ())
        sizes = dict(zip(names, tuple(device_mesh.shape), strict=False))
        if sizes != dict(self.mesh.axes):
            raise PlanError(
                f"the DeviceMesh has the axes {sizes or 'without names'}, and the plan "
                f"{dict(self.mesh.axes)}; use device_mesh() of the plan"
            )
        return names

    @property
    def notes(self) -> tuple[str, ...]:
        """What DTensors cannot express of the plan, one line each."""
        states = _folded({
            path: f"{path}: the plan shards it as {_spec_text(spec)}, but an optimizer of DTensors "
            "shards its states as their parameters"
            for path, spec in self.state_specs.items()
        }, text=True)  # fmt: skip
        return tuple(states.values())

    # -- parallelize_module --------------------------------------------------------------------

    def parallelize_plan(self, axis: str) -> dict[str, Any]:
        """The plan on one axis for ``parallelize_module(model, device_mesh[axis], ...)``.

        It has a ``ColwiseParallel`` or ``RowwiseParallel`` for each ``Linear`` and ``Embedding``
        whose weight the axis shards; :meth:`parallelize_notes` has the rest.  If the axis shards
        the sequence between these, they take and return shards of it, and norms are
        ``SequenceParallel``.  Modules pass local tensors on, so that code between a column-wise and
        a row-wise module must take its number of heads from the shape
        (``unflatten(-1, (-1, size))``).

        :raises toast.errors.PlanError: if the plan has no such axis, or is not of a module.
        """
        parallel = _torch("torch.distributed.tensor.parallel")
        tensor = _torch("torch.distributed.tensor")

        def layout(dimension: int | None) -> Any:
            return tensor.Replicate() if dimension is None else tensor.Shard(dimension)

        return {
            path: getattr(parallel, style.name)(
                **{key: layout(dimension) for key, dimension in style.layouts}, **dict(style.others)
            )
            for path, style in self._styles(axis).items()
        }

    def parallelize_text(self, axis: str) -> dict[str, str]:
        """:meth:`parallelize_plan` as text, without PyTorch."""
        return {path: str(style) for path, style in self._styles(axis).items()}

    def parallelize_notes(self, axis: str) -> tuple[str, ...]:
        """What :meth:`parallelize_plan` cannot express, one line for each parameter and why."""
        every = dict.fromkeys(self.owners, "") | dict(self._unexpressed(axis))
        return tuple(filter(None, _folded(every, text=True).values()))

    def _styles(self, axis: str) -> dict[str, _Style]:
        self._check_axis(axis)
        paired = {path for on, *paths in self.pairs if on == axis for path in paths}
        every: dict[str, _Style | None] = {name.rpartition(".")[0]: None for name in self.owners}
        for on, path in self.layouts:
            if on == axis:
                every[path] = _style("", self.layouts[axis, path], paired=False)
        for path, kind, spec in self._weights():
            side = side_of(kind, spec, axis)
            if side and (axis, path) not in self.gathered:
                layout = self.layouts.get((axis, path), _WHOLE)
                every[path] = _style(side, layout, paired=path in paired)
        return {path: style for path, style in _folded(every).items() if style is not None}

    def _weights(self) -> Iterator[tuple[str, str, Spec]]:
        """The modules with a weight: path, type, and the sharding of the weight."""
        for name, kind in self.owners.items():
            path, _, key = name.rpartition(".")
            if key == "weight" and kind in ("Linear", "Embedding") and name not in self._shared:
                yield path, kind, self.specs[name]

    @property
    def _shared(self) -> set[str]:
        """Both names of tied parameters."""
        return {*self.tied, *self.tied.values()}

    def _unexpressed(self, axis: str) -> Iterator[tuple[str, str]]:
        """The parameters for which no style exists on an axis, each with the reason."""
        self._check_axis(axis)
        sides = {path: side_of(kind, spec, axis) for path, kind, spec in self._weights()}
        for name, kind in self.owners.items():
            path, _, key = name.rpartition(".")
            sharded = any(axis in axes for axes in self.specs[name])
            shards = f"{name}: the plan shards it on {axis}"
            if not sharded:
                shards = f"{name}: the plan does not shard it on {axis}"
            if path in sides and key == "bias" and (axis, path) not in self.gathered:
                if sharded != (sides[path] == "column"):
                    yield name, f"{shards}, unlike the style of its weight"
            elif sharded and (axis, path) in self.gathered:
                yield name, f"{shards}, and gathers it before use; use fully_shard or distribute()"
            elif sharded and self._is_replicated(axis, path):
                yield name, f"{shards}, and SequenceParallel replicates it"
            elif sharded and name in self._shared:
                yield name, f"{shards}, and a style would untie it; use distribute()"
            elif sharded and not (path in sides and key == "weight"):
                yield name, f"{shards}, and PyTorch has no style for {kind}; use distribute()"

    def _is_replicated(self, axis: str, path: str) -> bool:
        """Whether the style of a module is ``SequenceParallel``."""
        into, out = self.layouts.get((axis, path), _WHOLE)
        return into is not None and into == out

    def _check_axis(self, axis: str) -> None:
        if axis not in self.axes:
            raise PlanError(f"the plan has no axis {axis}; use one of {', '.join(self.axes)}")
        if not self.owners:
            raise PlanError(
                "the plan is not of a PyTorch module, whose submodules parallelize_module needs; "
                "plan a torch.nn.Module or a TrainStep"
            )


@dataclasses.dataclass(frozen=True)
class _Style:
    """A ``ParallelStyle``."""

    name: str
    #: Options that are layouts: ``Shard(dimension)``, or ``Replicate()`` for None.
    layouts: tuple[tuple[str, int | None], ...] = ()
    others: tuple[tuple[str, int | bool], ...] = ()

    def __str__(self) -> str:
        layouts = [
            f"{key}={_placement_text(None if dimension is None else (dimension, 1))}"
            for key, dimension in self.layouts
        ]
        others = [f"{key}={value}" for key, value in self.others]
        return f"{self.name}({', '.join(layouts + others)})"


def _placements(
    specs: Mapping[str, Spec], mesh: Mesh, axes: Sequence[str]
) -> dict[str, tuple[_Placement, ...]]:
    place = {axis: number for number, axis in enumerate(axes)}
    sizes = dict(mesh.axes)

    @functools.cache
    def placed(spec: Spec) -> tuple[_Placement, ...]:
        of: list[_Placement] = [None] * len(axes)
        for dimension, sharded in enumerate(spec):
            for number, axis in enumerate(sharded):
                before = [a for a in sharded[:number] if place[a] > place[axis]]
                of[place[axis]] = dimension, math.prod(sizes[a] for a in before)
        return tuple(of)

    return {name: placed(spec) for name, spec in specs.items()}


def _placement_text(placement: _Placement) -> str:
    if placement is None:
        return "Replicate()"
    dimension, factor = placement
    if factor == 1:
        return f"Shard({dimension})"
    return f"_StridedShard({dimension}, split_factor={factor})"


def _spec_text(spec: Spec) -> str:
    shown = [f"{d} on {' and '.join(axes)}" for d, axes in enumerate(spec) if axes]
    return "dimension " + ", dimension ".join(shown) if shown else "replicated"


def side_of(kind: str, spec: Spec, axis: str) -> str:
    """How an axis shards a weight ``[out, in]`` of a ``Linear``, or a table ``[rows, width]``.

    It is ``"column"`` if results are sharded, ``"row"`` if they are partial sums, or empty.
    """
    first, second = (axis in axes for axes in spec)
    if not first and not second:
        return ""
    return "column" if first == (kind == "Linear") else "row"


def _style(side: str, layout: Layout, *, paired: bool) -> _Style | None:
    """The style of a module; between paired ones, activations stay sharded.

    Without a side, the axis does not shard the weight.
    """
    into, out = layout
    if side:
        layouts = {"input_layouts": into, "output_layouts": out}
        # The default of one of them is a shard of the last dimension.
        last = "output_layouts" if side == "column" else "input_layouts"
        keys = {key for key, dimension in layouts.items() if dimension is not None}
        keys |= set() if paired else {last}
        name = "ColwiseParallel" if side == "column" else "RowwiseParallel"
        return _Style(name, tuple((key, own) for key, own in layouts.items() if key in keys))
    local = (("use_local_output", True),)
    if into is not None and into == out:
        return _Style("SequenceParallel", others=(("sequence_dim", into), *local))
    if into is not None:
        layouts = {"input_layouts": into, "desired_input_layouts": out}
        return _Style("PrepareModuleInput", tuple(layouts.items()), local)
    if out is not None:
        layouts = {"output_layouts": into, "desired_output_layouts": out}
        return _Style("PrepareModuleOutput", tuple(layouts.items()))
    return None


def _folded(entries: Mapping[str, Any], *, text: bool = False) -> dict[str, Any]:
    """Entries by path with ``*`` for list positions, if all paths of a pattern have equal ones.

    With ``text``, entries are texts with paths.
    """
    change: Callable[[Any], Any] = folded if text else lambda entry: entry
    values: dict[str, set[Any]] = {}
    for path, entry in entries.items():
        values.setdefault(folded(path), set()).add(change(entry))
    alike = {pattern for pattern, of in values.items() if len(of) == 1}
    return {
        (folded(path) if folded(path) in alike else path): (
            change(entry) if folded(path) in alike else entry
        )
        for path, entry in entries.items()
    }


def _is_tensor(value: Any) -> bool:
    return isinstance(value, _torch("torch").Tensor)


def _torch(name: str) -> Any:
    """A module of PyTorch.

    Raises :class:`toast.errors.TargetError` if it is not installed.
    """
    from toast.frontend.torch import import_torch

    import_torch()
    return importlib.import_module(name)


__all__ = ["Layout", "TorchShardings", "side_of"]
