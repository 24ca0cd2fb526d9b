"""What stands in a graded rank where the package was, so that a learner's imports work and its layers do
not.

`import tpcourse as tp` and `from tpcourse.layers import ColumnParallelLinear` succeed; whatever is taken
from there raises PackageUsed as soon as it is used. ``tpcourse.grade.check`` does nothing.
"""

import gc
import importlib.abc
import importlib.machinery
import sys
import types

SERVING = ("tpcourse.grade", "tpcourse.launch")  # their code runs this process, and knows nothing of layers


class PackageUsed(ImportError):
    """The learner's code used a part of tpcourse that the exercise asks them to write."""


class Absent:
    """Stands for any object of the package; raises PackageUsed when it is called, subclassed or looked
    into.
    """

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)

    def _refuse(self, *args, **kwargs):
        raise PackageUsed(f"{object.__getattribute__(self, '_name')} comes from the package")

    __call__ = __getitem__ = __enter__ = __iter__ = __mro_entries__ = _refuse

    def __getattribute__(self, name: str):
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        raise PackageUsed(f"{object.__getattribute__(self, '_name')}.{name} comes from the package")


class _Module(types.ModuleType):
    __path__: list = []

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        if (self.__name__, name) in (("tpcourse.grade", "check"), ("tpcourse", "load_ipython_extension")):
            return lambda *args, **kwargs: None
        return Absent(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True)
            if name.split(".")[0] == "tpcourse"
            else None
        )

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module) -> None:
        pass


def install() -> None:
    """Forget every module of the package that is not serving this process, and put stand-ins where they
    were.
    """
    for name in [name for name in sys.modules if name.split(".")[0] == "tpcourse"]:
        module = sys.modules.pop(name)
        if not name.startswith(SERVING):
            vars(module).clear()  # its functions lose what they call, should someone dig one up
    sys.meta_path.insert(0, _Finder())
    gc.collect()
