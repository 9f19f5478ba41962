"""Settings for all tests: one thread each, so that two test processes share two cores fairly."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("assay", deadline=None, derandomize=True)  # timing never decides a test
settings.load_profile("assay")
