"""The meshes of SUMMA's tests."""


def named(shape):
    """q x q or q x q x d ranks."""
    return dict(zip(("row", "column", "depth"), shape))
