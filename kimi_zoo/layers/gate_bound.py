"""The bound of the safe gate: checked where layers are made and where configurations are read."""

import warnings


def check_lower_bound(safe_gate: bool, lower_bound: float | None) -> float | None:
    """The bound of the log-decay gate, or `None` for the unbounded gate.

    **Raises:** `ValueError` for a safe gate without a bound in [-5, 0); warns of a bound that has no effect.
    """
    if not safe_gate:
        if lower_bound:
            warnings.warn(f"lower_bound={lower_bound} has no effect while the safe gate is off.", stacklevel=3)
        return None
    if lower_bound is None or not -5.0 <= lower_bound < 0.0:
        raise ValueError(f"The safe gate needs a `lower_bound` in [-5, 0); got {lower_bound}.")
    return float(lower_bound)
