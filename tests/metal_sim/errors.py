"""What a kernel can do wrong, by stage."""


class SimError(Exception):
    """A kernel that the simulated GPU refuses or stops."""


class SourceError(SimError):
    """Text that this translation does not know, or that the lint refuses."""


class CompileError(SimError):
    """Text that does not compile without warnings."""


class LaunchError(SimError):
    """A launch that stopped: lanes diverged, memory that no argument has, a division by zero, too long a time."""
