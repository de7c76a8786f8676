"""Numbers as the page must show them: an independent implementation to compare the page with."""

_PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def seconds(value_s: float) -> str:
    return f"{value_s:.3f} s"


def joules(value_j: float) -> str:
    return _scaled(value_j, "J", 4)


def watts(value_w: float) -> str:
    return _scaled(value_w, "W", 3)


def percent(value: float) -> str:
    return f"{value:z.1f} %".replace("-", "−")


def kwh(value_kwh: float, margin_kwh: float | None = None) -> str:
    """Format at least 0.1 kWh, so that three decimals are enough; with a margin of at least 0.01 kWh."""
    assert value_kwh >= 0.1
    assert margin_kwh is None or margin_kwh >= 0.01
    decimals = 1 if value_kwh >= 1000 and margin_kwh is None else 3
    within = "" if margin_kwh is None else f" ± {margin_kwh:.{decimals}f}"
    return f"{value_kwh:.{decimals}f}{within} kWh"


def money(value: float) -> str:
    assert value >= 0.1
    return f"{value:.2f}"


def carbon(value_g: float) -> str:
    assert 1 <= value_g < 1e6
    return f"{value_g:.2f} g" if value_g < 1e3 else f"{value_g / 1e3:.2f} kg"


def _scaled(value: float, unit: str, digits: int) -> str:
    factor, prefix = next((each for each in _PREFIXES if value >= each[0]), _PREFIXES[-1])
    shown = value / factor
    decimals = 0 if not prefix and shown >= 100 else digits - len(str(int(shown)))
    return f"{shown:.{decimals}f} {prefix}{unit}"
