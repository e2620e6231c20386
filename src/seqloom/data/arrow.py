"""The one door to pyarrow, which is an extra."""

from __future__ import annotations

from types import ModuleType

from seqloom.errors import SeqloomError


def pyarrow_for(what: str) -> ModuleType:
    """Return pyarrow with its file formats, or say how to get it.

    Args:
        what: what needs it, the beginning of the message.
    """
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise SeqloomError(
            f"{what} needs the package 'pyarrow' ({error}); install the extra 'data': pip install 'seqloom[data]'"
        ) from None
    return pyarrow
