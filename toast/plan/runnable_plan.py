"""Plans as XLA runs them: shardings for JAX, sharded functions, and local programs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from toast import apply, ports
from toast.analysis import Analysis, Lowering, lowering_of
from toast.errors import PlanError
from toast.program import Shardings
from toast.records import Record, late

if TYPE_CHECKING:
    from toast.apply import JitShardings, Runnable, Verification
    from toast.lower import LocalProgram, OpFactors


class RunnablePlan(Record):
    """The ways to run a plan, which need its program and its shardings alone."""

    #: The analysis of the program.
    analysis: Analysis
    #: The sharding of every value, argument and result, and the reshards.
    shardings: Shardings

    @property
    def lowering(self) -> Lowering:
        """What partitions the program: XLA (``"xla"``), or TOAST (``"local"``, :meth:`lowered`)."""
        return self.analysis.lowering

    @functools.cached_property
    @late
    def factors(self) -> OpFactors:
        """The factors of ops that hold the axes of the mesh, and the steps that chose them."""
        raise NotImplementedError

    @property
    def in_shardings(self) -> Any:
        """PartitionSpecs in the structure of the arguments.

        With keyword arguments, this is the pair of positional and keyword shardings.  ``jax.jit``
        accepts PartitionSpecs only under ``jax.set_mesh``; without it, use :meth:`shardings_for`.
        """
        return apply.in_shardings(self.analysis.program, self.shardings)

    @property
    def out_shardings(self) -> Any:
        """PartitionSpecs in the structure of the result; see :attr:`in_shardings`."""
        return apply.out_shardings(self.analysis.program, self.shardings)

    def shardings_for(self, mesh: Any = None) -> JitShardings:
        """``in_shardings`` and ``out_shardings`` for ``jax.jit``, on real devices.

        ``mesh`` is as for :meth:`jit`.  Both are pytrees of ``jax.sharding.NamedSharding`` in the
        structures of :attr:`in_shardings` and :attr:`out_shardings`.  With these, XLA chooses the
        shardings of intermediate values; :meth:`jit` also fixes those.  Raises
        :class:`toast.errors.PlanError` if there are too few devices, or the axes of the mesh have
        other sizes than those of the plan.
        """
        apply.check_mesh(self.analysis.program, self.shardings, mesh)
        shardings: JitShardings = apply.jit_shardings(
            self.analysis.program, self.shardings, devices=mesh
        )
        return shardings

    def init(
        self,
        function: Callable[..., Any],
        mesh: Any = None,
        *arguments: Any,
        argument: int | str | None = None,
    ) -> Any:
        """Compute ``function(*arguments)``, such as the first parameters, sharded from birth.

        The result has the shardings of the argument that it is, or of successive arguments if it is
        a tuple of them: ``params, moments = plan.init(init, mesh, key)``.  No device holds more
        than its part.  Random values do not depend on the shardings
        (``jax_threefry_partitionable``).

        ``mesh`` is as for :meth:`jit`; ``argument`` is the position or the name of the argument; by
        default, it is the first one with the result's pytree, shapes and dtypes.  Raises
        :class:`toast.errors.PlanError` if there is none, or if there are too few devices.
        """
        return apply.initial(
            self.analysis.program, self.shardings, function, arguments, devices=mesh,
            argument=argument,
        )  # fmt: skip

    def types_for(self, mesh: Any = None) -> Any:
        """The types of the arguments with their shardings: what a checkpoint is restored to.

        The result has the structure of :attr:`in_shardings`, with a ``jax.ShapeDtypeStruct`` for
        each array: ``checkpointer.restore(path, plan.types_for(mesh)[0])`` with orbax.  ``mesh`` is
        as for :meth:`jit`.  Raises :class:`toast.errors.PlanError` as :meth:`shardings_for`.
        """
        return apply.argument_types(self.analysis.program, self.shardings, mesh)

    def place(self, state: Any, mesh: Any = None, *, argument: int | str | None = None) -> Any:
        """A state, such as a restored checkpoint, on the devices as the plan takes it.

        It is an argument, or a tuple of successive ones; ``argument`` is the position or the name
        of one, by default that with the same pytree.  ``mesh`` is as for :meth:`jit`.  Raises
        :class:`toast.errors.PlanError` for a state that does not fit: the message names the
        argument, the dimension and the sizes.
        """
        return apply.placed_state(
            self.analysis.program, self.shardings, state, devices=mesh, argument=argument
        )

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the program and its shardings: equal on hosts that run the same plan."""
        return apply.plan_digest(self.analysis.program, self.shardings)

    def jit(self, mesh: Any = None, *, lowering: Lowering | None = None) -> Runnable:
        """The sharded program as a function that XLA compiles and runs.

        With ``lowering="xla"``, XLA's partitioner inserts the collectives for the plan's
        annotations.  With ``"local"``, the program is :meth:`lowered`: its collectives are those
        that the plan predicts.  The default is that for which the plan was made.

        ``mesh`` is a ``jax.sharding.Mesh`` of the same sizes (axes of size 1 do not count), or a
        list of devices (default: the first of ``jax.devices()``).  Results are on that mesh, with
        its devices, axis names and axis types.  The result takes and returns the
        pytrees of the planned function; for a program from a file, it takes flat arguments and
        returns a list.  Raises :class:`toast.errors.PlanError` if there are too few devices.
        """
        plan = self._on(mesh)
        if self._lowering(lowering) == "local":
            options = {"analysis": plan.analysis, "factors": plan.factors}
            local: Runnable = plan.build("local", devices=mesh, **options)
            return local
        runnable: Runnable = plan.build("jax", devices=mesh)
        return runnable

    @late
    def lowered(self) -> LocalProgram:
        """The program of one device: StableHLO on local shapes, with every collective as an op.

        Its ``text`` is the module, its ``collectives`` are those of a step.  Raises
        :class:`toast.errors.PlanError` if the program is a fact base, or cannot be lowered.
        """
        raise NotImplementedError

    def _on(self, devices: Any) -> Self:
        """The plan for the form of the program that JAX lowers for the platform of devices."""
        program = self.analysis.program
        if program.platform and program.platform != apply.platform_of(devices):
            return self.here()
        return self

    @late
    def here(self) -> Self:
        """The plan, applied to the form of the program that JAX lowers for this machine.

        This is the plan itself unless the program is lowered for the hardware, and has other ops
        there.  Prices are those of the other form on the same hardware.  Raises
        :class:`toast.errors.PlanError` if nothing of the plan matches.
        """
        raise NotImplementedError

    def build(self, backend: str, **options: Any) -> Any:
        """Build the plan with a registered backend.

        ``"jax"`` is :meth:`jit`, ``"stablehlo"`` is :meth:`annotated`; ``options`` are those of the
        backend.  Raises :class:`toast.errors.PlanError` for an unknown backend.  :mod:`toast.ports`
        describes how to register one.
        """
        return ports.backend(backend).build(self.analysis.program, self.shardings, **options)

    def annotated(self) -> str:
        """The program as StableHLO text, with the plan as Shardy annotations.

        Raises :class:`toast.errors.PlanError` if XLA must not partition the plan
        (:attr:`lowering`).
        """
        self._lowering("xla")
        return str(self.build("stablehlo"))

    def _lowering(self, lowering: Lowering | None) -> Lowering:
        """What shall partition the program, by default that of the plan."""
        chosen = lowering_of(self.lowering if lowering is None else lowering)
        if chosen == "xla" and self.lowering == "local":
            raise PlanError(
                "the plan is for device-local programs, and XLA may compute wrong results with its "
                'shardings; use lowering="local", or make a plan without it'
            )
        return chosen

    def verify(self, *, seed: int = 0, lowering: Lowering | None = None) -> Verification:
        """Run the program sharded and unsharded on random inputs and compare the outputs.

        ``seed`` is that of the inputs, ``lowering`` as for :meth:`jit`.  Nothing is compared where
        both programs compute NaN or infinity: ``inconclusive`` and ``not_finite`` of the result say
        where that is, and ``equal`` is false if it is everywhere.  Raises
        :class:`toast.errors.PlanError` if there are too few devices.
        """
        plan = self._on(None)
        program, shardings = plan.analysis.program, plan.shardings
        if self._lowering(lowering) == "xla":
            return apply.verify(program, shardings, seed=seed)
        local = plan.lowered()
        return apply.verify(program, shardings, seed=seed, module_of=lambda *_: local.module)
