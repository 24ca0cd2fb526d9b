"""How a rank calls a learner's function, autograd function or module, and what it hands back.

Each driver returns named tensors and a few facts (plain JSON). They run beside the learner's code, so the
parent believes nothing of what they say beyond the arrays it can compare and the traffic it has seen itself.
"""

import gc
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tpcourse.grade.group import Channel

Answer = tuple[dict[str, Tensor], dict]


def function(
    answer,
    channel: Channel,
    tensors: list[Tensor],
    names: list[str],
    group: bool,
    options: dict,
    mesh: dict[str, int] | None = None,
    called: str = "result",
) -> Answer:
    """``answer(*tensors[, group], **options)``: its result as ``called``, and each input as it is afterwards.

    With a ``mesh``, in place of the group: this rank's group along each of its dimensions.
    """
    inputs = dict(zip(names, tensors))
    result = answer(*(inputs.get(name) for name in names), *(_groups(mesh) if group else []), **options)
    return _named(**{called: result}, **{f"{name} after the call": t for name, t in inputs.items()})


def autograd(answer, channel: Channel, tensors: list[Tensor], bias: bool) -> Answer:
    """``answer.apply(x, weight, bias, group)``, then backward from the gradient that comes last."""
    *inputs, upstream = tensors
    x, weight, *rest = [t.requires_grad_() for t in inputs]
    b = rest[0] if bias else None
    y = answer.apply(x, weight, b, dist.group.WORLD)
    leaves = {"dX": x, "dW": weight} | ({} if b is None else {"db": b})
    return _backward(channel, y, upstream, leaves)


def differentiable(
    answer,
    channel: Channel,
    tensors: list[Tensor],
    names: list[str],
    wanted: str | list[str],
    more: list,
    mesh: dict[str, int] | None = None,
) -> Answer:
    """``answer(*inputs, group, *more)``, or its ``apply``, then backward from the gradient that comes last.

    Hands back Y, the gradients of the inputs called ``wanted``, and each input as it is afterwards; as a
    fact, the bytes that forward has left behind besides its inputs and Y. ``mesh``: as in `function`.
    """
    *inputs, upstream = tensors
    named = dict(zip(names, inputs))
    wanted = [wanted] if isinstance(wanted, str) else wanted
    leaves = {f"d{name}": named[name].requires_grad_() for name in wanted}
    groups, before = _groups(mesh), _storages()
    with saved_tensors_hooks(Tensor.detach, lambda t: t):  # puts what autograd saves within Python's reach
        y = getattr(answer, "apply", answer)(*inputs, *groups, *more)
    own = {y.untyped_storage().data_ptr()} if isinstance(y, Tensor) else set()
    left = {at: size for at, size in _storages().items() if at not in before and at not in own}
    outputs, facts = _backward(channel, y, upstream, leaves)
    kept, _ = _named(**{f"{name} after the call": t for name, t in named.items()})
    return outputs | kept, facts | {"kept": sum(left.values())}


def number(answer, channel: Channel, tensors: list[Tensor], arguments: dict) -> Answer:
    """``answer(**arguments)``: its result, one number."""
    value = answer(**arguments)
    return _named(result=torch.tensor([value], dtype=torch.float64) if isinstance(value, int | float) else value)


def ways(answer, channel: Channel, tensors: list[Tensor], arguments: dict, single: bool) -> Answer:
    """``answer(**arguments)``: the ways it returns, [ways, 2 + parts]: time, memory and what was chosen.

    A way is (time, memory) or (time, memory, choices). single: one of them comes back, or None for no way.
    """
    found = answer(**{name: [_tuples(one) for one in t] if type(t) is list else t for name, t in arguments.items()})
    if single:
        found = [] if found is None else [found]
    if not isinstance(found, list | tuple):
        missing = ": it is not written yet, or its return is missing" if found is None or found is ... else ""
        raise TypeError(f"your code returned {type(found).__name__} where a list of ways is expected{missing}")
    try:
        rows = [[time, memory, *(names[0] if names else ())] for time, memory, *names in found]
        table = torch.tensor(rows, dtype=torch.float64)
    except (TypeError, ValueError):
        shown = str(found[0] if single else found)[:100]
        raise TypeError(f"your code returned {shown}; a way is (time, memory, choices), numbers all") from None
    return _named(ways=table.reshape(len(rows), -1 if rows else 0))


def _tuples(value: list) -> list | tuple:
    """Lists of numbers, and what begins with one, as the tuples they were before they were sent."""
    if type(value) is not list:
        return value
    items = [_tuples(one) for one in value]
    return items if items and isinstance(items[0], list | tuple) else tuple(items)


def module(
    answer,
    channel: Channel,
    tensors: list[Tensor],
    sizes: list[int],
    seed: int,
    options: dict,
    gradients: dict[str, str],
) -> Answer:
    """Build ``answer(*sizes, group, **options)``, hand back what it starts from, put this rank's own numbers
    in, then forward and backward.

    tensors: x, the upstream gradient, and this rank's part of each parameter in ``gradients``, which says how
    the parameter's gradient is called.
    """
    x, upstream, *shards = tensors
    before = _held()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)
    layer = answer(*sizes, dist.group.WORLD, **options)
    parameters = dict(layer.named_parameters())
    facts = {
        "held": _held() - before,
        "parameters": {k: list(p.shape) for k, p in list(parameters.items())[:8]},
    }
    start = {f"{k} at the start": p.detach().clone() for k, p in parameters.items()}
    wanted = dict(zip(gradients, shards))
    if {k: p.shape for k, p in parameters.items()} != {k: s.shape for k, s in wanted.items()}:
        return start, facts
    for name, shard in wanted.items():
        parameters[name].data.copy_(shard)
    y = layer(x.requires_grad_())
    leaves = {"dX": x} | {gradient: parameters[name] for name, gradient in gradients.items()}
    outputs, more = _backward(channel, y, upstream, leaves)
    return {**start, **outputs}, {**facts, **more}


def _backward(channel: Channel, y: Tensor, upstream: Tensor, leaves: dict[str, Tensor]) -> Answer:
    outputs, facts = _named(Y=y)
    if "Y" in outputs and y.shape == upstream.shape and y.requires_grad:
        channel.send("phase", phase="backward")
        y.backward(upstream)
        gradients, missing = _named(**{name: leaf.grad for name, leaf in leaves.items()})
        outputs, facts = outputs | gradients, facts | missing
    return outputs, facts


def _named(**values) -> Answer:
    """Those of ``values`` that are tensors; of the others, the name of their type."""
    tensors = {name: value.detach() for name, value in values.items() if isinstance(value, Tensor)}
    return tensors, {name: type(value).__name__ for name, value in values.items() if name not in tensors}


_made: dict[str, list[dist.ProcessGroup]] = {}  # by mesh: groups are made once in a rank


def _groups(mesh: dict[str, int] | None) -> list[dist.ProcessGroup]:
    """This rank's group along each dimension of ``mesh``, the last varying fastest; else the world."""
    if not mesh:
        return [dist.group.WORLD]
    if str(mesh) not in _made:
        sizes = tuple(mesh.values())
        places = torch.arange(prod(sizes)).view(sizes)
        lines = [places.movedim(dim, -1).reshape(-1, size) for dim, size in enumerate(sizes)]
        _made[str(mesh)] = [_line(along) for along in lines]
    return _made[str(mesh)]


def _line(lines: Tensor) -> dist.ProcessGroup:
    """That of the ``lines`` of ranks on which this one is; every rank makes all of them, as torch asks."""
    made = {tuple(line): dist.new_group(line) for line in lines.tolist()}
    return next(group for line, group in made.items() if dist.get_rank() in line)


def _held() -> int:
    """Bytes of every tensor that Python can reach in this process, each storage once."""
    return sum(_storages().values())


def _storages() -> dict[int, int]:
    """Where the storage of every tensor that Python can reach lies, and its bytes."""
    gc.collect()
    return {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if issubclass(type(t), Tensor)
    }
