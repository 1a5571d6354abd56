"""References for a plan: XLA's TPU compiler (no TPU is needed), and this machine's devices."""

from toast.evaluation.oracle.gpu import check_devices, judge_here
from toast.evaluation.oracle.hlo import Communication, communication_in
from toast.evaluation.oracle.schedule import Schedule
from toast.evaluation.oracle.tpu import Verdict, check, judge

__all__ = [
    "Communication",
    "Schedule",
    "Verdict",
    "check",
    "check_devices",
    "communication_in",
    "judge",
    "judge_here",
]
