"""A plan on real ranks: the schemes that its formulas stand for."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tpcourse import predict, schemes
from tpcourse.plan.layout import LayerPlan, Plan
from tpcourse.predict.volume import Formulas


def scheme_of(formulas: Formulas, mesh: DeviceMesh, seed: int = 0) -> schemes.Scheme:
    """The real scheme on a mesh that has the dimensions `formulas.mesh`; `seed` is that of dropout."""
    if isinstance(formulas, predict.OneD):
        return schemes.OneD(mesh[formulas.name], formulas.sequence_parallel, seed)
    if isinstance(formulas, predict.TwoD):
        return schemes.TwoD(mesh, seed)
    return schemes.ThreeD(mesh, formulas.leave, formulas.keep_gathered, seed)


def parts_of(plan: Plan, mesh: DeviceMesh, seed: int = 0) -> schemes.Parts:
    """The schemes of this rank's replica, each kind once, on a mesh of its own over the ranks.

    `mesh`: all ranks, replicas first: {"dp": plan.replicas, "tp": plan.ranks}. `seed` is that of dropout; every
    scheme of every replica draws from streams of its own.
    Raises ValueError for a mesh of other sizes, and a plan of several stages: there is no pipeline here.
    """
    if plan.stages > 1:
        raise ValueError(f"the plan has {plan.stages} stages, and these schemes run no pipeline; plan for one")
    if tuple(mesh.shape) != (plan.replicas, plan.ranks):
        raise ValueError(f"the mesh is {tuple(mesh.shape)}, not the plan's {plan.replicas} replicas of "
                         f"{plan.ranks} ranks; start that many ranks, replicas first")
    kinds = list(dict.fromkeys(plan.schemes))
    first = (seed * plan.replicas + mesh.get_local_rank(0)) * len(kinds)
    made = {kind: scheme_of(kind, _own_mesh(kind, mesh), first + number) for number, kind in enumerate(kinds)}

    def layer(planned: LayerPlan) -> schemes.Layer:
        return schemes.Layer(made[planned.attention], made[planned.mlp], planned.recompute)

    return schemes.Parts(made[plan.embedding], tuple(map(layer, plan.layers)), made[plan.head])


def _own_mesh(formulas: Formulas, mesh: DeviceMesh) -> DeviceMesh:
    """The dimensions of one scheme over the ranks of this replica."""
    names, sizes = zip(*formulas.mesh.items())
    whole = init_device_mesh(mesh.device_type, (mesh.size(0), *sizes), mesh_dim_names=("dp", *names))
    return whole[names]
