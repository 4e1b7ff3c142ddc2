"""What a command raises when it cannot go on."""

__all__ = ["CommandError"]


class CommandError(Exception):
    """Printed as one line, without a traceback: its message must say what to do."""
