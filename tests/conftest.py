"""How Hypothesis runs here."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

# no deadline: tests never judge times, and a class sampler's tables take pandas a while
settings.register_profile("default", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
# where what is covered is measured, which takes as long again
settings.register_profile("brief", settings.get_profile("default"), max_examples=15)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=1000)
# where the code is changed again and again: the same examples each time, and one that fails is enough
settings.register_profile(
    "mutation",
    settings.get_profile("default"),
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
