"""How a rank calls a learner's function, autograd function or module, and what it hands back.

Each driver returns named tensors and a few facts (plain JSON). They run beside the learner's code, so the
parent believes nothing of what they say beyond the arrays it can compare and the traffic it has seen itself.
"""

import gc

import torch
import torch.distributed as dist
from torch import Tensor

from tpcourse.grade.group import Channel

Answer = tuple[dict[str, Tensor], dict]


def function(
    answer, channel: Channel, tensors: list[Tensor], names: list[str], group: bool, options: dict
) -> Answer:
    """``answer(*tensors[, group], **options)``: its result, and each input as it is afterwards."""
    inputs = dict(zip(names, tensors))
    result = answer(*(inputs.get(name) for name in names), *([dist.group.WORLD] if group else []), **options)
    return _named(result=result, **{f"{name} after the call": t for name, t in inputs.items()})


def autograd(answer, channel: Channel, tensors: list[Tensor], bias: bool) -> Answer:
    """``answer.apply(x, weight, bias, group)``, then backward from the gradient that comes last."""
    *inputs, upstream = tensors
    x, weight, *rest = [t.requires_grad_() for t in inputs]
    b = rest[0] if bias else None
    y = answer.apply(x, weight, b, dist.group.WORLD)
    leaves = {"dX": x, "dW": weight} | ({} if b is None else {"db": b})
    return _backward(channel, y, upstream, leaves)


def differentiable(
    answer, channel: Channel, tensors: list[Tensor], names: list[str], wanted: str, more: list
) -> Answer:
    """``answer(*inputs, group, *more)``, or its ``apply``, then backward from the gradient that comes last.

    Hands back Y, the gradient of the input called ``wanted``, and each input as it is afterwards.
    """
    *inputs, upstream = tensors
    named = dict(zip(names, inputs))
    leaf = named[wanted].requires_grad_()
    y = getattr(answer, "apply", answer)(*inputs, dist.group.WORLD, *more)
    outputs, facts = _backward(channel, y, upstream, {f"d{wanted}": leaf})
    kept, _ = _named(**{f"{name} after the call": t for name, t in named.items()})
    return outputs | kept, facts


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


def _held() -> int:
    """Bytes of every tensor that Python can reach in this process, each storage once."""
    gc.collect()
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if issubclass(type(t), Tensor)
    }
    return sum(storages.values())
