"""Numbers in words: bytes and seconds with the unit that suits them."""


def amount(nbytes: float) -> str:
    """Bytes in B, kB, MB, GB or TB, of which each is a thousand of the one before."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def too_much(needed: float, there: float) -> str:
    """That more is needed than there is, in digits that show it."""
    texts = amount(needed), amount(there)
    return f"{texts[0]} needed, {texts[1]} there" if len(set(texts)) == 2 else f"{amount(needed - there)} too much"


def time_text(seconds: float) -> str:
    """Seconds in s, ms or µs."""
    for unit in ("s", "ms"):
        if seconds >= 1:
            return f"{seconds:.3g} {unit}"
        seconds *= 1000
    return f"{seconds:.3g} µs"
