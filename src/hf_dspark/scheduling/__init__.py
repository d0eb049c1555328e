"""How much of a block is worth verifying: the scheduler, the throughput curve, calibration. Pure: numbers, no model."""

from .calibration import SequentialTemperatureScaling
from .prefix_scheduler import PrefixScheduler, Schedule
from .throughput import ThroughputCurve

__all__ = ["PrefixScheduler", "Schedule", "SequentialTemperatureScaling", "ThroughputCurve"]
