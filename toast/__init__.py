"""TOAST: the automatic partitioner for JAX.

>>> import toast
>>> print(*sorted(name for name in toast.__all__ if name.islower()))
accumulate analyze apply_plan checkpoint diff fit jit plan replicate shard split why_not
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toast import lazy, ports, records

if TYPE_CHECKING:
    from toast.analysis import Analysis
    from toast.api import analyze, apply_plan, plan
    from toast.errors import ToastError
    from toast.fitting import Fit, fit
    from toast.frontend.checkpoints import checkpoint
    from toast.frontend.microbatches import accumulate
    from toast.frontend.mlir.annotations import replicate, shard, split
    from toast.hardware import Hardware, Mesh
    from toast.other_policies import why_not
    from toast.plan import Applied, Plan
    from toast.plan.diff import Difference, diff
    from toast.planned_function import PlannedFunction, jit
    from toast.program import MemoryPolicy
    from toast.search import Settings
    from toast.space import Constraints

__version__ = "0.1.0"

__all__ = [
    "Analysis",
    "Applied",
    "Constraints",
    "Difference",
    "Fit",
    "Hardware",
    "MemoryPolicy",
    "Mesh",
    "Plan",
    "PlannedFunction",
    "Settings",
    "ToastError",
    "accumulate",
    "analyze",
    "apply_plan",
    "checkpoint",
    "diff",
    "fit",
    "jit",
    "plan",
    "replicate",
    "shard",
    "split",
    "why_not",
]

lazy.package(
    __name__,
    {
        "analysis": ("Analysis",),
        "plan": (
            "Applied",
            "Difference",
            "Plan",
            "diff",
        ),
        "space": ("Constraints",),
        "hardware": (
            "Hardware",
            "Mesh",
        ),
        "program": ("MemoryPolicy",),
        "search": ("Settings",),
        "errors": ("ToastError",),
        "frontend.checkpoints": ("checkpoint",),
        "frontend.microbatches": ("accumulate",),
        "frontend.mlir.annotations": (
            "replicate",
            "shard",
            "split",
        ),
        "api": (
            "analyze",
            "apply_plan",
            "plan",
        ),
        "other_policies": ("why_not",),
        "fitting": (
            "Fit",
            "fit",
        ),
        "planned_function": (
            "PlannedFunction",
            "jit",
        ),
    },
)

# The methods of records that later stages implement.
records.provide({
    "Record._repr_html_": "toast.report.notebook:record_html",
    "Analysis.vocabulary": "toast.analysis.vocabulary:AnalysisVocabulary",
    **{
        f"Analysis.{relation}": f"toast.analysis.frames:{relation}"
        for relation in ("name", "annotates", "def_use", "conflict", "box", "arguments")
    },
    "Analysis.explain": "toast.explain.chains:chain",
    "Analysis.explain_conflict": "toast.explain.collisions:collision",
    "Plan.vocabulary": "toast.plan.plan_relations:relations",
    "Plan.policy_prices": "toast.plan.written_policies:policy_prices",
    "Plan.argument_table": "toast.plan.listings:argument_table",
    "Plan.argument_frame": "toast.plan.listings:argument_frame",
    "Plan.at_peak": "toast.plan.listings:at_peak",
    "Plan.memory_data": "toast.plan.listings:memory_data",
    "Plan.to_torch": "toast.plan.torch_plan:torch_shardings",
    "Plan.trace": "toast.plan.step_trace:trace_data",
    "Plan.to_dict": "toast.plan.files:plan_data",
    "Plan.export": "toast.export:export",
    "Plan.explain_argument": "toast.explain.arguments:explain_argument",
    "Plan.explain_collectives": "toast.explain.collective_causes:explain_collectives",
    "Plan.explain_collective": "toast.explain.collective_causes:explain_collective",
    "Plan.explain_annotations": "toast.explain.annotated_values:explain_annotations",
    "Plan.why_not": "toast.explain.alternatives:why_not",
    "RunnablePlan.here": "toast.plan.reapply:here",
    "RunnablePlan.factors": "toast.explain.history:op_factors",
    "RunnablePlan.lowered": "toast.explain.history:lowered",
    "Fit.__str__": "toast.report.fit_tables:fit_as_text",
})  # fmt: skip

# The last registered frontend is asked first, so the JAX frontend is asked last.  The frontend of
# the models registers itself.
ports.register_frontend("toast.frontend.built_in:JAX_FUNCTIONS")
ports.register_frontend("toast.frontend.built_in:STABLEHLO_FILES")
ports.register_frontend("toast.frontend.built_in:JAX_STAGES")
ports.register_frontend("toast.facts.base:FACT_BASES")
ports.register_frontend("toast.frontend.built_in:TORCH_TARGETS")
ports.register_backend("jax", "toast.apply.backends:JAX")
ports.register_backend("stablehlo", "toast.apply.backends:ANNOTATED_STABLEHLO")
ports.register_backend("local", "toast.lower.backend:LOCAL")
ports.register_confirmation("toast.evaluation.confirmed:confirmed_plan")
