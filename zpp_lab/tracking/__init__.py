"""What is written down about a run: metrics.jsonl is the truth, console and wandb are views."""

from zpp_lab.tracking.jsonl import MetricsLog, read
from zpp_lab.tracking.sink_process import SinkHandle, start_study_sink
from zpp_lab.tracking.tracker import Tracker

__all__ = ["MetricsLog", "SinkHandle", "Tracker", "read", "start_study_sink"]
