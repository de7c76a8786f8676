"""Numbers as the page says them: an account of its own, which the page is held against."""

_PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def seconds(value_s: float) -> str:
    return f"{value_s:.3f} s"


def joules(value_j: float) -> str:
    return _scaled(value_j, "J", 4)


def watts(value_w: float) -> str:
    return _scaled(value_w, "W", 3)


def percent(value: float) -> str:
    return f"{value:z.1f} %".replace("-", "−")


def _scaled(value: float, unit: str, digits: int) -> str:
    factor, prefix = next((each for each in _PREFIXES if value >= each[0]), _PREFIXES[-1])
    shown = value / factor
    decimals = 0 if not prefix and shown >= 100 else digits - len(str(int(shown)))
    return f"{shown:.{decimals}f} {prefix}{unit}"
