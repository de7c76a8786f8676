"""Times and energies for people, in the unit of their size."""

_PREFIXES = {"": 1.0, "m": 1e-3, "µ": 1e-6, "n": 1e-9, "p": 1e-12}

_FEW_DIGITS = 3
_DIGITS = 4


def seconds(time_s: float, decimals: int = 3) -> str:
    """Return a time with so many decimals: "12.345 s"; smaller times in smaller units: "1.234 ms"."""
    return _amount(time_s, "s", decimals)


def joules(energy_j: float, decimals: int = 0) -> str:
    """Return an energy with so many decimals: "1234 J"; where few digits would be left, "1.234 J" or mJ."""
    return _amount(energy_j, "J", decimals)


def _amount(value: float, unit: str, decimals: int) -> str:
    size = abs(value)
    if size == 0 or size * 10**decimals >= 10 ** (_FEW_DIGITS - 1):
        return f"{value:.{decimals}f} {unit}"
    prefix = next((each for each, factor in _PREFIXES.items() if size >= factor), "p")
    shown = value / _PREFIXES[prefix]
    return f"{shown:.{_DIGITS - len(str(int(abs(shown))))}f} {prefix}{unit}"
