"""Training: Algorithm 1 of the paper as a visible loop, on one CPU, one GPU or many."""

from assay.train.config import OwnLoss, RunConfig, read_config
from assay.train.restored import train
from assay.train.run import Progress, TrainResult

__all__ = ["OwnLoss", "Progress", "RunConfig", "TrainResult", "read_config", "train"]
