"""Durations in words."""

__all__ = ["in_words"]


def in_words(seconds: float) -> str:
    """Return a duration in words: ``4.5 s``, ``45 s``, ``6:05 min``, ``3:20 h``, ``2.5 days``."""
    if 0 < seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 90:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours}:{minutes:02d} h" if hours < 48 else f"{seconds / 86400:.1f} days"
