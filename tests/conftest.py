"""Settings for the whole suite."""

import os

from hypothesis import HealthCheck, settings

# Nothing may reach for a hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("here")
