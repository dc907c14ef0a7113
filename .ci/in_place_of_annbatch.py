"""Plugin of pytest that puts this project's DistributedSampler in the place of annbatch's, for annbatch's own tests."""

from __future__ import annotations

import annbatch.samplers

import annbatch_distributed

annbatch.samplers.DistributedSampler = annbatch_distributed.DistributedSampler  # type: ignore[misc,assignment]  # the point
