"""XLA's TPU compiler as the reference for a plan; no TPU is needed."""

from toast.evaluation.oracle.hlo import Communication, communication_in
from toast.evaluation.oracle.schedule import Schedule
from toast.evaluation.oracle.tpu import Verdict, check, judge

__all__ = ["Communication", "Schedule", "Verdict", "check", "communication_in", "judge"]
