"""The reference form: generated forwards that compute deviations from a reference picture.

``convert_`` enters it where it gets a ``reference``. No other code knows of it.
"""

from .conversion import ReferenceConversion, check_reference

__all__ = ["ReferenceConversion", "check_reference"]
