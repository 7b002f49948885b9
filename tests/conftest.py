"""What holds for every test."""

from hypothesis import HealthCheck, settings

# Both judge the machine, not the code: beside ten busy programs any example can take a second to draw or to run.
settings.register_profile("any-load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-load")
