"""Training: Algorithm 1 of the paper as a visible loop, on one CPU, one GPU or many."""

from assay.train.config import RunConfig, read_config
from assay.train.loop import Progress, TrainResult, train

__all__ = ["Progress", "RunConfig", "TrainResult", "read_config", "train"]
