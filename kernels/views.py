"""Arrays over addresses, inside compiled code: handing over a number costs a tenth of handing over an array."""

from typing import Any

from numba import types
from numba.extending import intrinsic


def _pointer(kind: Any) -> Any:
    @intrinsic
    def view(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(types.CPointer(kind)))

        return types.CPointer(kind)(types.int64), generate

    return view


# To be given to numba.carray with a shape.
floats = _pointer(types.float32)
integers = _pointer(types.int32)
