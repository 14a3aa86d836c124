"""Reads the recording of a job (`docs/slow-ranks.md`): tables of events, clocks of hosts, and steps of ranks."""

from horovod_partial.insight.recording.clocks import Clocks, HostClock
from horovod_partial.insight.recording.reading import Bucket, RankRecording, Recording, load, runs
from horovod_partial.insight.recording.steps import JobSteps, RankSteps

__all__ = ["Bucket", "Clocks", "HostClock", "JobSteps", "RankRecording", "RankSteps", "Recording", "load", "runs"]
