"""Everything bytefloor refuses, it refuses with one of these.

The command line prints the message on one line and exits with status 2; anything else that escapes is a bug of ours
and shows its traceback. A message names the thing, what was found and what was expected.
"""


class BytefloorError(Exception):
    """Root of all errors a user can be told about."""


class FileError(BytefloorError):
    """A file is missing, cut short, inconsistent or not of the kind it claims to be."""


class UnsupportedError(BytefloorError):
    """Understood, and refused by name: an architecture, a tensor type, a RoPE scaling that is not implemented."""


class ShapeError(BytefloorError):
    """A tensor's shape or dtype is not what its consumer needs."""


class CapacityError(BytefloorError):
    """Something does not fit: memory, context length or cache pages. The message carries both numbers."""


class RequestError(BytefloorError):
    """A request cannot be served as asked: an empty prompt, a parameter out of range, a template that refuses."""


class NumericalError(BytefloorError):
    """A computation produced NaN or infinity where only finite values make sense."""


class KernelError(BytefloorError):
    """A kernel does not compile or does not launch."""
