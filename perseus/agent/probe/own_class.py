"""Replaces what one object does, and hangs nothing on it: the object gets a class of its own.

Attributes of an object are copied and pickled with it, and a bound method among them keeps it alive until
garbage collection. A subclass of its class does neither: a copy or a pickle has the original class, and does
what the object did before. Standard library only.
"""

import copyreg
import weakref
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Returns a method's replacement, given the method; both are called without the object."""


def put_own_class(
    owner: Any, methods: Mapping[str, Wrap], attributes: Mapping[str, Any] | None = None
) -> tuple[type, Callable[[], None]]:
    """Give an object a subclass of its class, with wrapped methods and further attributes.

    Returns the subclass, which holds no reference to the object, and a function that undoes this.
    """
    own: Any = type(owner)
    reference = weakref.ref(owner)

    class OfItsOwn(type(own)):  # type: ignore[misc]
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs)  # as modules do with their class: such as a slice of a Sequential

    def reduce(self: Any, protocol: Any) -> Any:
        reduced = own.__reduce_ex__(self, protocol)
        if isinstance(reduced, str):
            return reduced
        function, arguments, *rest = reduced
        arguments = tuple(own if each is derived else each for each in arguments)
        if function is copyreg.__newobj__:  # type: ignore[attr-defined]  # pickle refuses another class
            function, arguments = copyreg._reconstructor, (own, object, None)  # type: ignore[attr-defined]
        return (own if function is derived else function, arguments, *rest)

    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__reduce_ex__": reduce}
    wrapped = {name: _method(getattr(own, name), reference, wrap) for name, wrap in methods.items()}
    derived: type = OfItsOwn(own.__name__, (own,), {**names, **wrapped, **(attributes or {})})
    object.__setattr__(owner, "__class__", derived)  # not plainly: wrapper modules forward attributes

    def restore() -> None:
        owner = reference()
        if type(owner) is derived:  # otherwise other code has subclassed it since, which still calls it
            object.__setattr__(owner, "__class__", own)

    return derived, restore


def _method(own: Callable[..., Any], reference: Callable[[], Any], wrap: Wrap) -> Callable[..., Any]:
    @wraps(own)
    def of_owner(*args: Any, **kwargs: Any) -> Any:
        return own(reference(), *args, **kwargs)

    wrapped = wrap(of_owner)

    @wraps(own)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapped(*args, **kwargs) if self is reference() else own(self, *args, **kwargs)

    return method
