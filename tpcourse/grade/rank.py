"""The program of a graded rank: confine itself, take a learner's code, call it, and hand back arrays.

Nothing secret is ever here: a rank gets its own shard of the inputs, and neither the expected values nor the
other ranks'.
"""

import faulthandler
import gc
import os
import signal
import socket
import sys
import traceback
import types
import warnings

import cloudpickle
import torch

from tpcourse.grade import confine, drivers, stand_in
from tpcourse.grade.confine import COURSE
from tpcourse.grade.group import Channel, join
from tpcourse.grade.source import statements

DRIVERS = {
    "function": drivers.function,
    "autograd": drivers.autograd,
    "differentiable": drivers.differentiable,
    "number": drivers.number,
    "ways": drivers.ways,
    "module": drivers.module,
}


def main(control: socket.socket, log: int, config: dict) -> int:
    """Serve commands on ``control`` until the parent hangs up; started through
    `tpcourse.launch.processes`.
    """
    os.close(log)
    os.chdir(config["folder"])
    os.environ.clear()
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    confine.confine(config["memory_bytes"], config["cpu_seconds"])
    stand_in.install()
    channel = Channel(control)
    join(channel, config["rank"], config["ranks"])
    serve(channel)
    return 0


def serve(channel: Channel) -> None:
    """Do what the grading process asks (load cells, load a function, call it), until it hangs up."""
    namespace, faults = _fresh_main(), []
    while True:
        try:
            header, tensors = channel.command()
        except EOFError:
            return
        try:
            if header["do"] == "cells":
                _run_cells(header["cells"], namespace, faults)
                channel.send("loaded", call=header["call"])
            elif header["do"] == "pickle":
                namespace[header["name"]] = cloudpickle.loads(bytes(tensors[0].numpy()))
                channel.send("loaded", call=header["call"])
            else:
                answer = _find(header["name"], namespace, faults)
                outputs, facts = DRIVERS[header["do"]](answer, channel, tensors, **header["settings"])
                facts["never waited for"] = channel.never_waited_for()
                names, tensors = list(outputs), list(outputs.values())
                channel.send("result", tensors, call=header["call"], names=names, facts=facts)
        except Exception as error:
            channel.send("error", **describe(error))
            traceback.clear_frames(error.__traceback__)
        gc.collect()


def describe(error: BaseException) -> dict:
    """An exception as data: type, message and the places in the learner's own code, innermost last."""
    places = [[f.filename, f.lineno, f.name] for f in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        places.append([error.filename, error.lineno, ""])
    own = [
        place
        for place in places
        if not str(place[0]).startswith((sys.prefix, sys.base_prefix, COURSE, "<frozen"))
    ]
    return {"type": type(error).__name__, "message": str(error)[:2000], "places": own[-8:]}


def _fresh_main() -> dict:
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    return module.__dict__


def _run_cells(cells: list, namespace: dict, faults: list) -> None:
    """Run each statement of ``cells`` that defines something; one that fails is noted and the next one is
    tried.
    """
    for label, text in cells:
        try:
            for code, beginning in statements(text, label):
                try:
                    exec(code, namespace)
                except Exception as error:
                    faults.append((beginning, describe(error)))
        except Exception as error:  # SyntaxError, or what the parser makes of odd text
            faults.append((text, describe(error)))


def _find(name: str, namespace: dict, faults: list) -> object:
    if name in namespace:
        return namespace[name]
    fault = next((fault for text, fault in reversed(faults) if name in text), None)
    if fault and fault["type"] == "PackageUsed":
        raise stand_in.PackageUsed(fault["message"])
    where = (
        f"{fault['places'][-1][0]}, line {fault['places'][-1][1]}"
        if fault and fault["places"]
        else "its cell"
    )
    why = f": {where} stops with {fault['type']}: {fault['message']}" if fault else ""
    raise NameError(f"{name} is not defined in this notebook{why}")
