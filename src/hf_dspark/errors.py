"""The package's exceptions. Every message names the offending value, what is allowed, and the fix."""


class DSparkError(Exception):
    """Base class of every error this package raises on purpose."""


class DSparkConfigError(DSparkError, ValueError):
    """A value in a `DSparkConfig`, or in the arguments of a call, is not allowed."""


class DSparkCheckpointError(DSparkError, ValueError):
    """A checkpoint cannot be loaded: unknown layout, missing or unexpected tensors, missing files."""


class DSparkTargetError(DSparkError, ValueError):
    """The target model is missing, or the draft model does not fit it."""


class DSparkGenerationError(DSparkError, ValueError):
    """`generate` was asked for something that a DSpark draft model cannot do without changing the text."""


class DSparkDataError(DSparkError, ValueError):
    """Training or evaluation data cannot be used."""


class DSparkDependencyError(DSparkError, ImportError):
    """An optional dependency, or a supported version of a required one, is missing."""


class DSparkMeasurementError(DSparkError, RuntimeError):
    """A measurement failed, or is too noisy to be used; nothing of it was kept."""


class DSparkHubError(DSparkError, OSError):
    """The Hub cannot be reached, or refuses what was asked of it; or a draft model lacks what publishing needs."""
