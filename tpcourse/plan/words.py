"""Numbers in words: bytes and seconds with the unit that suits them."""


def amount(nbytes: float) -> str:
    """Bytes in B, kB, MB, GB or TB, of which each is a thousand of the one before."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def time_text(seconds: float) -> str:
    """Seconds in s, ms or µs."""
    for unit in ("s", "ms"):
        if seconds >= 1:
            return f"{seconds:.3g} {unit}"
        seconds *= 1000
    return f"{seconds:.3g} µs"
